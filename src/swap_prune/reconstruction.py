"""What the weights of a layer that stay make good for those that are cut, by the layer's outputs.

An output of a Linear or Conv layer is `w · a`, where `a` (d,) are the inputs that meet its weights:
all of the layer's, or a patch of them. A few hundred images have thousands of patches, so that
`A = E[a aᵀ]` is known well where gradients are too few to tell their curvature, and no noise of
gradients or labels touches it. For every output the minimum of

    E (w · a - w_bar · a)² + λ ‖w - w_bar‖²,    w zero where weights are cut,

is a system of its own, with the same A for all outputs that see the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from swap_prune.evaluation import outputs_of
from swap_prune.gradients.rows import FACTORED_FORWARDS, Convolution, padding_widths
from swap_prune.prunable import PrunableWeights

# Inputs that A is the mean of; with fewer, those of earlier stages count too.
VECTORS = 10_000
# Inputs that are seen together at most: in a layer of more, only neighbours make good for another.
MOST_INPUTS = 1024
# Entries of the systems that are solved at once: 32 MiB, which the allocator hands out again.
NUMBERS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Moments:
    """The second moments of a layer's inputs.

    Attributes:
        mean: A (groups, blocks, size, size) for every group of channels, for blocks of inputs.
        inputs: d, of which the last block may have fewer than `size`; the others there are zero.
        vectors: how many inputs were seen.
    """

    mean: Tensor
    inputs: int
    vectors: int

    def joined(self, earlier: Moments) -> Moments:
        """With what an earlier stage saw, as far as this one saw fewer than `VECTORS`."""
        kept = min(earlier.vectors, max(0, VECTORS - self.vectors))
        if not kept:
            return self
        total = self.vectors + kept
        mean = (self.vectors * self.mean + kept * earlier.mean) / total
        return Moments(mean, self.inputs, total)


def input_moments(
    model: nn.Module, weights: PrunableWeights, inputs: Any, generator: torch.Generator
) -> list[Moments | None]:
    """The moments of each weight's inputs in eval mode.

    None for a weight that is used otherwise than by Linear and Conv layers, or not at all.

    Args:
        model: called on the inputs, layer by layer with its weights of the moment.
        weights: whose inputs are wanted.
        inputs: calibration inputs, samples first.
        generator: draws the patches, where there are more than `VECTORS`.
    """
    samples = tree_leaves(inputs)[0].shape[0]
    sums: dict[str, tuple[Tensor, int, int]] = {}
    handles = []
    for name, _, _ in weights.slices():
        layers = _layers_of(model, model.get_parameter(name))

        def add(layer: Any, args: tuple[Tensor, ...], _: Any, name: str = name) -> None:
            share = math.ceil(VECTORS * _batch_of(layer, args[0]) / samples)
            vectors = _vectors(layer, args[0].detach(), share, generator)
            found = _squares(vectors)
            before, _, count = sums.get(name, (torch.zeros_like(found), 0, 0))
            sums[name] = before + found, vectors.shape[2], count + vectors.shape[1]

        handles += [layer.register_forward_hook(add) for layer in layers]
    try:
        for _ in outputs_of(model, inputs):
            pass
    finally:
        for handle in handles:
            handle.remove()
    return [
        Moments(sums[name][0] / sums[name][2], *sums[name][1:]) if name in sums else None
        for name in weights.names
    ]


def _layers_of(model: nn.Module, weight: nn.Parameter) -> list[nn.Module]:
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


def _batch_of(layer: nn.Linear | Convolution, a: Tensor) -> int:
    """How many samples the layer's input has."""
    single = not isinstance(layer, nn.Linear) and a.ndim == len(layer.kernel_size) + 1
    return 1 if single or a.ndim < 2 else a.shape[0]


def _vectors(
    layer: nn.Linear | Convolution, a: Tensor, most: int, generator: torch.Generator
) -> Tensor:
    """At most so many of the inputs (groups, vectors, d) that meet the layer's weights."""
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


def _some(total: int, most: int, generator: torch.Generator) -> Tensor:
    """The sorted numbers of at most `most` of `total` things."""
    if total <= most:
        return torch.arange(total)
    return torch.randperm(total, generator=generator)[:most].sort().values


def _squares(vectors: Tensor) -> Tensor:
    """`Σ a aᵀ` (groups, blocks, size, size) of vectors (groups, m, d)."""
    blocks = _blocked(vectors)  # (groups, blocks, m, size)
    return blocks.mT @ blocks


def _blocked(tensor: Tensor) -> Tensor:
    """(groups, m, d) as (groups, blocks, m, size), the last block filled up with zeros."""
    d = tensor.shape[2]
    size = min(d, MOST_INPUTS)
    return functional.pad(tensor, (0, -d % size)).unflatten(2, (-1, size)).transpose(1, 2)


def reconstructed(
    w_bar: Tensor,
    support: Tensor,
    layers: Sequence[slice],
    moments: Sequence[Moments | None],
    dampings: Sequence[float],
) -> Tensor:
    """The minimum of each output, for every damping: weights (dampings, p), zero off the support.

    Args:
        w_bar: the weights (p,).
        support: the indices (s,) of the weights that stay.
        layers: the slice of each layer.
        moments: those of each layer's inputs; where there are none, weights stay as they are.
        dampings: the values of λ, relative to the mean of A's diagonal.
    """
    stays = torch.zeros(len(w_bar), dtype=torch.bool)
    stays[support] = True
    solutions = torch.where(stays, w_bar, 0.0).repeat(len(dampings), 1)
    for layer, moment in zip(layers, moments, strict=True):
        if moment is not None:
            solutions[:, layer] += _steps(w_bar[layer], stays[layer], moment, dampings)
    return solutions


def _steps(w: Tensor, kept: Tensor, moments: Moments, dampings: Sequence[float]) -> Tensor:
    """How far the weights of a layer move (dampings, weights), zero for those that are cut."""
    groups, blocks, size, _ = moments.mean.shape
    shape = (groups, -1, moments.inputs)
    lost = _blocked(w.masked_fill(kept, 0.0).view(shape))  # (groups, blocks, outputs, size)
    right = (lost @ moments.mean).flatten(0, 2)
    inside = _blocked(kept.view(shape)).flatten(0, 2)
    outputs = lost.shape[2]
    matrices = moments.mean.flatten(0, 1)
    # The zeros that fill up a block are no inputs.
    means = matrices.diagonal(dim1=1, dim2=2).sum(1) * (blocks / moments.inputs)
    steps = torch.zeros(len(dampings), len(right), size)
    counts = inside.sum(1)
    wanted = (counts > 0) & (right != 0).any(1)
    order = counts.argsort(stable=True)
    for part, length in _parts(order[wanted[order]], counts):
        which = part // outputs
        first, valid = _kept_first(inside[part], length)
        found = _solved(
            matrices[which[:, None, None], first[:, :, None], first[:, None, :]].double(),
            right[part].gather(1, first).masked_fill(~valid, 0.0).double(),
            valid,
            means[which].double(),
            dampings,
        )
        for step, solution in zip(steps, found, strict=True):
            step[part] = step[part].scatter(1, first, solution.to(step.dtype))
    whole = steps.view(len(dampings), groups, blocks, outputs, size).transpose(2, 3).flatten(3)
    return whole[..., : moments.inputs].reshape(len(dampings), -1)


def _parts(order: Tensor, counts: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Systems to solve at once, and the length of the longest; in ascending order of length."""
    start = 0
    while start < len(order):
        # The longest is the last; how many there are depends on it, so it is looked for twice.
        guess = max(1, NUMBERS_AT_ONCE // int(counts[order[start]]) ** 2)
        length = int(counts[order[start : start + guess]].max())
        part = order[start : start + max(1, NUMBERS_AT_ONCE // length**2)]
        yield part, length
        start += len(part)


def _kept_first(inside: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Where the weights that stay are (systems, length), and which of these places are filled."""
    first = inside.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :length]
    return first, inside.gather(1, first)


def _solved(
    systems: Tensor, right: Tensor, valid: Tensor, means: Tensor, dampings: Sequence[float]
) -> Iterator[Tensor]:
    """The solutions (systems, length) for every damping; zero where there is no minimum."""
    systems.masked_fill_(~(valid[:, :, None] & valid[:, None, :]), 0.0)
    diagonal = systems.diagonal(dim1=1, dim2=2)
    before = torch.where(valid, diagonal, 1.0)
    for damping in dampings:
        diagonal.copy_(before + damping * means[:, None])
        factors, failed = torch.linalg.cholesky_ex(systems)
        found = torch.cholesky_solve(right[:, :, None], factors)[:, :, 0]
        yield found.masked_fill((failed != 0)[:, None] | ~valid, 0.0)
