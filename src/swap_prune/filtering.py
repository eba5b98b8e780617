"""Noise in rows of G that the inputs of their layers give away.

By the chain rule the gradient of an output's weights is `g = Σ b_v a_v = bᵀU` in a Linear or Conv
layer: U (v, d) are the inputs that the weights meet in the row's samples, b (v,) the derivatives of
the loss by what comes of them. U needs no gradient: a forward pass tells it. So with fewer inputs
than weights, v < d, what of a row lies outside the span of U is noise and nothing else, and its
square tells the variance σ² of the noise in every entry. Of the noise inside, the most likely is
taken away: with b of variance s² a priori the expected gradient is

    ĝ Uᵀ (U Uᵀ + δ I)⁻¹ U,      δ = σ² / s²,

with s² from what the row has more than noise. In layers with as many inputs as weights, or more,
there is no outside. There σ² is that of the row's other layers, and in what is the same,
`ĝ (UᵀU + δ I)⁻¹ UᵀU`, the mean of `UᵀU` over some rows stands for the row's own. Rows without noise
stay as they are to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from swap_prune.calling import call, evaluation_mode
from swap_prune.gradients.rows import chunk_rows
from swap_prune.layer_inputs import input_vectors, layers_of
from swap_prune.prunable import PrunableWeights

# A row is noisy with more than this part of its square outside the span of its inputs.
NOISY = 1e-3
# What is outside is told by layers with at most so many inputs, relative to weights of an output.
MOST_SPANNED = 0.5
# Least that is added to the diagonal, relative to its mean: double precision, where a row is asked
# whether it has noise, and single, where that is taken out.
EXACT_RIDGE, RIDGE = 1e-8, 1e-4
# At least this part of a row's square is not taken for noise, so that δ is finite.
LEAST_SIGNAL = 1e-3
# Unknowns of the largest system that is solved for a row; layers with larger ones are left alone.
MOST_UNKNOWNS = 1024


@dataclass
class _Seen:
    """What a layer has had as inputs.

    Attributes:
        calls: the layer and its inputs (samples, ...), for every time that it was called.
        vectors: how many vectors of them its weights met, in every sample.
    """

    calls: list[tuple[Any, Tensor]]
    vectors: int = 0

    def of(self, rows: Tensor, samples_per_row: int) -> Tensor:
        """The vectors U (k, groups, v, d) of rows (k,), scaled to at most 1 in each."""
        samples = (rows[:, None] * samples_per_row + torch.arange(samples_per_row)).flatten()
        found = [
            input_vectors(layer, a[samples]).unflatten(1, (len(rows), -1))
            for layer, a in self.calls
        ]
        u = torch.cat(found, dim=2).transpose(0, 1)
        largest = u.abs().amax((1, 2, 3), keepdim=True)
        return u / torch.where(largest > 0, largest, 1.0)


def filter_rows(
    model: nn.Module,
    weights: PrunableWeights,
    inputs: Any,
    rows: Tensor,
    samples_per_row: int,
) -> int:
    """Take the noise out of the rows of G that have it, in place.

    Nothing happens where it can't be told: in other layers than Linear and Conv, with a layer that
    has others than samples first, in a model that does not run with hooks on its layers.

    Args:
        model: with the weights at which gradients are said to be taken.
        weights: which weights the columns stand for.
        inputs: calibration inputs, n · m samples first.
        rows: G (n, p).
        samples_per_row: m.

    Returns:
        How many rows were noisy.
    """
    m, noisy = samples_per_row, 0
    priors: dict[str, Prior] = {}
    for part in torch.arange(len(rows)).split(chunk_rows(inputs, m)):
        start, stop = int(part[0]), int(part[-1]) + 1
        x = tree_map(lambda leaf, a=start * m, b=stop * m: leaf[a:b], inputs)
        noisy += _filter(rows[start:stop], weights, _layer_inputs(model, weights, x), m, priors)
    return noisy


def _layer_inputs(model: nn.Module, weights: PrunableWeights, inputs: Any) -> dict[str, _Seen]:
    """What the layers of the weights have as inputs; those that can't be read are left out."""
    seen: dict[str, _Seen] = {}
    unreadable: set[str] = set()

    def add(name: str, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        a = args[0] if args else kwargs["input"]
        if not isinstance(a, Tensor) or a.is_nested or a.ndim < 2 or len(a) != samples:
            unreadable.add(name)
            return
        found = seen.setdefault(name, _Seen([]))
        found.calls.append((layer, a.detach()))
        found.vectors += out[0].numel() // len(layer.weight)

    handles = [
        layer.register_forward_hook(partial(add, name), with_kwargs=True)
        for name in weights.names
        for layer in layers_of(model, model.get_parameter(name))
    ]
    samples = len(tree_leaves(inputs)[0])
    try:
        with torch.no_grad(), evaluation_mode(model):
            call(model, inputs)
    except Exception:  # a model that runs as it is, but not with hooks on its layers
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return {name: found for name, found in seen.items() if name not in unreadable}


def _filter(
    rows: Tensor,
    weights: PrunableWeights,
    seen: dict[str, _Seen],
    m: int,
    priors: dict[str, Prior],
) -> int:
    """Filter a chunk of rows (k, p) in place; how many of them were noisy.

    `priors` are those of the layers that have no outside, as far as chunks before had use for them.
    """
    spanned: list[tuple[str, slice]] = []
    filled: list[tuple[str, slice]] = []
    for name, shape, columns in weights.slices():
        d, v = shape[1:].numel(), m * seen[name].vectors if name in seen else 0
        if 0 < min(v, d) <= MOST_UNKNOWNS:
            (spanned if v <= MOST_SPANNED * d else filled).append((name, columns))
    everyone = torch.arange(len(rows))
    variances: dict[str, Tensor] = {}
    square, outside, freedom = torch.zeros(3, len(rows), dtype=torch.float64)
    for name, columns in spanned:
        u = seen[name].of(everyone, m).double()
        whole, beyond, entries = _outside(_as_outputs(rows[:, columns], u), u)
        variances[name] = beyond / entries.clamp_min(1.0)
        square += whole
        outside += beyond
        freedom += entries
    noisy = (outside > NOISY * square).nonzero()[:, 0]
    if not len(noisy):
        return 0
    for name, columns in spanned:
        u = seen[name].of(noisy, m)
        g = _expected(_as_outputs(rows[noisy, columns], u), u, variances[name][noisy])
        rows[noisy, columns] = g.flatten(1)
    variance = (outside / freedom.clamp_min(1.0))[noisy]
    for name, columns in filled:
        if name not in priors:
            u = seen[name].of(everyone, m)
            priors[name] = Prior(*torch.linalg.eigh((u.mT @ u).mean(0)))
        prior = priors[name]
        g = prior.expected(_as_outputs(rows[noisy, columns], prior.vectors[None]), variance)
        rows[noisy, columns] = g.flatten(1)
    return len(noisy)


def _as_outputs(columns: Tensor, u: Tensor) -> Tensor:
    """Columns of rows (k, ...) as (k, groups, outputs, d) beside inputs (k, groups, v, d)."""
    return columns.unflatten(1, (u.shape[1], -1, u.shape[3])).to(u)


def _outside(g: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The squares (k,) of rows and of what lies outside the span of their inputs.

    And of how many entries the latter is: the part of the rows' entries that the span leaves.

    Args:
        g: rows (k, groups, outputs, d).
        u: inputs (k, groups, v, d), fewer than d.
    """
    products = u @ u.mT
    shift = _ridge(products, EXACT_RIDGE)
    factors = _cholesky(products, shift)
    # With signals b the inside is bᵀU; its distance from g is had without it, as squares of g are.
    right = u @ g.mT
    signals = torch.cholesky_solve(right, factors)
    square = torch.linalg.vector_norm(g, dim=(1, 2, 3)).square()
    beyond = square + (signals * (products @ signals - 2 * right)).sum((1, 2, 3))
    inverse = torch.cholesky_inverse(factors).diagonal(dim1=2, dim2=3).sum(2)
    rank = u.shape[2] - shift * inverse
    entries = (u.shape[3] - rank).sum(1) * g.shape[2]
    return square, beyond.clamp_min(0.0), entries


def _expected(g: Tensor, u: Tensor, variance: Tensor) -> Tensor:
    """The gradients that noise of a variance (k,) in every entry has made rows `g` of.

    Args:
        g: rows (k, groups, outputs, d).
        u: inputs (k, groups, v, d).
        variance: σ².
    """
    products = u @ u.mT
    trace = products.diagonal(dim1=2, dim2=3).sum((1, 2))
    delta = _noise_to_signal(g, variance)[:, None] * trace[:, None]
    factors = _cholesky(products, delta + _ridge(products, RIDGE))
    return torch.cholesky_solve(u @ g.mT, factors).mT @ u


class Prior(NamedTuple):
    """The mean of `UᵀU` over rows: what a layer's gradients are a priori, but for a factor.

    Attributes:
        values: its eigenvalues (groups, d).
        vectors: its eigenvectors (groups, d, d), in columns.
    """

    values: Tensor
    vectors: Tensor

    def expected(self, g: Tensor, variance: Tensor) -> Tensor:
        """As `_expected`, with this in the place of the rows' own."""
        values = self.values.clamp_min(0.0)
        delta = _noise_to_signal(g, variance) * values.sum()
        shifted = values + delta[:, None, None]
        gains = torch.where(shifted > 0, values / shifted, 1.0)
        return (g @ self.vectors) * gains[:, :, None] @ self.vectors.mT


def _noise_to_signal(g: Tensor, variance: Tensor) -> Tensor:
    """`σ² / s²` (k,), with s² in units of one over the trace of `UᵀU` of all groups.

    Rows `g` (k, groups, outputs, d) have the square `outputs · s² · trace` on average, and that of
    noise.
    """
    square = torch.linalg.vector_norm(g, dim=(1, 2, 3), dtype=torch.float64).square()
    signal = (square - variance * g[0].numel()).maximum(LEAST_SIGNAL * square)
    # A part that vanishes has nothing to filter.
    return torch.where(signal > 0, variance * g.shape[2] / signal, 0.0).to(g)


def _ridge(matrices: Tensor, relative: float) -> Tensor:
    """What to add (k, groups) to the diagonals of matrices (k, groups, size, size)."""
    means = matrices.diagonal(dim1=2, dim2=3).mean(2)
    # Inputs that are all zero make no gradient: with any positive diagonal none comes out.
    return torch.where(means > 0, relative * means, 1.0)


def _cholesky(matrices: Tensor, shift: Tensor) -> Tensor:
    """The factors of matrices (k, groups, size, size) with a shift (k, groups) of the diagonal."""
    shifted = matrices.clone()
    shifted.diagonal(dim1=2, dim2=3).add_(shift[..., None])
    return torch.linalg.cholesky(shifted)
