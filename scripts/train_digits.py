"""Train the digits network that comes with the package, and write its weights.

Run as ``python scripts/train_digits.py``; it takes a few seconds and prints the accuracy. The
recipe is Adam's default and was not chosen by the test set, which is looked at once, at the end.
"""

import torch
from safetensors.torch import save
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from swap_prune import data, models

SEED = 0
EPOCHS = 60
BATCH_SIZE = 64
LEARNING_RATE = 1e-3


def train(model: nn.Module, data_set: TensorDataset) -> None:
    """Minimise the cross-entropy with Adam and a cosine schedule.

    Args:
        model: The network, changed in place.
        data_set: Images (N, 1, 8, 8) and labels (N,).
    """
    images, labels = data_set.tensors
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels)).split(BATCH_SIZE):
            logits = model(images[batch])
            optimiser.zero_grad()
            functional.cross_entropy(logits, labels[batch]).backward()
            optimiser.step()
        schedule.step()


@torch.no_grad()
def top1(model: nn.Module, data_set: TensorDataset) -> float:
    """Percentage of images that the network classifies correctly."""
    images, labels = data_set.tensors
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train, tell the accuracy, write the file."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    splits = data.load("digits")
    model = models.build("digits")
    assert isinstance(splits.train, TensorDataset)
    assert isinstance(splits.test, TensorDataset)
    train(model, splits.train)
    print(f"train {top1(model, splits.train):.2f} %, test {top1(model, splits.test):.2f} %")
    models.PRETRAINED["digits"].write_bytes(save(model.state_dict()))


if __name__ == "__main__":
    main()
