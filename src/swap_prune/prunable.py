"""Which weights may be pruned, and the flat vector `w` (p,) that the mathematics works on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from swap_prune.calling import check_module
from swap_prune.errors import InputError

Selector = str | type[nn.Module]

DEFAULT_TYPES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class PrunableWeights:
    """The prunable weights of a model as consecutive slices of one vector of p entries.

    Attributes:
        names: parameter names, in the model's order; a tied weight appears once.
        shapes: the shape of each.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def size(self) -> int:
        """The number p of prunable weights."""
        return sum(prod(shape) for shape in self.shapes)

    def slices(self) -> Iterator[tuple[str, torch.Size, slice]]:
        """Yield the name, the shape and the slice of the flat vector of each weight."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            stop = start + prod(shape)
            yield name, shape, slice(start, stop)
            start = stop

    def read(self, model: nn.Module) -> Tensor:
        """Copy the weights out of `model` as a float32 vector (p,)."""
        parts = [model.get_parameter(name).detach().flatten() for name in self.names]
        return torch.cat(parts).to(torch.float32)

    def write(self, model: nn.Module, w: Tensor) -> None:
        """Copy the vector `w` (p,) into the weights of `model`, in place."""
        with torch.no_grad():
            for name, shape, part in self.slices():
                weight, new = model.get_parameter(name), w[part].view(shape)
                if weight.dtype == torch.float64:  # not rounded where it hasn't moved
                    unmoved = (weight.to(new.dtype) == new) & (new != 0)
                    new = torch.where(unmoved, weight, new.double())
                weight.copy_(new)

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[list[nn.Parameter]]:
        """The weights themselves, to be changed at will: they are restored to the bit."""
        parameters = [model.get_parameter(name) for name in self.names]
        saved = [parameter.detach().clone() for parameter in parameters]
        try:
            yield parameters
        finally:
            with torch.no_grad():
                for parameter, exact in zip(parameters, saved, strict=True):
                    parameter.copy_(exact)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """View a vector (p,) as one tensor per weight, by name."""
        return {name: vector[part].view(shape) for name, shape, part in self.slices()}


def select_weights(
    model: nn.Module,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] = (),
) -> PrunableWeights:
    """Choose the prunable weights of a model.

    A selector is a module type (its `weight`, or the matrices that an LSTM or attention has in its
    place) or a string: the name of a parameter or of a module ("fc1"), the class name of a module
    ("Embedding"), which mean what a type does, or a shell pattern of parameters' or classes' names
    ("layer*.conv?.weight", "Conv*"). A vector, such as a bias or the scale of a norm, is only
    meant by a pattern of parameters that ends with its own name ("*.bias"): "layer1.*" leaves it
    alone. A tied weight counts once, under its first name, and is chosen when any of its names is.
    Frozen parameters (`requires_grad=False`) are weights like any other: exclude those that must
    stay.

    Args:
        model: any module.
        include: what to choose from; default: the weights of Linear and Conv1d-3d layers.
        exclude: what to leave out of that.

    Raises:
        InputError: if nothing is left, a selector matches nothing, or a weight has no data.
    """
    check_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("model is a ScriptModule, whose layers can't be changed; give its source")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise InputError("model is one that torch.compile made; give its source, model._orig_mod")
    include = None if include is None else selectors("include", include)
    exclude = selectors("exclude", exclude)
    chosen_by = list(DEFAULT_TYPES if include is None else include)
    first_name: dict[int, str] = {}
    included: set[int] = set()
    excluded: set[int] = set()
    used: set[Selector] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, DEFAULT_TYPES) and "weight" not in module._parameters:
            spared = {s for s in exclude if _matches(s, path, "weight", module)}
            used |= spared
            if not spared and any(_matches(s, path, "weight", module) for s in chosen_by):
                raise InputError(
                    f"the weight of {path or 'the model'} ({type(module).__name__}) is made from "
                    f"other parameters, as by weight_norm; make it one with {_remover(module)}, or "
                    "exclude the layer"
                )
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{leaf}" if path else leaf
            first_name.setdefault(id(parameter), name)
            for wanted, matched in ((chosen_by, included), (exclude, excluded)):
                hits = {s for s in wanted if _matches(s, path, leaf, module)}
                used |= hits
                if hits:
                    matched.add(id(parameter))
    for selector in [*(include or ()), *exclude]:
        if selector not in used:
            known = ", ".join(list(first_name.values())[:8])
            raise InputError(
                f"the selector {selector!r} in include or exclude matches no weight of the model; "
                f"its parameters are {known}{', ...' if len(first_name) > 8 else ''}"
            )
    names = [
        name
        for key, name in first_name.items()
        if key in included - excluded and model.get_parameter(name).numel()
    ]
    if not names:
        raise InputError(
            "the model has no prunable weight: include must match at least one parameter "
            "that exclude does not (default: weights of Linear and Conv layers)"
        )
    for name in names:
        _check_weight(name, model.get_parameter(name))
    return PrunableWeights(tuple(names), tuple(model.get_parameter(name).shape for name in names))


def selectors(name: str, given: Any) -> tuple[Selector, ...]:
    """The selectors as a tuple; a single one counts as a list of one."""
    several = (given,) if isinstance(given, (str, type)) else given
    if not isinstance(several, (list, tuple)) or not all(
        isinstance(selector, (str, type)) for selector in several
    ):
        raise InputError(f"{name}={given!r} must be name patterns or module types")
    return tuple(several)


def _matches(selector: Selector, path: str, leaf: str, module: nn.Module) -> bool:
    """Whether a selector means the parameter `leaf` of the module at `path`."""
    is_matrix = getattr(module, leaf).ndim > 1
    # LSTMs and attention have several of other names, such as weight_ih_l0 and in_proj_weight.
    one_of_several = "weight" not in module._parameters and "weight" in leaf and is_matrix
    is_weight = leaf == "weight" or one_of_several
    if not isinstance(selector, str):
        return is_weight and isinstance(module, selector)
    kind = type(module).__name__
    if is_weight and (selector in (path, kind) or (is_matrix and fnmatchcase(kind, selector))):
        return True
    meant = selector.endswith(leaf) or is_matrix
    return meant and fnmatchcase(f"{path}.{leaf}" if path else leaf, selector)


def _remover(module: nn.Module) -> str:
    """What makes an ordinary weight of one that is made from other parameters."""
    if "weight_g" in module._parameters:
        return "torch.nn.utils.remove_weight_norm"
    if "weight_orig" in module._parameters:
        return "torch.nn.utils.remove_spectral_norm"
    return "torch.nn.utils.parametrize.remove_parametrizations"


def _check_weight(name: str, weight: nn.Parameter) -> None:
    if not weight.is_floating_point():
        raise InputError(
            f"the weight {name} is of {weight.dtype}; only real floating-point weights are prunable"
        )
    if not torch.isfinite(weight.detach()).all():
        raise InputError(f"the weight {name} holds NaN or infinite values; prune a finite model")
