"""The pruning methods behind one face."""

from swap_prune.methods.base import Auto, Method, Stage
from swap_prune.methods.magnitude import Magnitude
from swap_prune.methods.wasserstein import WassersteinRegression

__all__ = ["Auto", "Magnitude", "Method", "Stage", "WassersteinRegression"]
