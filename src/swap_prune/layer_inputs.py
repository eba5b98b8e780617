"""The inputs that the weights of Linear and Conv layers meet."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from swap_prune.gradients.rows import FACTORED_FORWARDS, Convolution, padding_widths


def layers_of(model: nn.Module, weight: nn.Parameter) -> list[nn.Module]:
    """The Linear and Conv layers with this weight; none if something else has it too."""
    owners = [
        module
        for module in model.modules()
        if any(parameter is weight for parameter in module.parameters(recurse=False))
    ]
    plain = all(
        type(owner).forward in FACTORED_FORWARDS and owner.weight is weight for owner in owners
    )
    return owners if plain else []


def input_vectors(
    layer: nn.Linear | Convolution,
    a: Tensor,
    most: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The inputs (groups, vectors, d) that meet the layer's weights, in the order of the samples.

    Args:
        layer: whose weights.
        a: the layer's own inputs, samples first.
        most: so many of the vectors are drawn if there are more; all by default.
        generator: what draws them.
    """
    if isinstance(layer, nn.Linear):
        flat = a.reshape(-1, a.shape[-1])
        return flat[_some(len(flat), most, generator)][None].float()
    spatial = len(layer.kernel_size)
    if a.ndim == spatial + 1:
        a = a[None]
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    a = functional.pad(a, padding_widths(layer), mode=mode).movedim(1, -1)
    places = [
        (length - spread * (kernel - 1) - 1) // step + 1
        for length, kernel, step, spread in zip(
            a.shape[1:-1], layer.kernel_size, layer.stride, layer.dilation, strict=True
        )
    ]
    drawn = _some(len(a) * math.prod(places), most, generator)
    sample, *position = torch.unravel_index(drawn, (len(a), *places))
    index = [sample.view(-1, *[1] * spatial)]
    for axis, (start, kernel, step, spread) in enumerate(
        zip(position, layer.kernel_size, layer.stride, layer.dilation, strict=True)
    ):
        along = start[:, None] * step + torch.arange(kernel) * spread
        index.append(along.view(-1, *(kernel if i == axis else 1 for i in range(spatial))))
    patches = a[tuple(index)].movedim(-1, 1)  # (vectors, channels, *kernel)
    return patches.reshape(len(drawn), layer.groups, -1).transpose(0, 1).float()


def _some(total: int, most: int | None, generator: torch.Generator | None) -> Tensor:
    """The sorted numbers of all of `total` things, or of `most` draws of them."""
    if most is None or total <= most:
        return torch.arange(total)
    # One may be drawn twice: to rule that out would take longer than all the rest.
    return torch.randint(total, (most,), generator=generator).sort().values
