"""Magnitude pruning: the baseline that needs no data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from swap_prune.methods.base import Method, Stage


class Magnitude(Method):
    """Keep the largest weights as they are."""

    needs_gradients = False

    def prune(self, stage: Stage) -> tuple[Tensor, dict[str, Any]]:
        """New weights (p,) within the budget, and the settings chosen."""
        return stage.budget.threshold(stage.w_bar), {}
