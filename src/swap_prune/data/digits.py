"""Scikit-learn's 1,797 handwritten digits: 8×8 pixels, values 0 to 16."""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from swap_prune.errors import InputError

TEST_SIZE = 500


def read() -> tuple[TensorDataset, TensorDataset]:
    """The training (1,297) and test (500) images, always split alike, as many of each class.

    Returns:
        Two data sets of images (N, 1, 8, 8) between 0 and 1, and labels (N,).
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise InputError(
            "data set 'digits' needs scikit-learn: install 'swap-prune[demo]'"
        ) from error
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().div_(16).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).long()
    train, test = train_test_split(
        range(len(labels)), test_size=TEST_SIZE, stratify=bunch.target, random_state=0
    )
    return _subset(images, labels, train), _subset(images, labels, test)


def _subset(images: Tensor, labels: Tensor, indices: list[int]) -> TensorDataset:
    return TensorDataset(images[indices], labels[indices])
