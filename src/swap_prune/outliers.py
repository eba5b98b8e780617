"""Samples whose inputs are unlike the others', and which the model fails on.

An input is measured by its spread, the standard deviation of its own numbers, and by its floor,
that of its neighbourhoods in the direction in which they vary least. Noise adds to both, so that a
broken sensor, or the paper's input noise, shows as a second group of inputs far above the others:
strong noise by their spreads; weak noise by their floors, for it is alike in all directions, where
neighbouring numbers of images and signals have so much in common that some are nearly empty. Such
inputs may be right all the same (a rare class, a brighter scene): they are left out only where the
unpruned model, too, says that something is wrong, by losses far above those of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# A logarithm is outlying so many robust standard deviations (1.4826 MAD) above the median: a single
# one, and one of a group, of which it takes less.
ALONE, IN_GROUP = 3.5, 3.0
NORMAL = 1.4826
# Samples whose spread is computed at once, and numbers of neighbourhoods.
CHUNK, NUMBERS = 64, 2**24
# Numbers of a neighbourhood at most, and neighbourhoods of an input at least for each of them: with
# fewer, the direction in which they vary least is one of chance.
MOST_NEIGHBOURS, LEAST_NEIGHBOURHOODS = 64, 4
# Relative differences below this are rounding: identical samples have no outliers.
DUST = 1e-3
# A second group has at least this share of the samples; a few far out are in any data.
LEAST_SHARE = 0.02
# The model fails on it: so many times the others' mean loss, and so many standard errors above. No
# more, for the losses of noisy inputs have heavy tails, and so has the error
# (docs/noise_experiments.md).
LEAST_RATIO, LEAST_ERRORS = 1.5, 1.0


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


def floors(inputs: Any) -> Tensor:
    """The noise floor (samples,) in float64 of each input (channels, ...).

    A neighbourhood has two neighbours along every dimension but the channels', in all channels: 12
    numbers of a picture in colour. The floor is the square root of the smallest eigenvalue of the
    covariance of an input's own neighbourhoods, which is the variance of noise that is alike in all
    numbers, on top of what the input has in its emptiest direction (Pyatykh et al. 2013). Inputs
    without such dimensions or too small for it have no part in it.
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    found = torch.zeros(len(leaves[0]), dtype=torch.float64)
    for leaf in leaves:
        if not leaf.is_floating_point() or leaf.ndim < 3:
            continue
        neighbours = leaf.shape[1] * 2 ** (leaf.ndim - 2)
        neighbourhoods = math.prod(length - 1 for length in leaf.shape[2:])
        if not 0 < neighbours <= min(MOST_NEIGHBOURS, neighbourhoods / LEAST_NEIGHBOURHOODS):
            continue
        at_once = max(1, NUMBERS // (neighbours * neighbourhoods))
        for few in torch.arange(len(found)).split(at_once):
            covariances = _covariances(leaf[few])
            # Numbers that are missing (NaN) are the model's to deal with.
            covariances[~covariances.isfinite().all(dim=(1, 2))] = 0
            variances = covariances.diagonal(dim1=1, dim2=2).mean(1)
            # Rounding is noise, too: gray pictures in three equal channels have no other.
            rounding = torch.finfo(leaf.dtype).eps ** 2 * variances
            found[few] += torch.linalg.eigvalsh(covariances)[:, 0].maximum(rounding)
    return found.sqrt()


def _covariances(inputs: Tensor) -> Tensor:
    """The covariances (n, d, d) of the neighbourhoods of inputs (n, channels, ...)."""
    shifts = product((slice(None, -1), slice(1, None)), repeat=inputs.ndim - 2)
    exact = inputs.double()
    shifted = torch.cat([exact[:, :, *shift] for shift in shifts], 1).flatten(2)
    shifted -= shifted.mean(2, keepdim=True)
    return shifted @ shifted.mT / shifted.shape[2]


MEASURES = {"spread": spreads, "floor": floors}


@dataclass(frozen=True)
class Screen:
    """What tells samples that are left out.

    Attributes:
        measure: the name of one of `MEASURES`.
        most: above this, a sample is left out.
    """

    measure: str
    most: float

    def keeps(self, inputs: Any) -> Tensor:
        """Whether each sample (n,) stays; one that can't be measured does."""
        return ~(MEASURES[self.measure](inputs) > self.most)


def find(inputs: Any, losses: Tensor) -> Screen | None:
    """What tells samples that are to be left out; None where there are none.

    Args:
        inputs: of some samples, samples first.
        losses: of the same samples by the unpruned model (n,).
    """
    screens = []
    for name, measure in MEASURES.items():
        values = measure(inputs)
        most = largest_usual(values, losses)
        if most is not None:
            screens.append((int((values > most).sum()), Screen(name, most)))
    # Where noise is strong in some samples and weak in others, one measure sees more of it.
    return max(screens, key=lambda found: found[0])[1] if screens else None


def limit(values: Tensor, deviations: float = ALONE) -> float:
    """Above this, positive values (n,) are outliers; those that are not positive have no say."""
    logs = values[values > 0].log()
    if not len(logs):
        return math.inf
    median = logs.quantile(0.5)
    deviation = (logs - median).abs().quantile(0.5).clamp(min=DUST)
    return float((median + deviations * NORMAL * deviation).exp())


def largest_usual(values: Tensor, losses: Tensor) -> float | None:
    """The value above which samples are to be left out; None where none are.

    Args:
        values: of some samples' inputs by a measure (n,); what is not finite has no say.
        losses: of the same samples by the unpruned model (n,).
    """
    finite = values.isfinite()
    values, losses = values[finite], losses[finite]
    if not len(values):
        return None
    # A large group of outliers moves the median and its deviation. So from the lower half on, in
    # which there are none, the usual ones grow until those above their limit stay the same.
    most = float(values.quantile(0.5))
    while (wider := limit(values[values <= most], IN_GROUP)) > most:
        most = wider
    outlying = values > most
    if int(outlying.sum()) < max(2, LEAST_SHARE * len(values)):
        return None
    theirs, others = losses[outlying].double(), losses[~outlying].double()
    error = math.sqrt(float(theirs.var() / len(theirs) + others.var() / len(others)))
    difference = float(theirs.mean() - others.mean())
    least = (LEAST_RATIO - 1) * abs(float(others.mean()))  # of a difference: losses may be negative
    return most if difference > max(least, LEAST_ERRORS * error) else None
