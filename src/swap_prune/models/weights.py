"""Reading weights into a model, from safetensors files only: they can't run code."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from swap_prune.errors import InputError


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Copy the tensors of a safetensors file into a model.

    Everything is checked first: on an error the model is as it was.

    Args:
        model: The model; the file must hold its state dict, no more and no less, but for further
            names of tied weights.
        path: The safetensors file.

    Raises:
        InputError: The file can't be read, or a tensor is missing, unexpected or doesn't fit.
    """
    found = _read(Path(path))
    state = model.state_dict()
    # What a module keeps besides tensors (`get_extra_state`) is no matter of the file.
    expected = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    filled = {expected[key].data_ptr() for key in found if key in expected}
    for key, tensor in expected.items():
        # Of the names of a tied weight, safetensors' own `save_model` writes one.
        if key not in found and tensor.data_ptr() not in filled:
            raise InputError(
                f"weights {str(path)!r} have no tensor {key!r}, which the model expects "
                f"with shape {tuple(tensor.shape)}"
            )
    for key, tensor in found.items():
        if key not in expected:
            raise InputError(
                f"weights {str(path)!r} hold a tensor {key!r} of shape {tuple(tensor.shape)}, "
                f"which the model doesn't have; it has {', '.join(list(expected)[:3])}, ..."
            )
        if _kind(tensor) != _kind(expected[key]):
            raise InputError(
                f"tensor {key!r} of weights {str(path)!r} is {_kind(tensor)}, "
                f"but the model expects {_kind(expected[key])}"
            )
    model.load_state_dict(state | found)


def _kind(tensor: Tensor) -> str:
    """What must agree: the shape, and floating point or not; half precision is welcome."""
    numbers = "floating-point" if tensor.is_floating_point() else "integer"
    return f"{numbers} of shape {tuple(tensor.shape)}"


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        what = "are a directory" if path.is_dir() else "don't exist"
        raise InputError(f"weights {str(path)!r} {what}; a safetensors file is accepted")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"weights {str(path)!r} can't be read as a safetensors file ({error})"
        ) from error
