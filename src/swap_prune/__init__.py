"""swap-prune: prune trained PyTorch models with sparse entropic Wasserstein regression."""

from swap_prune.errors import DivergedError, InputError, PruningWarning
from swap_prune.evaluation import Evaluation, evaluate
from swap_prune.masks import apply_masks, make_permanent
from swap_prune.noise_report import NoiseReport, noise_report
from swap_prune.prunable import PrunableWeights, select_weights
from swap_prune.pruning import prune
from swap_prune.run import PruneResult
from swap_prune.settings import METHODS
from swap_prune.training import FineTuning

__all__ = [
    "METHODS",
    "DivergedError",
    "Evaluation",
    "FineTuning",
    "InputError",
    "NoiseReport",
    "PrunableWeights",
    "PruneResult",
    "PruningWarning",
    "apply_masks",
    "evaluate",
    "make_permanent",
    "noise_report",
    "prune",
    "select_weights",
]
