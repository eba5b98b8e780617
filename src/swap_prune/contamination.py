"""How many labels are wrong, and a loss that gives suspicious samples less mass.

With a fraction η of the labels replaced at random, a label's probability is

    (1 - η) p(label | x) + η / K

for K classes. η is found by maximum likelihood with the trained model's p: a calibrated model on
clean data gives 0. The gradient of minus the logarithm is that of cross-entropy times

    mass = (1 - η) p / ((1 - η) p + η / K),

the probability that the label is right. So a sample's row and its held-out loss have a mass of
their own, at no cost: one label out of four being wrong no longer drowns the mean gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this a model's own overconfidence explains the estimate as well.
NEGLIGIBLE = 0.01
# Beyond this nothing would be left to prune by.
MOST = 0.9
# Beyond this it is rather the model that knows nothing than the labels that are wrong.
MOST_CREDIBLE = 0.8
FIRST_GUESS, ITERATIONS = 0.1, 200
# Log-likelihood, in nats, below which η may be chance: the likelihood ratio test at 5%, one-sided.
LEAST_GAIN = 1.35


def estimate(log_likelihoods: Tensor, classes: int) -> float:
    """The maximum-likelihood η, by expectation maximisation; 0 where it is negligible.

    Args:
        log_likelihoods: `log p(label | x)` (samples,) by a trained model.
        classes: K.
    """
    likelihoods = log_likelihoods.double().exp()
    eta = FIRST_GUESS
    for _ in range(ITERATIONS):
        right = (1 - eta) * likelihoods
        eta = float((1 - right / (right + eta / classes)).mean()) if eta > 0 else 0.0
    return min(eta, MOST) if eta > NEGLIGIBLE else 0.0


def likelihood_gain(log_likelihoods: Tensor, eta: float, classes: int) -> float:
    """By how much η explains the labels better than η = 0: log-likelihood, in nats."""
    likelihoods = log_likelihoods.double().exp()
    mixture = torch.log((1 - eta) * likelihoods + eta / classes)
    # EM stops a little short of the maximum, where the gain is not negative.
    return max(0.0, float((mixture - log_likelihoods).sum()))


def significant(log_likelihoods: Tensor, classes: int) -> float:
    """The maximum-likelihood η where it is more than chance, and credible; else 0."""
    eta = estimate(log_likelihoods, classes)
    gain = likelihood_gain(log_likelihoods, eta, classes)
    return eta if gain > LEAST_GAIN and eta <= MOST_CREDIBLE else 0.0


def log_likelihoods(output: Tensor, labels: Tensor) -> Tensor:
    """`log p(label | x)` (samples,) from outputs (samples, classes) and integer labels."""
    # Under vmap, functional.cross_entropy would first import sympy, which takes most of a second.
    return output.log_softmax(1).gather(1, labels.long()[:, None])[:, 0]


@dataclass(frozen=True)
class ContaminatedCrossEntropy:
    """Minus the mean of `log((1 - η) p + η / K)`; cross-entropy for η = 0.

    Attributes:
        contamination: η, in [0, 1).
    """

    contamination: float

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        """The loss (a scalar) of outputs (samples, classes) and integer labels (samples,)."""
        right = log_likelihoods(output, labels) + math.log1p(-self.contamination)
        if self.contamination == 0:
            return -right.mean()
        wrong = torch.full_like(right, math.log(self.contamination) - math.log(output.shape[1]))
        return -torch.logaddexp(right, wrong).mean()
