"""CIFAR-10, from our one-file cache or from the batches in which it was published."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import TensorDataset

from swap_prune.errors import InputError

CACHED = "cifar10.safetensors"
BATCHES = "cifar-10-batches-py"
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"

# What a pickled array names; numpy 2 moved the function, and the published files have the old name.
_rebuild_array = np.empty(0).__reduce__()[0]
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _rebuild_array,
    ("numpy._core.multiarray", "_reconstruct"): _rebuild_array,
}


def read(directory: Path) -> tuple[TensorDataset, TensorDataset]:
    """The training and test images of a directory.

    Args:
        directory: Holds `CACHED` or the folder `BATCHES`, or is that folder.

    Returns:
        Two data sets of normalised images (N, 3, 32, 32) and labels (N,).
    """
    if (directory / CACHED).is_file():
        tensors = _read_cached(directory / CACHED)
    elif (directory / BATCHES).is_dir():
        tensors = _read_batches(directory / BATCHES)
    elif (directory / TEST_BATCH).is_file():
        tensors = _read_batches(directory)
    else:
        raise InputError(
            f"directory {str(directory)!r} has neither {CACHED!r} nor {BATCHES!r}: run "
            "`swap-prune data fetch cifar10`, or give a directory with one of them"
        )
    return _data_set(tensors, "train"), _data_set(tensors, "test")


def _data_set(tensors: dict[str, Tensor], split: str) -> TensorDataset:
    # In place, since the training images alone take 600 MB.
    images = tensors[f"{split}_images"].float().div_(255).sub_(0.5).div_(0.5)
    return TensorDataset(images, tensors[f"{split}_labels"].long())


def _read_cached(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"file {str(path)!r} can't be read ({error})") from error
    expected = {"train_images", "train_labels", "test_images", "test_labels"}
    if set(tensors) != expected:
        raise InputError(
            f"file {str(path)!r} holds {sorted(tensors)}; {sorted(expected)} are expected"
        )
    return tensors


def _read_batches(folder: Path) -> dict[str, Tensor]:
    train = [_read_batch(folder / name) for name in TRAIN_BATCHES]
    test_images, test_labels = _read_batch(folder / TEST_BATCH)
    return {
        "train_images": torch.cat([images for images, _ in train]),
        "train_labels": torch.cat([labels for _, labels in train]),
        "test_images": test_images,
        "test_labels": test_labels,
    }


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with path.open("rb") as file:
            # The published files were written by Python 2: their strings arrive as bytes.
            batch = ArrayUnpickler(file, encoding="bytes").load()
    # A broken pickle can raise nearly anything.
    except Exception as error:
        raise InputError(f"file {str(path)!r} isn't a CIFAR-10 batch ({error})") from error
    images = batch.get(b"data") if isinstance(batch, dict) else None
    labels = batch.get(b"labels") if isinstance(batch, dict) else None
    if (
        not isinstance(images, np.ndarray)
        or images.dtype != np.uint8
        or images.shape[1:] != (3072,)
        or not isinstance(labels, list)
        or len(labels) != len(images)
    ):
        raise InputError(
            f"file {str(path)!r} isn't a CIFAR-10 batch: bytes (N, 3072) under 'data' and "
            "N 'labels' are expected"
        )
    return torch.from_numpy(images).reshape(-1, 3, 32, 32), torch.tensor(labels)


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays and plain containers, and refuses everything else.

    A pickle can call any function it can name, so only what rebuilds arrays can be named.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Look up what the pickle names among the allowed."""
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")
        return ALLOWED[module, name]
