"""Rows of G checked against losses, which need no gradients.

A row ĝ of G says that the loss of its samples changes by ĝᵀd along a direction d. Two forward
passes tell by how much it does:

    f = (L(w + h d) - L(w - h d)) / 2h = gᵀd + O(h²),      g the gradient itself.

With `d = s ∘ w`, s random signs, the expected squares are `‖(ĝ - g) ∘ w‖²` of `ĝᵀd - f` and
`‖g ∘ w‖²` of f: a few directions estimate how large a row's error is beside the gradient. Where it
is larger, and half of h says the same, the row is **refuted**, and multiplied by

    a = Σ f ĝᵀd / Σ (ĝᵀd)²,      at least -1 (and below 1/2, for its error is the larger),

which makes it agree with the losses best. A row that was flipped and scaled up becomes the gradient
again; one with noise of its own shrinks, the more the larger the noise. All others stay as they are
to the bit. So do all where the others are not exact either, or too few: then it is not single rows
that are wrong but the way in which gradients are taken, and no row can be told from another.

Losses also decide whether rows are better for having been filtered by their layers' inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from swap_prune import filtering
from swap_prune.calibration import Batch
from swap_prune.evaluation import row_losses
from swap_prune.gradients import DenseGradients, GradientOperator
from swap_prune.gradients.rows import Loss
from swap_prune.prunable import PrunableWeights

Losses = Callable[[Tensor], Tensor]


class Audit(NamedTuple):
    """What losses say of rows.

    Attributes:
        factors: what each row (n,) is to be multiplied with, in float64; 1 unless it is refuted.
        single: whether it is single rows that are wrong, and the factors should be used.
        error: the square of all rows' errors.
    """

    factors: Tensor
    single: bool
    error: float

    @property
    def refuted(self) -> Tensor:
        """The numbers of the refuted rows."""
        return (self.factors != 1).nonzero()[:, 0]


# Rows that are checked first: with a quarter of them wrong, one is found by all odds.
FIRST_ROWS = 50
# Of these, those whose layers' inputs are looked at: a product of matrices for each and layer.
INPUTS_OF_EVERY = 3
# Directions that a row is asked about, each for two forward passes of its samples.
DIRECTIONS = 4
# h: weights change by 0.3%. Rounding of float32 losses and the curvature of networks then leave an
# error of at most 3% of the square of a gradient (MLPNet and ResNet20, docs/noise_experiments.md).
STEP = 0.003
# A row with so much more error than gradient, in squares, is refuted. The others have to be at
# least half of the rows and, taken together, to have at most so much.
REFUTED, MOST_ELSEWHERE = 1.0, 0.1
# Changes that half a step tells otherwise, by so much of a row's error in squares, refute nothing.
MOST_BENT = 0.1
# How far weights without gradients are moved, and by how much a loss has then changed.
REACHING_STEP, REACHED = 0.03, 1e-4
# Gradients below this part of the mean square of all are taken for as large, and so are those that
# losses can't tell for their rounding: by so much of themselves, or of 1.
FLOOR, ROUNDING = 1e-3, 2.0**-20


def possible(model: nn.Module, weights: PrunableWeights) -> bool:
    """Whether weights are exact enough to be moved by a step, and losses to show it."""
    coarsest = max(torch.finfo(model.get_parameter(name).dtype).eps for name in weights.names)
    return coarsest <= torch.finfo(torch.float32).eps


def losses_by_weights(
    model: nn.Module, weights: PrunableWeights, batch: Batch, loss: Loss, samples_per_row: int
) -> Losses:
    """From weights (p,), which stay in the model, to the losses (n,) of a batch's rows."""

    def losses(w: Tensor) -> Tensor:
        weights.write(model, w)
        return row_losses(model, batch, loss, samples_per_row)

    return losses


def unreached(
    model: nn.Module,
    weights: PrunableWeights,
    gradients: GradientOperator,
    batch: Batch,
    loss: Loss,
    w: Tensor,
) -> list[str]:
    """The names of weights whose gradients are all zero, though losses change with them.

    That is what `no_grad`, `detach` or rounding on the way makes of them. Weights that no sample
    meets, or that dead units cut off, are none of these.

    Args:
        model: left as it is.
        weights: whose gradients the rows are.
        gradients: G (n, p).
        batch: the samples of the rows.
        loss: what they are the gradients of.
        w: where the gradients are taken (p,).
    """
    rows = gradients.rows()
    zero = {name: part for name, _, part in weights.slices() if not rows[:, part].any()}
    if not zero or not possible(model, weights):
        return []
    few = tree_map(lambda leaf: leaf[:FIRST_ROWS], batch)
    signs = 2.0 * torch.randint(2, w.shape, generator=torch.Generator().manual_seed(0)) - 1
    names = []
    with weights.kept(model):
        losses = losses_by_weights(model, weights, few, loss, 1)
        before = losses(w)
        for name, part in zero.items():
            moved = w.clone()
            moved[part] *= 1 + REACHING_STEP * signs[part]
            if not torch.allclose(losses(moved), before, rtol=REACHED, atol=0.0):
                names.append(name)
    return names


def mend_rows(
    model: nn.Module,
    weights: PrunableWeights,
    gradients: GradientOperator,
    batch: Batch,
    loss: Loss,
    samples_per_row: int,
    w: Tensor,
    generator: torch.Generator,
) -> dict[str, int]:
    """Filter rows that their layers' inputs show to be noisy, and correct what losses refute.

    All of them, in place, only if there are any among a few.

    Args:
        model: left as it is.
        weights: whose gradients the rows are.
        gradients: G (n, p).
        batch: the samples of the rows.
        loss: what they are the gradients of.
        samples_per_row: samples of a row.
        w: where the gradients are said to be taken (p,).
        generator: draws the few, and directions.

    Returns:
        How many rows were filtered (`filtered_rows`) and corrected (`corrected_rows`).
    """
    noisy = corrected = 0
    if not possible(model, weights):
        return {"filtered_rows": noisy, "corrected_rows": corrected}

    def losses_of(samples: Batch) -> Losses:
        return losses_by_weights(model, weights, samples, loss, samples_per_row)

    def samples_of(samples: Any, rows: Tensor) -> Any:
        numbers = (rows[:, None] * samples_per_row + torch.arange(samples_per_row)).flatten()
        return tree_map(lambda leaf: leaf[numbers], samples)

    def filtered(inputs: Any, rows: Tensor) -> int:
        weights.write(model, w)
        return filtering.filter_rows(model, weights, inputs, rows, samples_per_row)

    with weights.kept(model):
        few = torch.randperm(gradients.shape[0], generator=generator)[:FIRST_ROWS].sort().values
        some, rows = samples_of(batch, few), gradients.rows()[few]
        twin = torch.Generator().set_state(generator.get_state())
        found = check_rows(DenseGradients(rows), losses_of(some), w, generator)
        fewer = torch.arange(0, len(few), INPUTS_OF_EVERY)
        if filtered(samples_of(some[0], fewer), rows[fewer]):
            filtered(some[0], rows)
            better = check_rows(DenseGradients(rows), losses_of(some), w, twin)
            # Not if the weights are used elsewhere, too, where no layer's inputs tell of it.
            if better.error < found.error:
                found, noisy = better, filtered(batch[0], gradients.rows())
        if found.single and len(found.refuted):
            corrected = correct_rows(gradients, losses_of(batch), w, generator)
    return {"filtered_rows": noisy, "corrected_rows": corrected}


def correct_rows(
    gradients: GradientOperator,
    losses: Losses,
    w: Tensor,
    generator: torch.Generator,
) -> int:
    """Multiply refuted rows by the factor that fits the losses best, in place.

    Args:
        gradients: G (n, p).
        losses: from weights (p,) to the losses (n,) of the rows' samples.
        w: where the gradients are said to be taken (p,).
        generator: what directions are drawn from.

    Returns:
        How many rows were corrected.
    """
    audit = check_rows(gradients, losses, w, generator)
    if not audit.single:
        return 0
    if len(audit.refuted):
        rows = gradients.rows()
        rows.mul_(audit.factors[:, None].to(rows.dtype))
    return len(audit.refuted)


def check_rows(
    gradients: GradientOperator,
    losses: Losses,
    w: Tensor,
    generator: torch.Generator,
) -> Audit:
    """Compare rows with losses; arguments as for `correct_rows`."""
    again = torch.Generator().set_state(generator.get_state())
    directions = torch.Generator().set_state(generator.get_state())
    claims = torch.stack([(gradients @ d).double() for d in _directions(w, directions)])
    truth, rounding = _differences(losses, w, generator, STEP)
    # A loss that is not finite a step away says nothing against a row.
    finite = torch.isfinite(truth).all(0)
    error = (claims - truth).square().mean(0)
    signal = truth.square().mean(0)
    floor = FLOOR * signal[finite].mean() + rounding.square()
    refuted = finite & (error > REFUTED * (signal + floor))
    others = finite & ~refuted
    if refuted.any():
        # Nor does one that is so bent that half a step tells another change.
        bent = (truth - _differences(losses, w, again, STEP / 2)[0]).square().mean(0)
        refuted &= bent <= MOST_BENT * error
    best = (claims * truth).sum(0) / claims.square().sum(0)
    factors = torch.where(refuted, best.clamp_min(-1.0), torch.ones_like(best))
    exact = float(error[others].sum()) <= MOST_ELSEWHERE * float((signal + floor)[others].sum())
    single = exact and int(refuted.sum()) <= len(refuted) / 2
    return Audit(factors, single, float(error[finite].sum()))


def _directions(w: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """The weights (p,) with random signs, a few times."""
    for _ in range(DIRECTIONS):
        yield w * (2 * torch.randint(0, 2, w.shape, generator=generator) - 1)


def _differences(
    losses: Losses, w: Tensor, generator: torch.Generator, step: float
) -> tuple[Tensor, Tensor]:
    """How losses change along each direction (directions, n), and what of it is rounding (n,)."""
    found, sums = [], []
    for direction in _directions(w, generator):
        ahead, behind = losses(w + step * direction), losses(w - step * direction)
        found.append((ahead - behind).double() / (2 * step))
        sums.append((ahead + behind).double())
    return torch.stack(found), ROUNDING * (1 + torch.stack(sums).abs().amax(0)) / step
