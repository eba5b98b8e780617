"""Multilayer perceptrons."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers ``fc1``, ``fc2``, ... with a ReLU between each two."""

    def __init__(self, widths: tuple[int, ...], bias: bool) -> None:
        """Build the layers.

        Args:
            widths: Size of the flattened input, of each hidden layer and of the output.
            bias: Whether the layers have a bias.
        """
        super().__init__()
        for index, (inputs, outputs) in enumerate(pairwise(widths), start=1):
            self.add_module(f"fc{index}", nn.Linear(inputs, outputs, bias=bias))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, ...) to logits (N, classes)."""
        first, *others = self.children()
        hidden = first(images.flatten(1))
        for layer in others:
            hidden = layer(torch.relu(hidden))
        return hidden


def mlpnet() -> MLP:
    """MLPNet, 784-40-20-10 without bias, for MNIST: images (N, 1, 28, 28)."""
    return MLP((784, 40, 20, 10), bias=False)


def digits() -> MLP:
    """The small network for scikit-learn's digits: images (N, 1, 8, 8)."""
    return MLP((64, 128, 64, 10), bias=True)
