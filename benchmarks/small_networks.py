"""Small networks of three kinds, as JSON; `benchmarks.readme` has the table.

    python -m benchmarks.small_networks

What a newcomer tries first: an MLP, a CNN and a transformer for scikit-learn's digits, trained
until they know their 500 images by heart, and calibrated with 400 of these ("seen") or with 400
others ("unseen"); and to 0.8 with fewer. Each seed is another draw of the images, another network
and another run. 15 stages for all methods, defaults otherwise, no training after the cut. What is
measured are the 397 training images left over, never the test images. Every finished run is written
at once and never run again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from benchmarks.cells import Cell, Runs
from swap_prune import data
from swap_prune.models.mlp import MLP

METHODS = ("magnitude", "wf", "lr", "ewr")
SPARSITIES = (0.8, 0.9, 0.95)
FEW_METHODS = ("magnitude", "wf", "cbs", "lr", "ewr")
# Of the 1,297 training images; calibration takes as many seen as unseen ones.
TRAINED_ON, CALIBRATED_WITH = 500, 400
FEW = (10, 20, 50, 100)
CALIBRATIONS = ("seen", "unseen")
EPOCHS = 100
BATCH_SIZE = 64
LEARNING_RATE = 2e-3


class Block(nn.Module):
    """Self-attention and two linear layers, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_linear = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.linear = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (N, length, width) to as many."""
        normed = self.before_attention(tokens)
        parts = (layer(normed) for layer in (self.query, self.key, self.value))
        query, key, value = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in parts)
        attended = functional.scaled_dot_product_attention(query, key, value)
        tokens = tokens + self.out(attended.transpose(1, 2).flatten(2))
        return tokens + self.linear(self.before_linear(tokens))


class Transformer(nn.Module):
    """Two blocks of width 32 for digits: a row of pixels is a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.position = nn.Parameter(0.1 * torch.randn(8, 32))
        self.blocks = nn.Sequential(Block(32, 4), Block(32, 4))
        self.classify = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images (N, 1, 8, 8) to logits (N, 10)."""
        return self.classify(self.blocks(self.embed(images[:, 0]) + self.position).mean(1))


def cnn() -> nn.Module:
    """Two convolutions with BatchNorm and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP((64, 48, 32, 10), bias=True),
    "cnn": cnn,
    "transformer": Transformer,
}


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/small_networks.json"))
    options = parser.parse_args()
    runs = Runs(options.out, load)
    names = ("seed", "network", "calibration", "images", "sparsity", "method")
    seeds = range(options.seeds)
    many = (seeds, NETWORKS, CALIBRATIONS, (CALIBRATED_WITH,), SPARSITIES, METHODS)
    few = (seeds, NETWORKS, CALIBRATIONS, FEW, SPARSITIES[:1], FEW_METHODS)
    chosen = itertools.chain(itertools.product(*many), itertools.product(*few))
    for cell in runs.missing(dict(zip(names, values, strict=True)) for values in chosen):
        runs.add(cell, runs.data(cell).train, sparsity=cell["sparsity"], stages=15)


def load(cell: Cell) -> tuple[nn.Module, data.Splits]:
    """A cell's network, its calibration images, and those that it is measured on."""
    model, seen, unseen, others = trained(cell["network"], cell["seed"])
    images = seen if cell["calibration"] == "seen" else unseen
    return model, data.Splits(TensorDataset(*images[: cell["images"]]), others, "digits")


@functools.cache
def trained(network: str, seed: int) -> tuple[nn.Module, *tuple[TensorDataset, ...]]:
    """A network, images that it was trained on, as many that it was not, and all others."""
    torch.manual_seed(seed)
    digits = data.load("digits").train
    assert isinstance(digits, TensorDataset)
    order = torch.randperm(len(digits))
    images, labels = digits[order[:TRAINED_ON]]
    model = NETWORKS[network]()
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        for batch in torch.randperm(TRAINED_ON).split(BATCH_SIZE):
            optimiser.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimiser.step()
    unseen = order[TRAINED_ON:]
    parts = (order[:CALIBRATED_WITH], unseen[:CALIBRATED_WITH], unseen[CALIBRATED_WITH:])
    return model.eval(), *(TensorDataset(*digits[part]) for part in parts)


if __name__ == "__main__":
    main()
