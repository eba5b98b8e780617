"""Calibration samples: fresh ones for every stage, and some held out to choose settings by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from swap_prune.errors import InputError, reason

# A batch: (inputs, targets), each a tensor or a tuple or dict of tensors with samples first.
Batch = tuple[Any, Any]
# Samples by which a run knows its data again.
KNOWN_BY = 64
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


class Samples:
    """Samples by index, from whatever the user has.

    Args:
        source: a Dataset of pairs (input, target), a DataLoader over one, or a pair of tensors
            (inputs, targets); inputs and targets may be tuples or dicts of tensors.
        name: what the user calls it, for error messages.
    """

    def __init__(self, source: Any, name: str = "calibration") -> None:
        self.name = name
        with self._telling():
            self.size, self._read = _reader(source)
        if self.size == 0:
            raise InputError(f"{name} holds no sample; give at least one")

    def __len__(self) -> int:
        return self.size

    def read(self, indices: Tensor) -> Batch:
        """The samples at indices (b,)."""
        with self._telling():
            inputs, targets = self._read(indices)
            return _checked(inputs, len(indices)), _checked(targets, len(indices))

    def spread(self, most: int) -> Batch:
        """At most so many samples, from everywhere."""
        count = min(most, len(self))
        return self.read(torch.arange(count, device="cpu") * len(self) // count)

    def sample_bytes(self) -> int:
        """The memory that the first sample takes; transforms of it draw no numbers of torch's."""
        with torch.random.fork_rng(devices=[]):
            return sum(leaf.nbytes for leaf in tree_leaves(self.read(torch.arange(1))))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell in one sentence what is wrong with the data, under the user's name for it."""
        try:
            yield
        except InputError as error:
            raise InputError(str(error).replace("calibration", self.name, 1)) from error
        except Exception as error:  # as for an item
            raise InputError(
                f"{self.name} can't be read ({reason(error)}); every item must be a pair (input, "
                "target) of tensors or numbers, and all items of one shape (or come from a "
                "DataLoader with a collate_fn that pads them)"
            ) from error


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`."""
    return tree_map(lambda leaf: leaf.to(device), batch)


def some_of(samples: Samples, seed: int) -> Batch:
    """A few samples, from everywhere, that are the same whenever they are asked for by a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return to_device(samples.spread(KNOWN_BY), torch.device("cpu"))


class CalibrationStream:
    """The samples of every stage: some for its rows, others, held out, to choose settings by.

    Both are drawn anew for every stage, from two parts of the data that never mix. Settings chosen
    stage after stage on the same samples would suit only these; on samples that an earlier stage
    has fitted, the boldest step would seem the best.

    Args:
        source: as for `Samples`.
        held_out: the number of samples held out a stage.
        reserve: the number of samples, at least `held_out`, that these are drawn from.
        seed: of the order.
    """

    def __init__(self, source: Samples, held_out: int, reserve: int, seed: int) -> None:
        # Not by the seed itself: `torch.manual_seed(seed)` and `torch.randperm`, by which users
        # choose samples too, would give the same order, and what they chose would be held out.
        mixed = np.random.SeedSequence(seed).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        order = torch.randperm(len(source), generator=generator)
        self.source = source
        self.count = held_out
        self.reserve = _Deck(order[:reserve], generator)
        self.pool = _Deck(order[reserve:], generator)
        self.hold_out()

    def hold_out(self) -> None:
        """Go on to the held-out samples of the next stage."""
        self.held_out_indices = self.reserve.draw(self.count)

    def held_out(self) -> Batch:
        """The samples that no batch contains."""
        return self._read(self.held_out_indices)

    def draw(self, count: int) -> tuple[Batch, Tensor]:
        """The next `count` samples, at most as many as the pool has, and their indices."""
        chosen = self.skip(count)
        return self._read(chosen), chosen

    def skip(self, count: int) -> Tensor:
        """The indices of the next `count` samples, which are then gone."""
        return self.pool.draw(count)

    def _read(self, indices: Tensor) -> Batch:
        return to_device(self.source.read(indices), torch.device("cpu"))


class _Deck:
    """Indices drawn without repetition while there are enough left, then in a new order."""

    def __init__(self, indices: Tensor, generator: torch.Generator) -> None:
        self.indices, self.generator, self.position = indices, generator, 0

    def draw(self, count: int) -> Tensor:
        """The next `count` indices."""
        if self.position + count > len(self.indices):
            order = torch.randperm(len(self.indices), generator=self.generator)
            self.indices, self.position = self.indices[order], 0
        self.position += count
        return self.indices[self.position - count : self.position]


def _reader(source: Any) -> tuple[int, Callable[[Tensor], Batch]]:
    """The number of samples, and a function from indices (b,) to a batch."""
    if isinstance(source, DataLoader):
        if isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
            return _tensor_reader(_concatenate(list(source)))
        return _dataset_reader(source.dataset, source.collate_fn, _loader_indices(source))
    # Only the class itself: a subclass may transform what it returns.
    if type(source) is TensorDataset and len(source.tensors) == 2:
        return _tensor_reader((source.tensors[0], source.tensors[1]))
    if isinstance(source, IterableDataset):
        return _tensor_reader(_concatenate([default_collate([item]) for item in source]))
    if isinstance(source, (tuple, list)) and len(source) == 2 and tree_leaves(source):
        return _tensor_reader((source[0], source[1]))
    if isinstance(source, Dataset) or (
        hasattr(source, "__getitem__")
        and hasattr(source, "__len__")
        and not isinstance(source, Mapping)
    ):
        return _dataset_reader(source, default_collate, range(len(source)))  # type: ignore[arg-type]
    raise InputError(
        f"calibration is of type {type(source).__name__}; give a Dataset or DataLoader of pairs "
        "(input, target), or a pair of tensors (inputs, targets)"
    )


def _checked(tree: Any, samples: int) -> Any:
    """Tensors, alone or in tuples and dicts, that begin with the samples; no gradients for them."""
    tree = _as_dicts(tree)
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != samples:
            kind = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else leaf
            raise InputError(
                f"calibration yields {kind!s:.80} in a batch of {samples}; inputs and targets must "
                "be tensors, or tuples or dicts of tensors, with the samples first"
            )
    # Torch hardly computes with the wider unsigned integers.
    return tree_map(
        lambda leaf: leaf.long() if leaf.dtype in UNSIGNED else leaf.detach(),
        tree,
    )


def _as_dicts(tree: Any) -> Any:
    """Mappings of other kinds, such as tokenisers return, as dicts."""
    if isinstance(tree, Mapping):
        return {name: _as_dicts(value) for name, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_as_dicts(value) for value in tree)
    return tree


def _tensor_reader(batch: Batch) -> tuple[int, Callable[[Tensor], Batch]]:
    batch = _as_dicts(batch)
    leaves = tree_leaves(batch)
    if not all(isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves):
        wrong = next(x for x in leaves if not isinstance(x, Tensor) or x.ndim == 0)
        kind = "a tensor without dimensions" if isinstance(wrong, Tensor) else type(wrong).__name__
        raise InputError(
            f"calibration as a pair must hold tensors with samples first, not {kind}; "
            "arrays become tensors by torch.from_numpy, and single samples go into a Dataset"
        )
    sizes = sorted({leaf.shape[0] for leaf in leaves})
    if len(sizes) > 1:
        raise InputError(
            f"calibration holds tensors of {sizes[0]} and of {sizes[-1]} samples; "
            "inputs and targets must be of one length"
        )
    return sizes[0], lambda indices: tree_map(lambda leaf: leaf[indices], batch)


def _dataset_reader(
    dataset: Any, collate: Callable[[list[Any]], Any], allowed: Sequence[int]
) -> tuple[int, Callable[[Tensor], Batch]]:
    def item(i: int) -> Any:
        try:
            return dataset[allowed[i]]
        except Exception as error:  # the data are the user's: anything may come out of them
            raise InputError(
                f"calibration can't be read at sample {allowed[i]} ({reason(error)})"
            ) from error

    def read(indices: Tensor) -> Batch:
        return _as_pair(collate([item(i) for i in indices.tolist()]))

    return len(allowed), read


def _loader_indices(loader: DataLoader[Any]) -> Sequence[int]:
    """The samples a loader may yield: all of them, unless it has a sampler of the user's own.

    How often a sampler yields a sample is not kept: a stage draws each once.
    """
    if type(loader.batch_sampler) is BatchSampler and isinstance(
        loader.sampler, (SequentialSampler, RandomSampler)
    ):
        return range(len(loader.dataset))  # type: ignore[arg-type]
    assert loader.batch_sampler is not None
    return sorted({index for batch in loader.batch_sampler for index in batch})


def _as_pair(batch: Any) -> Batch:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    parts = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise InputError(
        f"calibration yields an item of type {type(batch).__name__}{parts} that is not a pair; "
        "every item must be (input, target): of several inputs ((x, mask), y), of a dict (inputs, "
        "inputs.pop('labels')) say"
    )


def _concatenate(batches: Sequence[Any]) -> Batch:
    """Join the batches of a stream, which can't be read by index, in memory."""
    if not batches:
        raise InputError("calibration holds no sample; give at least one")
    pairs = [_as_pair(batch) for batch in batches]
    return tree_map(lambda *leaves: torch.cat(leaves), pairs[0], *pairs[1:])
