"""Rows of several gradient matrices, one below the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swap_prune.gradients.dense import DenseGradients
from swap_prune.gradients.operator import GradientOperator


class StackedGradients(GradientOperator):
    """`[a G; b R]`: each block of rows scaled by the root of its mass.

    Args:
        blocks: operators on the same weights.
        scales: one factor a block.
    """

    def __init__(self, blocks: Sequence[GradientOperator], scales: Sequence[float]) -> None:
        self.blocks, self.scales = tuple(blocks), tuple(scales)
        self.shape = (sum(block.shape[0] for block in blocks), blocks[0].shape[1])

    def columns(self, support: Tensor) -> DenseGradients:
        """Copy out the columns `support` (s,), into one matrix."""
        matrix = torch.empty(self.shape[0], len(support))
        for part, block, scale in zip(self._parts(matrix), self.blocks, self.scales, strict=True):
            torch.mul(block.columns(support).rows(), scale, out=part)
        return DenseGradients(matrix)

    def gram(self) -> Tensor:
        """`G Gᵀ` (n, n) in float64."""
        return DenseGradients(self.rows()).gram()

    def rows(self) -> Tensor:
        """The matrix (n, p), a copy."""
        pairs = zip(self.blocks, self.scales, strict=True)
        return torch.cat([block.rows() * scale for block, scale in pairs])

    def _product(self, w: Tensor) -> Tensor:
        pairs = zip(self.blocks, self.scales, strict=True)
        return torch.cat([scale * (block @ w) for block, scale in pairs])

    def _adjoint_product(self, v: Tensor) -> Tensor:
        triples = zip(self._parts(v), self.blocks, self.scales, strict=True)
        products = [block.T @ (scale * part) for part, block, scale in triples]
        return torch.stack(products).sum(0)

    def _parts(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The rows of `whole` (n, ...) that belong to each block."""
        return whole.split([block.shape[0] for block in self.blocks])
