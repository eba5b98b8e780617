"""Gradients by the model's own outputs, where they are taken with other weights than its own.

By the chain rule a row of G is `Jᵀ r`, with J the derivative of the outputs by the weights and r,
the residual, that of the loss by the outputs. Weights that are off while gradients are taken, as on
an analog array, spoil both; r far more, for a model that fits its data has small residuals, and
with other weights it has not. But r needs no derivative of the model: its own outputs tell it. The
row is then the gradient of a loss that is linear in the outputs, `r · output`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._pytree import tree_map

from swap_prune.calibration import Batch
from swap_prune.errors import InputError
from swap_prune.evaluation import outputs_of
from swap_prune.gradients.rows import Loss

# Samples whose outputs tell whether gradients are taken with the model's own weights: others change
# those of every sample.
COMPARED_SAMPLES = 10
# The same weights make the same outputs, but for rounding: others differ by more than this part of
# the root mean square.
DIFFERENT = 1e-3


def linear_loss(output: Tensor, residuals: Tensor) -> Tensor:
    """The loss whose derivative by a row's outputs are its residuals, of the same shape."""
    return (output * residuals).sum()


def outputs(model: nn.Module, inputs: Any) -> Tensor | None:
    """The model's outputs (samples, ...); None if they are not one tensor, samples first."""
    try:
        found = list(outputs_of(model, inputs))
    except InputError:
        return None  # whoever takes the gradients says which sample it is that fails
    if not all(_has_samples_first(output, part.stop - part.start) for part, output in found):
        return None
    alike = len({output.shape[1:] for _, output in found}) == 1
    return torch.cat([output for _, output in found]) if alike else None


def by_own_outputs(
    model: nn.Module,
    seen: Tensor | None,
    batch: Batch,
    loss: Loss,
    samples_per_row: int,
    most_numbers: int,
) -> Batch | None:
    """Inputs and residuals of a batch, for gradients of `linear_loss`.

    None where there is no need for them, as gradients are taken with the model's own outputs, or
    no way to have them.

    Args:
        model: with its own weights.
        seen: what its outputs for the first samples are while gradients are taken.
        batch: inputs and targets, samples first.
        loss: `loss(output, targets)`, the mean over a row.
        samples_per_row: m.
        most_numbers: as many as the outputs of a row may have.
    """
    if seen is None:
        return None
    own = outputs(model, tree_map(lambda leaf: leaf[: len(seen)], batch[0]))
    if own is None or own.shape != seen.shape or not _differ(seen, own):
        return None
    if samples_per_row * own[0].numel() > most_numbers:
        return None
    own = outputs(model, batch[0])
    found = None if own is None else residuals_of(own, batch[1], loss, samples_per_row)
    return None if found is None else (batch[0], found)


def residuals_of(output: Tensor, targets: Any, loss: Loss, samples_per_row: int) -> Tensor | None:
    """The derivative of each row's loss by its outputs (samples, ...); None if it can't be had."""
    by_row = tree_map(lambda leaf: leaf.unflatten(0, (-1, samples_per_row)), (output, targets))
    try:
        with torch.enable_grad():
            found = vmap(grad(lambda o, t: loss(o, t).reshape(())))(*by_row)
    except Exception:  # the loss may be the user's, and use what vmap can't take
        return None
    return found.flatten(0, 1).detach()


def _has_samples_first(output: Any, samples: int) -> bool:
    """Whether an output is an ordinary tensor (samples, ...) of real numbers."""
    if not isinstance(output, Tensor) or output.is_nested or output.layout != torch.strided:
        return False
    return output.is_floating_point() and output.ndim > 0 and len(output) == samples


def _differ(seen: Tensor, own: Tensor) -> bool:
    distance = (seen.double() - own.double()).square().mean()
    return bool(distance > DIFFERENT**2 * own.double().square().mean())
