"""The cloud of rows that a stage fits, and the masses of its points.

LR gives each of its n rows the mass 1/n. Masses say how far a row is to be trusted:

* A stage's rows are few, and gradients change little from one stage to the next. So rows of the
  stages before are in EWR's cloud too, summarised. No gradient is taken for it. Their share of the
  mass is the weight that makes the mean gradient most exact, as in a Kalman filter: the fresh
  rows' mean `g` has the variance V that its rows tell; that of the remembered mean `r` is unknown,
  for gradients drift as weights are cut, but `‖g - r‖²` estimates the sum of both. So the share is
  `V / ‖g - r‖²`: large while single rows are noisy, small where much has changed. Of n rows drawn
  from a pool of N, only the distance to the pool's mean can be averaged away, the part 1 - n/N of
  V: where every stage has all samples, earlier rows are the same ones, at weights of the past.
* With a `discount` a row's mass falls with its norm, `mass ∝ ‖g‖^-discount`, for all rows but the
  smallest fifth.

The summary of N rows A is `BᵀA` with orthonormal B (N, r): the directions in which the rows have
most of their curvature, and the one that keeps their mean, which the first-order term needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swap_prune.gradients import DenseGradients, GradientOperator, StackedGradients
from swap_prune.regression import SupportRidge

# Rows with a norm below this quantile of those that aren't zero have the same mass.
EQUAL_BELOW = 0.2
# Most of the mass that what is remembered may have; the fresh rows have the rest.
MOST_SHARE = 0.9
# At most about so many rows tell how far fresh rows spread: the figure need not be exact.
SPREAD_ROWS = 200
# Columns of theirs handled at once: few enough to stay in the processor's cache.
COLUMN_BLOCK = 2**12


@dataclass(frozen=True)
class Cloud:
    """The rows that a stage fits.

    Attributes:
        gradients: the rows (N, p), each times the root of N times its mass.
        ones: what a row of ones became (N,), of a fresh row that root; `gradientsᵀ ones / N` is
            the mean gradient.
        fresh: how many rows are this stage's own; they come first.
    """

    gradients: GradientOperator
    ones: Tensor
    fresh: int

    @property
    def masses(self) -> Tensor:
        """The masses (fresh,) of the fresh rows among themselves, which sum to 1."""
        squares = self.ones[: self.fresh].square()
        return squares / squares.sum()

    @property
    def fresh_ones(self) -> Tensor:
        """As `ones` (N,), for the mean gradient of the fresh rows alone."""
        fresh = torch.zeros_like(self.ones)
        fresh[: self.fresh] = self.ones[: self.fresh]
        return fresh * (len(self.ones) / fresh.square().sum())

    def unscaled(self, values: Tensor) -> Tensor:
        """Of values (N,) of the rows those of the fresh ones (fresh,), as without masses."""
        return values[: self.fresh] / self.ones[: self.fresh]

    def rescaled(self, fresh: Tensor, values: Tensor) -> Tensor:
        """`values` (N,) with those of the fresh rows replaced by `fresh` (fresh,)."""
        return torch.cat([fresh * self.ones[: self.fresh], values[self.fresh :]])


class RowMemory:
    """At most `size` rows that stand for those of all stages before.

    Args:
        size: r; 0 remembers nothing.
        discount: how fast a row's mass falls with its norm; 0 gives all the same.
    """

    def __init__(self, size: int, discount: float) -> None:
        self.size, self.discount = size, discount
        self.rows: Tensor | None = None  # (r, s), on the support; rowsᵀ rows is the mean curvature
        self.support = torch.empty(0, dtype=torch.long)
        self.ones = torch.empty(0, dtype=torch.float64)

    def rescale(self, factors: Tensor) -> None:
        """Go over to other coordinates: each column times its factor, of factors (p,)."""
        if self.rows is not None:
            self.rows = self.rows * factors[self.support]

    def cloud(self, gradients: GradientOperator, drawn: float = 0.0) -> Cloud:
        """The fresh rows (n, p), of the part `drawn` of all samples, and the remembered ones."""
        n, p = gradients.shape
        if self.rows is None and self.discount == 0:
            return Cloud(gradients, torch.ones(n, dtype=torch.float64), n)
        masses = torch.full((n,), 1 / n, dtype=torch.float64)
        if self.discount:
            norms = torch.linalg.vector_norm(gradients.rows(), dim=1)
            masses = _discounted(norms.double(), self.discount)
        if self.rows is None:
            roots = (n * masses).sqrt()
            return Cloud(StackedGradients([gradients], [roots]), roots, n)
        total, share = n + len(self.rows), self._share(gradients, masses, drawn)
        roots = ((1 - share) * total * masses).sqrt()
        remembered = math.sqrt(share * total)
        block = _OnSupport(self.rows, self.support, p)
        scales = [roots, torch.full_like(self.ones, remembered)]
        ones = torch.cat([roots, remembered * self.ones])
        return Cloud(StackedGradients([gradients, block], scales), ones, n)

    def _share(self, gradients: GradientOperator, masses: Tensor, drawn: float) -> float:
        """The mass of what is remembered beside fresh rows (n, p) of these masses (n,)."""
        assert self.rows is not None
        fresh = gradients.T @ masses.to(self.rows.dtype)
        remembered = self.rows.T @ self.ones.to(self.rows.dtype)
        weights = masses.square()
        every = math.ceil(len(masses) / SPREAD_ROWS)
        inside = torch.zeros_like(fresh)
        inside[self.support] = 1.0
        squares = _squared_distances(gradients.rows()[::every], fresh, inside)
        spread = len(masses) * float((weights[::every] * squares).mean())
        freedom = 1 - float(weights.sum())
        distance = float((fresh[self.support] - remembered).double().square().sum())
        # One row, or equal ones: nothing says that they are noisy. All samples there are. Or a run
        # that diverges.
        if min(spread, freedom, 1 - drawn) <= 0 or not math.isfinite(spread + distance):
            return 0.0
        variance = (1 - drawn) * spread / freedom
        return variance / max(distance, variance / MOST_SHARE)

    def keep(self, cloud: Cloud, ridge: SupportRidge) -> None:
        """Remember the cloud on the support that was chosen; weights outside it are gone."""
        if self.size == 0:
            return
        self.support, total = ridge.support, len(cloud.ones)
        if total <= self.size:
            self.rows = ridge.columns.rows() / math.sqrt(total)
            self.ones = cloud.ones / math.sqrt(total)
            return
        leading = ridge.leading(self.size - 1)
        mean = (cloud.ones / cloud.ones.norm())[:, None]
        basis = torch.linalg.qr(torch.cat([mean, leading], dim=1)).Q / math.sqrt(total)
        self.rows = basis.T.to(ridge.w_bar.dtype) @ ridge.columns.rows()
        self.ones = basis.T @ cloud.ones

    def tensors(self) -> dict[str, Tensor]:
        """What `restore` needs."""
        if self.rows is None:
            return {}
        return {"rows": self.rows, "support": self.support, "ones": self.ones}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take up what `tensors` gave."""
        if "rows" in tensors:
            self.rows, self.support = tensors["rows"], tensors["support"]
            self.ones = tensors["ones"]


def _squared_distances(rows: Tensor, centre: Tensor, inside: Tensor) -> Tensor:
    """`‖g - centre‖²` (n,) in float64 of each row of (n, p), where `inside` (p,) is 1 and not 0."""
    squares = torch.zeros(len(rows), dtype=torch.float64)
    for start in range(0, len(centre), COLUMN_BLOCK):
        part = slice(start, start + COLUMN_BLOCK)
        squares += (rows[:, part] - centre[part]).mul_(inside[part]).square_().sum(1)
    return squares


def _discounted(norms: Tensor, discount: float) -> Tensor:
    """Masses (n,), which sum to 1, for rows of these norms (n,)."""
    present = norms[norms > 0]
    if not len(present):
        return torch.full_like(norms, 1 / len(norms))
    # Of the rows that don't vanish: with a zero as the yardstick, none of them would have a mass.
    least = present.quantile(EQUAL_BELOW)
    masses = (least / norms.clamp_min(least)) ** discount
    return masses / masses.sum()


class _OnSupport(GradientOperator):
    """A matrix (r, p) that is zero outside the columns `support`, of which it holds the others."""

    def __init__(self, matrix: Tensor, support: Tensor, p: int) -> None:
        self.inner = DenseGradients(matrix)
        self.support = support
        self.shape = (len(matrix), p)

    def columns(self, support: Tensor, out: Tensor | None = None) -> GradientOperator:
        """The columns `support` (s,), all of them held: weights that were cut don't come back."""
        return self.inner.columns(torch.searchsorted(self.support, support), out)

    def gram(self) -> Tensor:
        """`R Rᵀ` (r, r) in float64."""
        return self.inner.gram()

    def rows(self) -> Tensor:
        """The matrix (r, p), a copy."""
        whole = torch.zeros(self.shape, dtype=self.inner.matrix.dtype)
        whole[:, self.support] = self.inner.matrix
        return whole

    def _product(self, w: Tensor) -> Tensor:
        return self.inner @ w[self.support]

    def _adjoint_product(self, v: Tensor) -> Tensor:
        whole = torch.zeros(self.shape[1], dtype=v.dtype)
        whole[self.support] = self.inner.T @ v
        return whole
