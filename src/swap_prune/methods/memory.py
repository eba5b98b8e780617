"""Rows of earlier stages, kept in short: what a stage knows besides its own samples.

A stage's rows are few and noisy, and gradients change little from one stage to the next. So the
cloud that a stage fits has two parts: the fresh rows, and a summary of those before, whose share
of the mass is `SHARE`. As every summary holds the one before it, a row's mass decays geometrically.
No gradient is taken for it.

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

# Mass of what is remembered; the fresh rows have the rest (docs/noise.md).
SHARE = 0.5


@dataclass(frozen=True)
class Cloud:
    """The rows that a stage fits.

    Attributes:
        gradients: the rows (N, p), each scaled by the root of N times its mass.
        ones: what a row of ones became (N,): `gradientsᵀ ones / N` is the mean gradient.
        fresh: how many rows are this stage's own; they come first.
        scale: the factor on the fresh rows.
    """

    gradients: GradientOperator
    ones: Tensor
    fresh: int
    scale: float


class RowMemory:
    """At most `size` rows that stand for those of all stages before.

    Args:
        size: r; 0 remembers nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: Tensor | None = None  # (r, s), on the support; rowsᵀ rows is the mean curvature
        self.support = torch.empty(0, dtype=torch.long)
        self.ones = torch.empty(0, dtype=torch.float64)

    def cloud(self, gradients: GradientOperator) -> Cloud:
        """The fresh rows (n, p) and the remembered ones."""
        n, p = gradients.shape
        ones = torch.ones(n, dtype=torch.float64)
        if self.rows is None:
            return Cloud(gradients, ones, n, 1.0)
        total = n + len(self.rows)
        fresh, remembered = math.sqrt((1 - SHARE) * total / n), math.sqrt(SHARE * total)
        block = _OnSupport(self.rows, self.support, p)
        return Cloud(
            StackedGradients([gradients, block], [fresh, remembered]),
            torch.cat([fresh * ones, remembered * self.ones]),
            n,
            fresh,
        )

    def keep(self, cloud: Cloud, ridge: SupportRidge) -> None:
        """Remember the cloud on the support that was chosen; weights outside it are gone."""
        if self.size == 0:
            return
        total = len(cloud.ones)
        if total <= self.size:
            basis = torch.eye(total, dtype=torch.float64)
        else:
            leading = ridge.vectors[:, total - self.size + 1 :]
            mean = (cloud.ones / cloud.ones.norm())[:, None]
            basis = torch.linalg.qr(torch.cat([mean, leading], dim=1)).Q
        basis = basis / math.sqrt(total)
        self.rows = basis.T.to(ridge.w_bar.dtype) @ ridge.columns.rows()
        self.support, self.ones = ridge.support, basis.T @ cloud.ones

    def tensors(self) -> dict[str, Tensor]:
        """What `restore` needs."""
        if self.rows is None:
            return {}
        return {"rows": self.rows, "support": self.support, "ones": self.ones}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take up what `tensors` gave."""
        if tensors:
            self.rows, self.support = tensors["rows"], tensors["support"]
            self.ones = tensors["ones"]


class _OnSupport(GradientOperator):
    """A matrix (r, p) that is zero outside the columns `support`, of which it holds the others."""

    def __init__(self, matrix: Tensor, support: Tensor, p: int) -> None:
        self.inner = DenseGradients(matrix)
        self.support = support
        self.shape = (len(matrix), p)

    def columns(self, support: Tensor) -> GradientOperator:
        """The columns `support` (s,), which must be among those held."""
        return self.inner.columns(torch.searchsorted(self.support, support))

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
