"""The gradient matrix `G` (n × p) as an operator, and how its rows are computed."""

from swap_prune.gradients.buffers import Buffers
from swap_prune.gradients.dense import DenseGradients
from swap_prune.gradients.operator import GradientOperator
from swap_prune.gradients.rows import gradient_rows
from swap_prune.gradients.stacked import StackedGradients

__all__ = ["Buffers", "DenseGradients", "GradientOperator", "StackedGradients", "gradient_rows"]
