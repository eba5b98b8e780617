"""How the weights of a layer that stay make up for those that are cut, by the layer's outputs.

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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from swap_prune.evaluation import batch_samples, outputs_of
from swap_prune.layer_inputs import input_vectors, layers_of
from swap_prune.prunable import PrunableWeights

# Samples of a stage whose inputs are looked at: a pass over more would take too much of its time.
SAMPLES = 500
# Inputs that A is the mean of; with fewer, those of earlier stages count too.
VECTORS = 10_000
# Inputs that are seen together at most: in a layer of more, only neighbours make up for another.
MOST_INPUTS = 1024
# Entries of the systems that are solved at once: 4 MiB, which stay in the cache.
NUMBERS_AT_ONCE = 2**19


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

    None for a weight of other layers than Linear and Conv, for one that is not used, and for one
    whose inputs can't be read (nested tensors, a layer inside `vmap`).

    Args:
        model: called on the inputs, layer by layer with its weights of the moment.
        weights: whose inputs are wanted.
        inputs: calibration inputs, samples first.
        generator: draws the patches, where there are more than `VECTORS`.
    """
    samples = tree_leaves(inputs)[0].shape[0]
    share = 0  # of a pass over a batch, for every call of a layer
    found: dict[str, Moments] = {}
    unreadable: set[str] = set()

    def add(name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        try:
            a = args[0] if args else kwargs["input"]
            if a.numel():
                squares, vectors = _squares(input_vectors(layer, a.detach(), share, generator))
                before = found.get(name, Moments(torch.zeros_like(squares), 0, 0))
                count = before.vectors + vectors
                mean = (before.vectors * before.mean + squares) / count
                # Inside vmap this raises, and that is what it is for, too.
                if not torch.isfinite(mean).all():
                    raise ValueError("inputs are beyond float32")
                found[name] = Moments(mean, layer.weight[0].numel(), count)
        except Exception:  # the model is the user's: a layer's input may be anything
            unreadable.add(name)

    handles = [
        layer.register_forward_hook(partial(add, name), with_kwargs=True)
        for name in weights.names
        for layer in layers_of(model, model.get_parameter(name))
    ]
    try:
        for part in torch.arange(samples).split(batch_samples(model, inputs)):
            share = math.ceil(VECTORS * len(part) / samples)
            for _ in outputs_of(model, tree_map(lambda leaf, part=part: leaf[part], inputs)):
                pass
    except Exception:  # a model that runs as it is, but not with hooks on its layers
        return [None] * len(weights.names)
    finally:
        for handle in handles:
            handle.remove()
    return [None if name in unreadable else found.get(name) for name in weights.names]


def _squares(vectors: Tensor) -> tuple[Tensor, int]:
    """`Σ a aᵀ` (groups, blocks, size, size) of vectors (groups, m, d), and m."""
    blocks = _blocked(vectors)  # (groups, blocks, m, size)
    return blocks.mT @ blocks, vectors.shape[1]


def _blocked(tensor: Tensor) -> Tensor:
    """(groups, m, d) as (groups, blocks, m, size), the last block filled up with zeros."""
    d = tensor.shape[2]
    blocks = math.ceil(d / MOST_INPUTS)
    size = math.ceil(d / blocks)
    filled = functional.pad(tensor, (0, blocks * size - d))
    return filled.unflatten(2, (blocks, size)).transpose(1, 2)


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
    """How far the weights of a layer move (dampings, weights), zero for those that are cut.

    With S the weights of an output that stay, C those that are cut and `H = A + λ I`, it is
    `H_SS⁻¹ A_SC w_C`; or, where fewer are cut, the same by one inverse of H for all outputs:
    `- [H⁻¹]_SC ([H⁻¹]_CC)⁻¹ w_C`.
    """
    groups, blocks, size, _ = moments.mean.shape
    shape = (groups, -1, moments.inputs)
    lost = _blocked(w.masked_fill(kept, 0.0).view(shape)).flatten(0, 1).double()
    outputs = lost.shape[1]
    inside, cut = (_blocked(mask.view(shape)).flatten(0, 2) for mask in (kept, ~kept))
    matrices = moments.mean.flatten(0, 1).double()
    lengths = (moments.inputs - size * torch.arange(blocks)).clamp_max(size).repeat(groups)
    means = matrices.diagonal(dim1=1, dim2=2).sum(1) / lengths
    right = (lost @ matrices).flatten(0, 1)
    wanted = (lost.flatten(0, 1) != 0).any(1) & inside.any(1)
    many = wanted & (cut.sum(1) >= inside.sum(1))
    few = wanted & ~many
    shifts = torch.tensor(dampings, dtype=torch.float64)[:, None] * means
    found = _solved(matrices, right, inside, many, shifts)
    if bool(few.any()):
        for step, shift in zip(found, shifts, strict=True):
            inverse = _inverse(matrices + torch.diag_embed(shift[:, None].expand(-1, size)))
            nothing = torch.zeros_like(shift[None])
            within = _solved(inverse, lost.flatten(0, 1), cut, few, nothing)
            step -= (within.view(-1, outputs, size) @ inverse).flatten(0, 1)
    steps = found.masked_fill_(~inside, 0.0).to(w.dtype)
    whole = steps.view(len(dampings), groups, blocks, outputs, size).transpose(2, 3).flatten(3)
    return whole[..., : moments.inputs].reshape(len(dampings), -1)


def _inverse(matrices: Tensor) -> Tensor:
    """The inverses (m, size, size); zero where rounding has left none."""
    factors, failed = torch.linalg.cholesky_ex(matrices)
    without = failed[:, None, None] != 0
    # Of what is left of a matrix without factors, an inverse can't even be asked for.
    factors = torch.where(without, torch.eye(matrices.shape[-1]).to(factors), factors)
    return torch.cholesky_inverse(factors).masked_fill(without, 0.0)


def _solved(
    matrices: Tensor, right: Tensor, inside: Tensor, wanted: Tensor, shifts: Tensor
) -> Tensor:
    """The solutions (shifts, systems, size) among the places inside, zero elsewhere.

    Args:
        matrices: (m, size, size), each for as many systems as the next, one after the other.
        right: the right-hand sides (systems, size).
        inside: which places (systems, size) belong to a system.
        wanted: which systems (systems,) to solve; the others, and those without a solution, are
            zero.
        shifts: what each matrix has on its diagonal besides (shifts, m).
    """
    solutions = right.new_zeros(len(shifts), *right.shape)
    counts = inside.sum(1)
    order = counts.argsort(stable=True)
    for part, length in _parts(order[wanted[order]], counts):
        first = inside[part].to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :length]
        valid = inside[part].gather(1, first)
        which = part // (len(right) // len(matrices))
        systems = matrices[which[:, None, None], first[:, :, None], first[:, None, :]]
        systems.masked_fill_(~(valid[:, :, None] & valid[:, None, :]), 0.0)
        diagonal = systems.diagonal(dim1=1, dim2=2)
        diagonal.masked_fill_(~valid, 1.0)
        unshifted = diagonal.clone()
        sides = right[part].gather(1, first).masked_fill(~valid, 0.0)
        for solution, shift in zip(solutions, shifts, strict=True):
            diagonal.copy_(unshifted + shift[which, None])
            factors, failed = torch.linalg.cholesky_ex(systems)
            found = torch.cholesky_solve(sides[:, :, None], factors)[:, :, 0]
            found = found.masked_fill((failed != 0)[:, None] | ~valid, 0.0)
            solution[part] = solution[part].scatter(1, first, found)
    return solutions


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
