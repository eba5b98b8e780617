"""Optimal Brain Damage (LeCun et al. 1989): a diagonal Fisher scores the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swap_prune.methods.base import Method, Stage
from swap_prune.metric import mean_squares
from swap_prune.regression import restrict


class OptimalBrainDamage(Method):
    """Keep the weights of the largest saliency `w_i² F_ii / 2`, as they are.

    F is the empirical Fisher `GᵀG / n`; that cut weights interact, and that others could make up
    for them, is left out of account.
    """

    def prune(self, stage: Stage) -> tuple[Tensor, dict[str, Any]]:
        """New weights (p,) within the budget, and the settings chosen."""
        assert stage.gradients is not None
        saliency = 0.5 * stage.w_bar.square() * mean_squares(stage.gradients.rows())
        scores = torch.where(stage.w_bar != 0, saliency, -torch.inf)
        return restrict(stage.w_bar, stage.budget.select(scores)), {}
