"""How many labels are wrong, from what the model makes of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIRST_GUESS = 0.1
MOST_ITERATIONS = 200
TOLERANCE = 1e-6


def estimate(log_likelihoods: Tensor, classes: int) -> float:
    """η of the mixture `p(label) = (1-η) p_model(label | x) + η/K`, by maximum likelihood.

    A label is taken to be the model's with probability 1-η and drawn blindly otherwise. EM: each
    sample's probability of a blind label, then η as their mean.

    Args:
        log_likelihoods: `log p_model(label | x)` (samples,), at least one.
        classes: K.

    Returns:
        η in [0, 1]; the first guess, 0.1, if the model gives every label 1/K and so says nothing.
    """
    model = log_likelihoods.double()
    eta = FIRST_GUESS
    for _ in range(MOST_ITERATIONS):
        # log of the odds of a blind label: finite even where the model's probability underflows.
        odds = math.log(eta / classes) - math.log1p(-eta) - model
        last, eta = eta, float(torch.sigmoid(odds).mean())
        if abs(eta - last) < TOLERANCE or not 0 < eta < 1:
            break
    return eta
