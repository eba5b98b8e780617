"""The Combinatorial Brain Surgeon (Yu et al. 2022): weights are cut for their joint effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swap_prune.methods.base import Auto, Method, Stage
from swap_prune.metric import mean_squares
from swap_prune.regression import SupportRidge

# Damping of the search relative to the mean curvature of a weight: with less, it finds sets that
# cancel on these n rows only, and accuracy falls with the objective.
SEARCH_DAMPING = 3.0
# What damping="auto" tries; the first one without held-out samples.
DAMPINGS = (1e-3, 1e-5, 1e-4, 1e-2, 1e-1)
# Weights of either side that a sweep considers for swaps, in each group of the budget.
CANDIDATES = 256
SWEEPS = 100
# The search is over when a sweep lowers the objective by less than this fraction.
TOLERANCE = 1e-3


@dataclass
class CombinatorialBrainSurgeon(Method):
    """Cut the weights R that together cost least, then let the others make up for them.

    With `F = λ I + GᵀG / n`, the selection lowers `½ w_Rᵀ F w_R`, the loss of cutting R before any
    other weight moves, by swaps between R and the weights that stay. The update then minimises
    `½ (w - w_bar)ᵀ F (w - w_bar)` over the weights that stay, jointly and exactly.

    The paper searches from randomised magnitude pruning; we search once, from the largest
    magnitudes, and take the best pair of many first. The search has a λ of its own, relative to
    the mean of F's diagonal.

    Attributes:
        damping: λ of the update; "auto" takes the best of a few on the held-out samples.
    """

    damping: float | Auto = "auto"

    def prune(self, stage: Stage) -> tuple[Tensor, dict[str, Any]]:
        """New weights (p,) within the budget, and the settings chosen."""
        assert stage.gradients is not None
        if stage.budget.allows(stage.w_bar):
            return stage.w_bar.clone(), {}
        curvature = float(mean_squares(stage.gradients.rows())[stage.w_bar != 0].mean())
        search = RemovalSearch(stage, SEARCH_DAMPING * curvature or DAMPINGS[0])
        search.run()
        support = ((stage.w_bar != 0) & ~search.removed).nonzero().flatten()
        ridge = SupportRidge(stage.gradients, stage.w_bar, support)
        y = stage.gradients @ stage.w_bar
        dampings = DAMPINGS if self.damping == "auto" else (self.damping,)
        updates = [(damping, ridge.weights(ridge.dual(y, damping))) for damping in dampings]
        if len(updates) > 1 and stage.held_out_losses is not None:
            losses = stage.held_out_losses
            updates.sort(key=lambda update: float(losses(update[1]).mean()))
        damping, w = updates[0]
        return w, {"damping": damping, "swaps": search.swaps}


class RemovalSearch:
    """Local search for the removed set R that makes `½ w_Rᵀ F w_R` small.

    With `A = diag(w) F diag(w)` and the pull `a = A 1_R`, the objective changes by `½ A_ii - a_i`
    when i returns to the weights that stay, by `½ A_jj + a_j` when j goes, and by the sum of the
    two less `A_ij` when j goes in place of i. The single changes of all weights are one product
    with Gᵀ; pairs are formed of the most promising candidates, so no swap is ever taken on trust.

    Attributes:
        removed: R as a mask (p,); weights that were zero before are not in it.
        swaps: how many there have been.
    """

    def __init__(self, stage: Stage, damping: float) -> None:
        assert stage.gradients is not None
        self.matrix = stage.gradients.rows()
        self.w, self.groups, self.damping = stage.w_bar, stage.budget.groups, damping
        self.half_diagonal = (
            0.5 * self.w.square() * (mean_squares(stage.gradients.rows()) + damping)
        )
        self.removed = (self.w != 0) & (stage.budget.threshold(self.w) == 0)
        self.x = (stage.gradients @ torch.where(self.removed, self.w, 0.0)).double()
        self.swaps = 0

    def objective(self) -> float:
        """`½ w_Rᵀ F w_R = ½ (‖x‖² / n + λ ‖w_R‖²)` with `x = G w_R`."""
        size = self.w[self.removed].double().square().sum()
        return 0.5 * float(self.x.square().mean() + self.damping * size)

    def run(self) -> None:
        """Sweep over the groups of the budget until swaps hardly help."""
        for _ in range(SWEEPS):
            before = self.objective()
            for group in self.groups:
                self._sweep(group)
            if before - self.objective() <= TOLERANCE * before:
                break

    def _sweep(self, group: slice) -> None:
        """Find the candidates of one group by their single changes, and swap among them."""
        w, removed = self.w[group], self.removed[group]
        # A view of G's columns: nothing of the size of G is copied.
        slope = self.matrix[:, group].T @ (self.x / len(self.x)).to(w.dtype)
        pull = w * (slope + self.damping * torch.where(removed, w, 0.0))
        change = self.half_diagonal[group] + torch.where(removed, -pull, pull)
        returning = _lowest(change, removed)
        going = _lowest(change, (w != 0) & ~removed)
        if len(returning) and len(going):
            self._swap(returning + group.start, going + group.start)

    def _swap(self, returning: Tensor, going: Tensor) -> None:
        """Swap the best pair of candidates while that helps, each of them at most once.

        Args:
            returning: removed weights (c,) that may return.
            going: kept weights (d,) that may go instead.
        """
        candidates, c = torch.cat([returning, going]), len(returning)
        # Float64: what a swap gains is far below float32's precision of the whole.
        w = self.w[candidates].double()
        columns = self.matrix.index_select(1, candidates).double() * w
        penalty = self.damping * w.square()
        A = columns.T @ columns / len(self.x) + torch.diag(penalty)
        pull = columns.T @ self.x / len(self.x)
        pull[:c] += penalty[:c]
        direction = torch.ones_like(w)
        direction[:c] = -1
        moved = torch.zeros_like(w, dtype=torch.bool)
        for _ in range(min(c, len(going))):
            change = (0.5 * A.diagonal() + direction * pull).masked_fill(moved, torch.inf)
            pairs = change[:c, None] + change[c:] - A[:c, c:]
            i, j = divmod(int(pairs.argmin()), len(going))
            if not pairs[i, j] < 0:
                break
            pull += A[c + j] - A[i]
            moved[i] = moved[c + j] = True
        self.x += columns @ (direction * moved)
        self.removed[candidates] ^= moved
        self.swaps += int(moved.sum()) // 2


def _lowest(change: Tensor, among: Tensor) -> Tensor:
    """The indices (at most CANDIDATES,) of the lowest changes (s,) where the mask (s,) holds."""
    count = min(CANDIDATES, int(among.sum()))
    return change.masked_fill(~among, torch.inf).topk(count, largest=False).indices
