"""WoodFisher (Singh & Alistarh 2020): the optimal brain surgeon with a block-wise Fisher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swap_prune.gradients import GradientOperator
from swap_prune.methods.base import Method, Stage
from swap_prune.methods.blocks import neighbours
from swap_prune.regression import restrict

# Damping relative to the trace below which float64 could not factor a block.
LEAST_DAMPING = 1e-13


@dataclass
class WoodFisher(Method):
    """Score weights by the optimal brain surgeon's saliency, cut them, let the others follow.

    On each block of weights, `F = λ I + 1/n Σ_i g_i g_iᵀ` with the rows g of G. Blocks are scored
    apart and compared together: the weights of the largest `w_q² / (2 [F⁻¹]_qq)` stay, and each
    weight q that is cut moves the others of its block by

        δw = - w_q / [F⁻¹]_qq · F⁻¹ e_q

    As in the original, the moves of several cut weights are summed as if each were cut alone; the
    joint solution is `CombinatorialBrainSurgeon`'s. The original builds F⁻¹ by one rank-one update
    a sample (Woodbury); a Cholesky factor of the same matrix gives the same inverse, sooner.

    Attributes:
        damping: λ; the original's 1e-5 lets a thousand rows overrule the magnitudes.
        block_size: how many of a layer's remaining weights, side by side, make a block.
    """

    damping: float = 3e-4
    block_size: int = 500

    def prune(self, stage: Stage) -> tuple[Tensor, dict[str, Any]]:
        """New weights (p,) within the budget, and the settings chosen."""
        assert stage.gradients is not None
        chosen = {"damping": self.damping, "block_size": self.block_size}
        if stage.budget.allows(stage.w_bar):
            return stage.w_bar.clone(), chosen
        w = stage.w_bar.double()
        inverse_diagonal = torch.ones_like(w)
        for block in neighbours(stage.w_bar, stage.layers, self.block_size):
            factor = self._factor(stage.gradients, block)
            inverse_diagonal[block] = torch.cholesky_inverse(factor).diagonal()
        saliency = w.square() / (2 * inverse_diagonal)
        support = stage.budget.select(torch.where(w != 0, saliency, -torch.inf))
        cut = w / inverse_diagonal
        cut[support] = 0
        # The inverses of all blocks together are larger than G: factors are computed anew.
        for block in neighbours(stage.w_bar, stage.layers, self.block_size):
            if bool(cut[block].any()):
                factor = self._factor(stage.gradients, block)
                w[block] -= torch.cholesky_solve(cut[block, None], factor)[:, 0]
        return restrict(w.to(stage.w_bar.dtype), support), chosen

    def _factor(self, gradients: GradientOperator, block: Tensor) -> Tensor:
        """The Cholesky factor (B, B) of F on a block (B,), in float64."""
        rows = gradients.rows().index_select(1, block).double()
        fisher = rows.T @ rows / len(rows)
        fisher.diagonal().add_(max(self.damping, LEAST_DAMPING * float(fisher.trace())))
        return torch.linalg.cholesky(fisher)
