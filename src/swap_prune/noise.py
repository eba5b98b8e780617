"""Noise put on calibration data, to see what a method makes of it."""

from __future__ import annotations

import torch
from torch import Tensor


def add_input_noise(
    inputs: Tensor, fraction: float, deviation: float, generator: torch.Generator
) -> Tensor:
    """A copy of `inputs` (samples, ...) in which a random fraction of samples is noisy.

    Args:
        inputs: samples first.
        fraction: of the samples, in [0, 1].
        deviation: standard deviation of the Gaussian noise, in units of the inputs' own.
        generator: what samples and noise are drawn from.
    """
    noisy = inputs.clone()
    count = round(fraction * len(inputs))
    chosen = torch.randperm(len(inputs), generator=generator)[:count]
    noise = torch.randn(noisy[chosen].shape, generator=generator)
    noisy[chosen] += deviation * inputs.std() * noise
    return noisy
