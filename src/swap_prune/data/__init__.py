"""Data sets to calibrate, train and test with: a few known ones, or the user's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from swap_prune.data import cifar10, digits, imagenet, mnist
from swap_prune.data.fetch import cache_directory, fetch
from swap_prune.errors import InputError
from swap_prune.factory import call_factory

__all__ = ["BUILT_IN", "Splits", "fetch", "load"]

BUILT_IN = ("cifar10", "digits", "imagenet", "mnist")


@dataclass(frozen=True)
class Splits:
    """A data set in two parts, each of pairs (image, label).

    Attributes:
        train: What calibration and fine-tuning may use.
        test: What accuracy is measured on.
        name: What the data set is called.
    """

    train: Dataset[Any] | DataLoader[Any]
    test: Dataset[Any] | DataLoader[Any]
    name: str


def load(name: str, directory: str | Path | None = None) -> Splits:
    """Load a data set.

    Args:
        name: One of `BUILT_IN`, or ``package.module:factory``, a function without arguments that
            returns a pair (train, test) of data sets or DataLoaders, or a `Splits`.
        directory: Where the files of ``mnist`` and ``cifar10`` (the cache unless given) or of
            ``imagenet`` are; the others take none.

    Raises:
        InputError: There is no such data set, or its files are missing or broken.
    """
    if name not in BUILT_IN and ":" not in name:
        raise InputError(
            f"data set {name!r} doesn't exist; {', '.join(BUILT_IN)} "
            "or 'package.module:factory' are accepted"
        )
    if name == "imagenet":
        if directory is None:
            raise InputError("data set 'imagenet' needs a directory with 'train' and 'val' folders")
        return Splits(*imagenet.read(Path(directory)), name=name)
    if name in ("cifar10", "mnist"):
        read = cifar10.read if name == "cifar10" else mnist.read
        return Splits(*read(Path(directory or cache_directory(name))), name=name)
    if directory is not None:
        raise InputError(f"data set {name!r} takes no directory, but {str(directory)!r} was given")
    if name == "digits":
        return Splits(*digits.read(), name=name)
    return _from_factory(name)


def _from_factory(reference: str) -> Splits:
    made = call_factory("data set", reference)
    if isinstance(made, Splits):
        return made
    if not (isinstance(made, tuple | list) and len(made) == 2 and all(map(_is_data, made))):
        raise InputError(
            f"data set {reference!r} returned {_kind(made)}; a pair (train, test) is expected, "
            "each a data set with a length, a DataLoader or a pair of tensors, or a Splits"
        )
    train, test = made
    return Splits(train, test, reference)


def _kind(made: object) -> str:
    if isinstance(made, tuple | list):
        return f"{type(made).__name__} of {', '.join(type(part).__name__ for part in made)}"
    return f"an object of type {type(made).__name__}"


def _is_data(given: object) -> bool:
    if isinstance(given, Tensor | np.ndarray):
        return False  # inputs or labels alone: a factory that returned (x, y) of one set
    indexable = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    return indexable or isinstance(given, DataLoader)
