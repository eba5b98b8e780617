"""What the weights that stay make up for those that are cut, block by block.

Fewer rows than weights leave the regression over all weights a choice: of the many solutions that
answer to the rows as before, damping takes the one that moves least, and whatever no row tells is
lost. Block by block there is less to choose: the weights of a block that stay have to answer for
its own cut ones,

    1/(2n) ‖G_B w_B - G_B w_bar_B‖² + λ/2 ‖w_B - w_bar_B‖²,    w zero where weights are cut.

The blocks are WoodFisher's, neighbours in a layer. Its update cuts each weight as if alone; this is
the joint minimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from swap_prune.gradients import GradientOperator

# Entries of G whose blocks are solved at once: enough to keep the library busy, few enough for the
# allocator to hand out the same memory again (up to 32 MiB it does).
NUMBERS_AT_ONCE = 6_400_000


def neighbours(w_bar: Tensor, layers: Sequence[slice], size: int) -> Iterator[Tensor]:
    """The sorted indices (at most size,) of weights side by side in a layer; zeros are left out.

    Args:
        w_bar: the weights (p,).
        layers: the slice of each layer.
        size: how many at most.
    """
    for layer in layers:
        present = w_bar[layer].nonzero().flatten() + layer.start
        if len(present):
            yield from present.split(size)


def compensated(
    gradients: GradientOperator,
    w_bar: Tensor,
    support: Tensor,
    layers: Sequence[slice],
    size: int,
    dampings: Sequence[float],
) -> Tensor:
    """The minimum of each block, for every damping: weights (dampings, p), zero off the support.

    Args:
        gradients: G (n, p).
        w_bar: the weights (p,) at which G was taken.
        support: the indices (s,) of the weights that stay.
        layers: the slice of each layer; no block has weights of two.
        size: how many weights a block has.
        dampings: the values of λ, relative to `GᵀG / n`.
    """
    stays = torch.zeros(len(w_bar), dtype=torch.bool)
    stays[support] = True
    solutions = torch.where(stays, w_bar, 0.0).repeat(len(dampings), 1)
    size = min(size, max(layer.stop - layer.start for layer in layers))
    at_once = max(1, NUMBERS_AT_ONCE // (gradients.shape[0] * size))
    for part in neighbours(w_bar, layers, size * at_once):
        kept = stays[part]
        if bool(kept.all()) or not bool(kept.any()):
            continue
        rows = gradients.columns(part).rows()
        for solution, step in zip(
            solutions, _steps(rows, w_bar[part], kept, size, dampings), strict=True
        ):
            solution[part] += step
    return solutions


def _steps(
    rows: Tensor, w: Tensor, kept: Tensor, size: int, dampings: Sequence[float]
) -> Iterator[Tensor]:
    """For every damping how far the weights (m,) move, zero for those that are cut.

    All blocks have one size, so that one call solves them: the last one is filled up with zeros.
    """
    n, count = rows.shape
    empty = -count % size
    if empty:
        rows, w, kept = (functional.pad(tensor, (0, empty)) for tensor in (rows, w, kept))
    blocks = rows.unflatten(1, (-1, size)).transpose(0, 1)
    kept = kept.view(-1, size, 1)
    lost = w.view(-1, size, 1).masked_fill(kept, 0.0)
    # Systems and right-hand sides are n times what they are in the equations.
    few = n < size
    if few:  # through the n × n system, as for all weights together (Woodbury)
        inside = blocks.masked_fill(~kept.mT, 0.0)
        systems, right = torch.bmm(inside, inside.mT).double(), torch.bmm(blocks, lost).double()
    else:
        curvature = torch.bmm(blocks.mT, blocks).double()
        right = torch.bmm(curvature, lost.double()).masked_fill_(~kept, 0.0)
        systems = curvature.masked_fill_(~(kept & kept.mT), 0.0)
    diagonal = systems.diagonal(dim1=1, dim2=2)
    before = diagonal.clone()
    for damping in dampings:
        diagonal.copy_(before + n * damping)
        factors, failed = torch.linalg.cholesky_ex(systems)
        steps = torch.cholesky_solve(right, factors)
        # Where rounding has left no minimum, a block's weights stay as they are.
        steps = steps.masked_fill(failed[:, None, None] != 0, 0.0).to(w.dtype)
        if few:
            steps = torch.bmm(inside.mT, steps)
        yield steps.flatten()[:count]
