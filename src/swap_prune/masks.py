"""Masks as part of a model while it trains: whatever the training loop, pruned weights stay zero.

A masked weight is `where(mask, original, 0)`, computed whenever a module reads it, by torch's
parametrisations. The optimiser sees `original`, the same `Parameter` as before, whose gradient is
zero where it is pruned; what weight decay or momentum do to it there never reaches the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from swap_prune.calling import check_module
from swap_prune.errors import InputError


class Mask(nn.Module):
    """The parametrisation of one weight; tied weights share it.

    Args:
        mask: True where a weight stays, of the weight's shape.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with exact zeros, whatever stands in the pruned places."""
        # Unlike a product this yields no -0.0, and no NaN from an infinite weight or gradient.
        return torch.where(self.mask, weight, 0.0)


def is_masked(model: nn.Module) -> bool:
    """Whether `apply_masks` has been called without `make_permanent`."""
    return any(isinstance(module, Mask) for module in model.modules())


def apply_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Hold the pruned weights of `model` at zero, in training too, until `make_permanent`.

    The model's parameters stay the same objects, so an optimiser may be made before or after.
    Until `make_permanent` they are called `parametrizations.<name>.original`, and the state dict
    holds the masks as well. A masked model can be copied and evaluated; torch can't pickle it.

    Args:
        model: any module; changed in place.
        masks: by parameter name, boolean tensors of the parameter's shape, True where a weight
            stays. A weight tied to others is masked everywhere, under any one of its names.

    Raises:
        InputError: a mask does not fit, or the model has masks already; the model is unchanged.
    """
    check_module(model)
    if not isinstance(masks, Mapping):
        raise InputError(
            f"masks is of type {type(masks).__name__}; give a dict from parameter names to tensors"
        )
    if is_masked(model):
        raise InputError("the model already has masks; call make_permanent before new ones")
    by_weight: dict[int, Mask] = {}
    named = dict(model.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        if name not in named:
            known = ", ".join(list(named)[:8]) + (", ..." if len(named) > 8 else "")
            raise InputError(f"masks name {name!r}, which the model has not: it has {known}")
        weight = named[name]
        if weight.is_inference():
            raise InputError(
                f"the model's parameter {name} was made under torch.inference_mode() and takes no "
                "masks; copy.deepcopy(model) outside of it does"
            )
        _check_mask(name, mask, weight)
        if id(weight) in by_weight:
            raise InputError(f"masks name the tied weight {name!r} twice; give one mask for it")
        # On the device and in the memory format of the weight: no conversion in forward passes.
        by_weight[id(weight)] = Mask(torch.empty_like(weight, dtype=torch.bool).copy_(mask))
    places = [
        (module, leaf, by_weight[id(weight)])
        for module in model.modules()
        for leaf, weight in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(weight) in by_weight
    ]
    order = {module: tuple(module._parameters) for module, _, _ in places}
    for module, leaf, parametrisation in places:
        if parametrize.is_parametrized(module):
            _own_class(module)
        parametrize.register_parametrization(module, leaf, parametrisation)
        module.parametrizations.order = order[module]  # type: ignore[union-attr]


def make_permanent(model: nn.Module) -> None:
    """Undo `apply_masks`, with pruned weights exactly zero and names, order and ties as before."""
    check_module(model)
    places = list(_masked_places(model))
    for module, leaf, mask in places:
        weight = module.parametrizations[leaf].original  # type: ignore[index, union-attr]
        with torch.no_grad():
            weight.masked_fill_(~mask, 0.0)
    for module, leaf, _ in places:
        order = module.parametrizations.order  # type: ignore[union-attr]
        _own_class(module)
        parametrize.remove_parametrizations(module, leaf, leave_parametrized=False)
        for name in order:  # type: ignore[union-attr]
            if name in module._parameters:  # torch has put the weight last
                module._parameters[name] = module._parameters.pop(name)


def _masked_places(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield modules with masked weights, the weights' names in them, and the masks."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for leaf, parametrisations in module.parametrizations.items():  # type: ignore[union-attr, operator]
                if isinstance(parametrisations[0], Mask):
                    yield module, leaf, parametrisations[0].mask


def _own_class(module: nn.Module) -> None:
    """Give a parametrised module a class that no copy of it shares.

    Torch keeps the properties of masked weights in the class, which `copy.deepcopy` does not copy:
    adding them to one module or removing them would break its copies.
    """
    kind = type(module)
    content = {
        key: value for key, value in kind.__dict__.items() if key not in ("__dict__", "__weakref__")
    }
    module.__class__ = type(kind.__name__, kind.__bases__, content)


def _check_mask(name: str, mask: Tensor, weight: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"the mask of {name} is of {kind}; it must be a tensor of torch.bool")
    if mask.shape != weight.shape:
        raise InputError(
            f"the mask of {name} has shape {tuple(mask.shape)}; "
            f"the weight's is {tuple(weight.shape)}"
        )
