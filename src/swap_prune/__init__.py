"""swap-prune: prune trained PyTorch models with sparse entropic Wasserstein regression."""

from swap_prune.errors import InputError
from swap_prune.evaluation import Evaluation, evaluate
from swap_prune.prunable import PrunableWeights, select_weights
from swap_prune.pruning import PruneResult, prune
from swap_prune.settings import METHODS

__all__ = [
    "METHODS",
    "Evaluation",
    "InputError",
    "PrunableWeights",
    "PruneResult",
    "evaluate",
    "prune",
    "select_weights",
]
