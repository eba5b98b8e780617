"""MNIST, from the four idx files in which it was published."""

import gzip
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from swap_prune.errors import InputError

MEAN, STANDARD_DEVIATION = 0.1307, 0.3081

# After two zero bytes the type of the numbers, of which MNIST uses one, and the dimensions.
UNSIGNED_BYTES = 8


def read(directory: Path) -> tuple[TensorDataset, TensorDataset]:
    """The training and test images of a directory with the idx files, plain or ``.gz``.

    Returns:
        Two data sets of normalised images (N, 1, 28, 28) and labels (N,).
    """
    return _split(directory, "train"), _split(directory, "t10k")


def _split(directory: Path, prefix: str) -> TensorDataset:
    images = read_idx(_find(directory, f"{prefix}-images-idx3-ubyte"))
    labels = read_idx(_find(directory, f"{prefix}-labels-idx1-ubyte"))
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise InputError(
            f"directory {str(directory)!r} holds {prefix} images of shape {tuple(images.shape)} "
            f"and labels of shape {tuple(labels.shape)}; (N, 28, 28) and (N,) are accepted"
        )
    normalised = images.float().div_(255).sub_(MEAN).div_(STANDARD_DEVIATION)
    return TensorDataset(normalised.unsqueeze(1), labels.long())


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise InputError(
        f"directory {str(directory)!r} has no MNIST file {name!r} (nor '{name}.gz'): run "
        "`swap-prune data fetch mnist`, or give a directory with the four idx files"
    )


def read_idx(path: Path) -> Tensor:
    """Read an idx file of unsigned bytes, plain or gzip-compressed.

    Returns:
        The array, uint8, of the shape that the file states.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise InputError(f"file {str(path)!r} can't be read ({error})") from error
    dimensions = content[3] if len(content) > 3 else 0
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], dtype=">u4").tolist() if len(content) >= start else []
    if content[:3] != bytes([0, 0, UNSIGNED_BYTES]) or len(content) != start + math.prod(shape):
        raise InputError(f"file {str(path)!r} isn't a complete idx file of unsigned bytes")
    # A bytearray, because tensors must be able to write to their memory.
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)
