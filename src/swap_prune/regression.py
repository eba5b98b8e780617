"""Sparse ridge regression onto targets `t`, the one problem that LR and EWR share.

    minimise   1/(2n) ‖G w - t‖² + λ/2 ‖w - w_bar‖²   subject to   ‖w‖₀ ≤ k

A support is chosen by iterative hard thresholding or by saliency; on it the minimum is exact,
through an n × n system. The first-order term `α · mean(G)ᵀ (w - w_bar)` is the shift `t - α`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from swap_prune.gradients import Buffers, GradientOperator

# Growth of the step of iterative hard thresholding once it leaves the support (Chen et al.).
STEP_GROWTH = 2.0
# Columns of G handled at once where a second n × p matrix would otherwise be needed, and rows of
# the products with a triangular matrix, of which each block leaves out what is zero.
COLUMN_BLOCK = 2**12
ROW_BLOCK = 256
# A search goes from one damping to the next, and back to the best one.
KEPT_FACTORS = 3
# How leading eigenvectors are found: iterations, and vectors beyond those asked for.
SUBSPACE_ITERATIONS = 4
SPARE_VECTORS = 10
# They are few if they are no more than this part of all.
FEW = 4


@dataclass(frozen=True)
class Budget:
    """How many weights may stay, in all or layer by layer.

    Attributes:
        groups: slices of the flat vector, one for a global budget, one a layer otherwise.
        counts: the number of weights to keep in each.
    """

    groups: tuple[slice, ...]
    counts: tuple[int, ...]

    @classmethod
    def over_all(cls, p: int, k: int) -> Budget:
        """Keep `k` of all `p` weights, wherever they are."""
        return cls((slice(0, p),), (k,))

    @classmethod
    def per_layer(
        cls, layers: Sequence[slice], k: int, most: Sequence[int] | None = None
    ) -> Budget:
        """Keep `k` weights in all, the same fraction of every layer (largest remainders).

        Where k allows, every layer keeps one: a layer of none would cut the network in two.

        Args:
            layers: the slice of each.
            k: how many weights stay, no more than `most` has.
            most: the counts of the stage before: a smaller k may give a layer the larger share,
                but what is cut does not come back.
        """
        sizes = [layer.stop - layer.start for layer in layers]
        room = sizes if most is None else most
        exact = [k * size / sum(sizes) for size in sizes]
        least = 1 if k >= len(sizes) else 0
        counts = [min(room[i], max(least, int(value))) for i, value in enumerate(exact)]
        while sum(counts) != k:
            step = 1 if sum(counts) < k else -1
            able = [
                i for i, left in enumerate(room) if min(least, left) <= counts[i] + step <= left
            ]
            # The layer that is furthest from its share, on the side to be mended.
            counts[max(able, key=lambda i: step * (exact[i] - counts[i]))] += step
        return cls(tuple(layers), tuple(counts))

    def select(self, scores: Tensor) -> Tensor:
        """The sorted indices (at most k) of the largest scores (p,) of each group.

        A score of minus infinity is never chosen.
        """
        chosen = torch.cat(
            [
                torch.topk(scores[group], count, sorted=False).indices + group.start
                for group, count in zip(self.groups, self.counts, strict=True)
            ]
        )
        return chosen[scores[chosen] > -torch.inf].sort().values

    def allows(self, w: Tensor) -> bool:
        """Whether no group of `w` (p,) has more non-zeros than it may keep."""
        return all(
            int((w[group] != 0).sum()) <= count
            for group, count in zip(self.groups, self.counts, strict=True)
        )

    def threshold(self, w: Tensor) -> Tensor:
        """`w` (p,) with all but the largest entries of each group set to zero."""
        return restrict(w, self.select(w.abs()))


def restrict(w: Tensor, support: Tensor) -> Tensor:
    """`w` (p,) on the support, zero elsewhere."""
    result = torch.zeros_like(w)
    result[support] = w[support]
    return result


def _value(x: Tensor, targets: Tensor, delta: Tensor, damping: float) -> float:
    """The objective, `1/(2n) ‖x - t‖² + λ/2 ‖δ‖²`."""
    # Float64 sums: descent is decided by differences far below float32's precision of the whole.
    misfit = (x.double() - targets.double()).square().mean()
    return float(0.5 * misfit + 0.5 * damping * delta.double().square().sum())


def hard_threshold_descent(
    gradients: GradientOperator,
    targets: Tensor,
    w_bar: Tensor,
    budget: Budget,
    damping: float,
    iterations: int = 20,
    tolerance: float = 1e-4,
) -> Tensor:
    """Iterative hard thresholding with the step rule of Chen et al. (2022, Algorithm 2).

    Each iteration takes the closed-form best step on the current support if it keeps the support;
    otherwise the largest step that keeps it, then larger ones while the objective falls. The
    objective never rises. Weights that are zero in `w_bar` stay so: what is cut does not come back.

    Args:
        gradients: G (n, p).
        targets: t (n,).
        w_bar: the weights (p,) at which G was taken.
        budget: how many weights may stay.
        damping: λ.
        iterations: at most this many.
        tolerance: stop when an iteration lowers the objective by less than this fraction.

    Returns:
        The weights (p,), zero outside a support within the budget.
    """
    n = gradients.shape[0]
    w = budget.threshold(w_bar)
    x = gradients @ w
    value = _value(x, targets, w - w_bar, damping)
    for _ in range(iterations):
        slope = gradients.T @ ((x - targets) / n) + damping * (w - w_bar)
        slope[w_bar == 0] = 0.0
        inside = torch.where(w != 0, slope, 0.0)
        curvature = (gradients @ inside).square().sum() / n + damping * inside.square().sum()
        best_step = float(inside.square().sum() / curvature) if curvature > 0 else 0.0
        keeping = _largest_keeping_step(w, slope, budget)
        step = min(best_step, keeping)
        before = value
        while step > 0:
            candidate = budget.threshold(w - step * slope)
            candidate_x = gradients @ candidate
            candidate_value = _value(candidate_x, targets, candidate - w_bar, damping)
            if not candidate_value < value:
                break
            accepted, x, value = candidate, candidate_x, candidate_value
            if step >= best_step:
                break
            step *= STEP_GROWTH
        if not value < before:
            break
        w = accepted
        if before - value < tolerance * before:
            break
    return w


def _largest_keeping_step(w: Tensor, slope: Tensor, budget: Budget) -> float:
    """The largest τ for which thresholding `w - τ ∇` keeps the support of `w`."""
    largest = float("inf")
    for group in budget.groups:
        size, steepness = w[group].abs(), slope[group].abs()
        kept = size > 0
        if bool(kept.all()) or not bool(kept.any()):
            continue
        rival = steepness[~kept].max()
        # |w_i - τ g_i| meets τ max |g_j|, whether the kept weight shrinks or grows on the way.
        towards = torch.sign(w[group][kept]) * slope[group][kept]
        closing = rival + towards
        steps = torch.where(closing > 0, size[kept] / closing, torch.inf)
        largest = min(largest, float(steps.min()))
    return largest


class SupportRidge:
    """The exact minimum on a support, for any targets and any damping.

    With `δ = w_S - w_bar_S` the minimiser is `δ = G_Sᵀ v`, where
    `v = (G_S G_Sᵀ + nλ I)⁻¹ (t - G_S w_bar_S)` (Woodbury).
    The n × n matrix serves every λ and every t, and all but the last step, `weights`, happens
    among n numbers. A λ costs a Cholesky factor: twenty of them take as long as the
    eigendecomposition that would serve all, and a stage tries fewer.

    Args:
        gradients: G (n, p).
        w_bar: the weights (p,) at which G was taken.
        support: the sorted indices (s,) of the weights that may differ from zero.
        gram: `G_S G_Sᵀ` (n, n), if it is known.
        buffers: where the columns of the support are copied to. Regressions that share them can't
            be used side by side.
    """

    def __init__(
        self,
        gradients: GradientOperator,
        w_bar: Tensor,
        support: Tensor,
        gram: Tensor | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        self.support = support
        self.w_bar = w_bar
        taken = (buffers or Buffers()).take("columns", w_bar, gradients.shape[0], len(support))
        self.columns = gradients.columns(support, taken)
        self.start = (self.columns @ w_bar[support]).double()
        self.gram = self.columns.gram() if gram is None else gram
        self._factors: dict[float, Tensor | None] = {}

    def around(self, centre: Tensor) -> SupportRidge:
        """The same regression with the damping around other weights (p,), zero off the support."""
        other = copy.copy(self)
        other.w_bar = centre
        other.start = (self.columns @ centre[self.support]).double()
        return other

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (n,), ascending and not below zero, and eigenvectors (n, n) of the matrix.

        For where rounding has made it indefinite, so that there is no Cholesky factor.
        """
        eigenvalues, vectors = torch.linalg.eigh(self.gram)
        return eigenvalues.clamp_min(0.0), vectors

    def gram_of(self, support: Tensor) -> Tensor | None:
        """`G_S G_Sᵀ` (n, n) of a part of this support, where what is cut has fewer columns."""
        if 2 * len(support) <= len(self.support):
            return None
        cut = torch.ones_like(self.support, dtype=torch.bool)
        cut[torch.searchsorted(self.support, support)] = False
        gram = self.gram.clone()
        for block in cut.nonzero().flatten().split(COLUMN_BLOCK):
            gram -= self.columns.columns(block).gram()
        return gram

    def dual(self, targets: Tensor, damping: float) -> Tensor:
        """`v` (n,) in float64 for targets (n,)."""
        return self.solve(targets.double() - self.start, damping)

    def solve(self, right: Tensor, damping: float) -> Tensor:
        """`(G_S G_Sᵀ + nλ I)⁻¹` times a vector (n,) in float64."""
        factor = self._factor(damping)
        if factor is not None:
            return torch.cholesky_solve(right[:, None], factor)[:, 0]
        eigenvalues, vectors = self.spectrum
        return vectors @ ((vectors.T @ right) / (eigenvalues + len(right) * damping))

    def smoothed_dual(self, targets: Tensor, damping: float, smoother: Tensor) -> Tensor:
        """`v` (n,) where the printed gradient `G_Sᵀ S (x - t)/n + λ (w - w_bar)` vanishes.

        With `δ = G_Sᵀ v` that is `(S G_S G_Sᵀ + nλ I) v = S (t - G_S w_bar)`; S (n, n) is the
        smoother, and S = I gives `dual`.
        """
        system = smoother @ self.gram
        system.diagonal().add_(len(self.start) * damping)
        return torch.linalg.solve(system, smoother @ (targets.double() - self.start))

    def predictions(self, v: Tensor) -> Tensor:
        """`x = G_S w` (n,) for the weights that belong to `v`."""
        return self.start + self.gram @ v

    def leading(self, count: int) -> Tensor:
        """Orthonormal columns (n, count) close to the leading eigenvectors of `G_S G_Sᵀ`.

        A few of them by subspace iteration: the eigenvalues of gradients fall fast, and whoever
        asks for few of a thousand vectors does not need them exact.
        """
        n = len(self.start)
        if count > n // FEW:
            return self.spectrum[1][:, n - count :]
        generator = torch.Generator().manual_seed(0)
        size = min(n, count + SPARE_VECTORS)
        basis = torch.randn(n, size, generator=generator, dtype=self.gram.dtype)
        for _ in range(SUBSPACE_ITERATIONS):
            basis = torch.linalg.qr(self.gram @ basis).Q
        _, vectors = torch.linalg.eigh(basis.T @ self.gram @ basis)
        return basis @ vectors[:, size - count :]

    def weights(self, v: Tensor) -> Tensor:
        """The weights (p,) that belong to `v`: `w_bar + G_Sᵀ v` on the support, zero elsewhere."""
        w = torch.zeros_like(self.w_bar)
        w[self.support] = self.w_bar[self.support] + self.columns.T @ v.to(self.w_bar.dtype)
        return w

    def mean_curvature(self) -> float:
        """The mean of the diagonal of `G_SᵀG_S / n`."""
        return float(self.gram.trace()) / (len(self.start) * max(1, len(self.support)))

    def saliency(self, targets: Tensor, damping: float) -> Tensor:
        """The rise of the objective (p,) when one weight is cut and the others follow.

        `w_i² / (2 [H⁻¹]_ii)` with `H = G_SᵀG_S / n + λ I`, at the minimum `w` on the support (the
        optimal brain surgeon's score); minus infinity outside the support.
        """
        inverse_root = self._inverse_root(damping)
        v = inverse_root.T @ (inverse_root @ (targets.double() - self.start))
        w = self.weights(v)[self.support]
        explained = _explained(inverse_root.to(w.dtype), self.columns.rows())
        # 1 - explained is λ [H⁻¹]_ii, in (0, 1]; rounding must not make it zero.
        scores = torch.full_like(self.w_bar, -torch.inf)
        scores[self.support] = 0.5 * damping * w.square() / (1 - explained).clamp_min(1e-6)
        return scores

    def _inverse_root(self, damping: float) -> Tensor:
        """A lower triangular R (n, n) with `RᵀR = (G_S G_Sᵀ + nλ I)⁻¹`."""
        n = len(self.start)
        factor = self._factor(damping)
        if factor is not None:
            identity = torch.eye(n, dtype=factor.dtype)
            return torch.linalg.solve_triangular(factor, identity, upper=False)
        eigenvalues, vectors = self.spectrum
        root = (eigenvalues + n * damping).rsqrt()[:, None] * vectors.T
        # What is upper triangular with rows and columns in reverse order is lower triangular.
        return torch.linalg.qr(root.flip(1), mode="r").R.flip(0, 1)

    def _factor(self, damping: float) -> Tensor | None:
        """The Cholesky factor (n, n) of `G_S G_Sᵀ + nλ I`; None if rounding left it without.

        Raises:
            torch.linalg.LinAlgError: if products of gradients are beyond float32.
        """
        if damping not in self._factors:
            while len(self._factors) >= KEPT_FACTORS:
                del self._factors[next(iter(self._factors))]
            system = self.gram.clone()
            system.diagonal().add_(len(self.start) * damping)
            factor, failed = torch.linalg.cholesky_ex(system)
            if failed and not torch.isfinite(self.gram).all():
                raise torch.linalg.LinAlgError("the Gram matrix of the gradients is not finite")
            self._factors[damping] = None if failed else factor
        return self._factors[damping]


def _explained(whitener: Tensor, matrix: Tensor) -> Tensor:
    """The squared norm (p,) of each column of R G, of a lower triangular R (n, n) and G (n, p)."""
    parts = []
    for columns in matrix.split(COLUMN_BLOCK, dim=1):
        squares = torch.zeros_like(columns[0])
        for start in range(0, len(matrix), ROW_BLOCK):
            stop = start + ROW_BLOCK
            squares += (whitener[start:stop, :stop] @ columns[:stop]).square_().sum(0)
        parts.append(squares)
    return torch.cat(parts)
