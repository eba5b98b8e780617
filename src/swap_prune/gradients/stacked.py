"""Rows of several gradient matrices, one below the other, each row with a factor of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swap_prune.gradients.dense import DenseGradients
from swap_prune.gradients.operator import GradientOperator


class StackedGradients(GradientOperator):
    """`[diag(a) G; diag(b) R]`.

    Args:
        blocks: operators on the same weights.
        scales: for each block the factors (rows,) of its rows.
    """

    def __init__(self, blocks: Sequence[GradientOperator], scales: Sequence[Tensor]) -> None:
        self.blocks, self.scales = tuple(blocks), tuple(scale.float() for scale in scales)
        self.shape = (sum(block.shape[0] for block in blocks), blocks[0].shape[1])

    def columns(self, support: Tensor, out: Tensor | None = None) -> DenseGradients:
        """Copy the columns `support` (s,) into one matrix."""
        if out is None:
            out = torch.empty(self.shape[0], len(support), dtype=torch.float32)
        for block, scale, part in self._parts(out):
            torch.mul(block.columns(support, part).rows(), scale[:, None], out=part)
        return DenseGradients(out)

    def gram(self) -> Tensor:
        """`G Gᵀ` (n, n) in float64."""
        return DenseGradients(self.rows()).gram()

    def rows(self) -> Tensor:
        """The matrix (n, p), a copy."""
        pairs = zip(self.blocks, self.scales, strict=True)
        return torch.cat([block.rows() * scale[:, None] for block, scale in pairs])

    def _product(self, w: Tensor) -> Tensor:
        pairs = zip(self.blocks, self.scales, strict=True)
        return torch.cat([scale * (block @ w) for block, scale in pairs])

    def _adjoint_product(self, v: Tensor) -> Tensor:
        products = [block.T @ (scale * part) for block, scale, part in self._parts(v)]
        return torch.stack(products).sum(0)

    def _parts(self, whole: Tensor) -> Iterator[tuple[GradientOperator, Tensor, Tensor]]:
        """Each block, its factors, and the rows of `whole` (n, ...) that belong to it."""
        parts = whole.split([block.shape[0] for block in self.blocks])
        return zip(self.blocks, self.scales, parts, strict=True)
