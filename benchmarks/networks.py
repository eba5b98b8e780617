"""The two networks that benchmarks prune, and the rows of gradients that suit them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from swap_prune import data, models

NETWORKS: dict[str, dict[str, Any]] = {
    "mlpnet": {
        "data": "mnist",
        "weights": "mlpnet_mnist.safetensors",
        "settings": {"stages": 15, "samples": 1000, "samples_per_row": 16},
    },
    "resnet20": {
        "data": "cifar10",
        "weights": "resnet20_cifar10.safetensors",
        "settings": {"stages": 15, "samples": 1000, "samples_per_row": 8, "held_out": 500},
    },
}


def loader(checkpoints: Path) -> Callable[[dict[str, Any]], tuple[nn.Module, data.Splits]]:
    """What loads the network of a benchmark's cell, each once."""
    once = functools.cache(lambda network: load(network, checkpoints))
    return lambda cell: once(cell["network"])


def load(network: str, checkpoints: Path) -> tuple[nn.Module, data.Splits]:
    """A network with the paper's weights, and its data.

    Args:
        network: a key of `NETWORKS`.
        checkpoints: the directory of the weights.
    """
    model = models.build(network)
    models.load_weights(model, checkpoints / NETWORKS[network]["weights"])
    return model, data.load(NETWORKS[network]["data"])
