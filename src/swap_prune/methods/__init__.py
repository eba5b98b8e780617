"""The pruning methods behind one face."""

from swap_prune.methods.base import Auto, Method, Stage
from swap_prune.methods.cbs import CombinatorialBrainSurgeon
from swap_prune.methods.magnitude import Magnitude
from swap_prune.methods.obd import OptimalBrainDamage
from swap_prune.methods.wasserstein import WassersteinRegression
from swap_prune.methods.woodfisher import WoodFisher

__all__ = [
    "Auto",
    "CombinatorialBrainSurgeon",
    "Magnitude",
    "Method",
    "OptimalBrainDamage",
    "Stage",
    "WassersteinRegression",
    "WoodFisher",
]
