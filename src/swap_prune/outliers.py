"""Samples whose inputs are unlike the others', and which the model fails on.

An input's spread is the standard deviation of its own numbers. Noise adds to it, so that a broken
sensor, or the paper's input noise where a network needs much of it, shows as a second group of
inputs far above the others. Such inputs may be right all the same (a rare class, a brighter scene):
they are left out only where the unpruned model, too, says that something is wrong, by losses far
above those of the others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# A logarithm is outlying so many robust standard deviations (1.4826 MAD) above the median: a single
# one, and one of a group, of which it takes less.
ALONE, IN_GROUP = 3.5, 3.0
NORMAL = 1.4826
# Samples whose spread is computed at once.
CHUNK = 64
# Relative differences below this are rounding: identical samples have no outliers.
DUST = 1e-3
# A second group has at least this share of the samples; a few far out are in any data.
LEAST_SHARE = 0.02
# The model fails on it: so many times the others' mean loss, and so many standard errors above.
LEAST_RATIO, LEAST_ERRORS = 1.5, 2.0


def spreads(inputs: Any) -> Tensor:
    """The standard deviation (samples,) in float64 of each input's own numbers.

    Integers and single numbers a sample have no part in it.
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    parts = [leaf.flatten(1) for leaf in leaves if leaf.is_floating_point() and leaf.ndim > 1]
    found = torch.zeros(len(leaves[0]), dtype=torch.float64)
    if parts:
        # A few samples at a time: a copy of all in float64 might not fit into memory.
        for few in torch.arange(len(found)).split(CHUNK):
            found[few] = torch.cat([part[few].double() for part in parts], 1).std(1, correction=0)
    return found


def limit(values: Tensor, deviations: float = ALONE) -> float:
    """Above this, positive values (n,) are outliers; those that are not positive have no say."""
    logs = values[values > 0].log()
    if not len(logs):
        return math.inf
    median = logs.quantile(0.5)
    deviation = (logs - median).abs().quantile(0.5).clamp(min=DUST)
    return float((median + deviations * NORMAL * deviation).exp())


def largest_usual(spreads: Tensor, losses: Tensor) -> float | None:
    """The spread above which samples are to be left out; None where none are.

    Args:
        spreads: of some samples' inputs (n,).
        losses: of the same samples by the unpruned model (n,).
    """
    # A large group of outliers moves the median and its deviation. So from the lower half on, in
    # which there are none, the usual ones grow until those above their limit stay the same.
    most = float(spreads.quantile(0.5))
    while (wider := limit(spreads[spreads <= most], IN_GROUP)) > most:
        most = wider
    outlying = spreads > most
    if int(outlying.sum()) < max(2, LEAST_SHARE * len(spreads)):
        return None
    theirs, others = losses[outlying].double(), losses[~outlying].double()
    error = math.sqrt(float(theirs.var() / len(theirs) + others.var() / len(others)))
    difference = float(theirs.mean() - others.mean())
    least = (LEAST_RATIO - 1) * abs(float(others.mean()))  # of a difference: losses may be negative
    return most if difference > max(least, LEAST_ERRORS * error) else None
