"""Re-estimation of BatchNorm's running statistics on calibration data, without training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from swap_prune.calling import call, evaluation_mode

# Samples that suffice for the statistics.
SAMPLES = 1000
# Statistics of a batch this large are close to those of the whole, and it fits in memory.
BATCH_SAMPLES = 250


def layers(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The BatchNorm layers that keep running statistics."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    ]


def reestimate(model: nn.Module, inputs: Any) -> None:
    """Replace the running means and variances by averages over `inputs` (samples first).

    Layers that the forward pass does not reach keep theirs, as all do for a single sample, which
    has no variance.
    """
    norms = layers(model)
    before = statistics(model)
    momenta = [norm.momentum for norm in norms]
    samples = tree_leaves(inputs)[0].shape[0]
    if samples < 2:
        return
    # Equal parts: a small last batch would weigh as much as the others in a plain average.
    parts = max(1, round(samples / BATCH_SAMPLES))
    with torch.no_grad(), evaluation_mode(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over the batches
            norm.train()
        for part in torch.arange(samples).tensor_split(parts):
            call(model, tree_map(lambda leaf, part=part: leaf[part], inputs))
    for norm, momentum, saved in zip(norms, momenta, before, strict=True):
        norm.momentum = momentum
        if not norm.num_batches_tracked:
            _put_back(norm, saved)


def statistics(model: nn.Module) -> list[tuple[torch.Tensor, ...]]:
    """Copies of the running statistics, for `restore`."""
    return [
        tuple(buffer.clone() for buffer in norm.buffers(recurse=False)) for norm in layers(model)
    ]


def restore(model: nn.Module, saved: list[tuple[torch.Tensor, ...]]) -> None:
    """Put back what `statistics` copied."""
    for norm, buffers in zip(layers(model), saved, strict=True):
        _put_back(norm, buffers)


def _put_back(norm: nn.Module, buffers: tuple[torch.Tensor, ...]) -> None:
    for buffer, value in zip(norm.buffers(recurse=False), buffers, strict=True):
        buffer.copy_(value)
