"""The pruning methods behind one face."""

from swap_prune.methods.base import Method, Stage
from swap_prune.methods.magnitude import Magnitude
from swap_prune.methods.wasserstein import WassersteinRegression

__all__ = ["Magnitude", "Method", "Stage", "WassersteinRegression"]
