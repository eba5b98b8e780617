"""Noise put on calibration, to see what a method makes of it.

A stage goes from samples over weights to rows, and a noise acts on one of the three:

* `samples`: the batch before gradients are taken (input, labels);
* `weights`: the model while they are taken (analog);
* `rows`: the gradient matrix `G` (n × p) afterwards (gradient-entries, gradient-rows, adversarial).

Each noise overrides its part and leaves the others as they are, so that a caller goes through any
number of them in turn without knowing which is which:

    for noise in noises:
        noise = noise.calibrate(batch, rows, generator)
        batch = noise.samples(batch, generator)

All chance comes from the `torch.Generator` (on the CPU) handed in. A fraction of n things is
exactly `round(fraction · n)` of them. σ is the standard deviation over all entries of `G`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from swap_prune.calibration import Batch
from swap_prune.errors import InputError
from swap_prune.gradients import GradientOperator
from swap_prune.prunable import PrunableWeights

Rows = Callable[[Batch], Tensor | GradientOperator]

# The search for the inputs' noise, in units of the inputs' own standard deviation: where it starts,
# and beyond which nothing of an input is left.
FIRST_DEVIATION, LARGEST_DEVIATION = 2.0**-4, 2.0**10
MOST_ITERATIONS = 30
# Misses as fractions of the level: where the search ends, and what is still handed on when the
# gradients jump (a unit of a small network switches) so that no noise comes closer.
TOLERANCE, ACCEPTED_MISS = 0.02, 0.2

LABEL_TYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Reached:
    """What the calibration of input noise reached.

    Attributes:
        deviation: standard deviation of the noise, in units of the inputs' own.
        sigma_clean: σ of the clean batch.
        sigma_reached: σ of the noisy one, wanted to be (1 + level) · `sigma_clean`.
        iterations: how many times the noisy gradients were taken.
    """

    deviation: float
    sigma_clean: float
    sigma_reached: float
    iterations: int


@dataclass(frozen=True)
class Noise:
    """The face of every noise; a part that a noise does not act on is left as it is.

    Attributes:
        kind: its name in `NOISES`.
    """

    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for name, described, largest in (
            ("fraction", "a number in [0, 1]", 1.0),
            ("level", "a finite number of at least 0", math.nextafter(math.inf, 0)),
        ):
            if name in _settings_of(type(self)):
                value = getattr(self, name)
                if value is None:
                    raise InputError(
                        f"noise {name} is missing; kind={self.kind!r} takes {described}"
                    )
                numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not numeric or not 0 <= value <= largest:
                    raise InputError(f"noise {name}={value!r} must be {described}")

    def calibrate(self, batch: Batch, rows: Rows, generator: torch.Generator) -> Noise:
        """The noise with its strength fitted to a model; itself where there is nothing to fit.

        Args:
            batch: the clean samples.
            rows: from a batch to its `G` (n, p), which may reuse one buffer: each is done with
                before the next is asked for.
            generator: left where it stands, so that `samples`, called next with the same batch,
                makes the very draw that was measured.

        Raises:
            InputError: if the level can't be reached; says the largest that could.
        """
        return self

    def samples(
        self, batch: Batch, generator: torch.Generator, classes: int | None = None
    ) -> Batch:
        """The batch with noise; the given one is not modified.

        Args:
            batch: inputs and targets, samples first.
            generator: what is drawn from.
            classes: how many there are; default: as many as the labels show.
        """
        return batch

    def weights(
        self, model: nn.Module, prunable: PrunableWeights, generator: torch.Generator
    ) -> AbstractContextManager[None]:
        """A context in which the model's weights are noisy; they are restored to the bit."""
        return nullcontext()

    def rows(self, matrix: Tensor, generator: torch.Generator) -> None:
        """Put noise on `G` (n, p) in place, a row at a time."""

    def describe(self) -> dict[str, Any]:
        """The noise as JSON can hold it."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class InputNoise(Noise):
    """The paper's: Gaussian noise on the inputs of a fraction of the samples.

    It is as strong as makes σ of the noisy batch `(1 + level)` times that of the clean one, which
    `calibrate` finds by trials. Integer inputs (tokens) stay as they are.

    Attributes:
        fraction: of the samples, in [0, 1].
        level: by how many σ the standard deviation of the gradients grows.
        reached: what the calibration reached; None before it.
    """

    fraction: float
    level: float
    reached: Reached | None = None
    kind: ClassVar[str] = "input"

    def calibrate(self, batch: Batch, rows: Rows, generator: torch.Generator) -> InputNoise:
        """A copy whose noise raises σ to `(1 + level)` σ on this batch."""
        inputs, targets = batch
        kinds = [leaf.dtype for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if not any(kind.is_floating_point for kind in kinds):
            raise InputError(
                f"noise kind='input' needs floating-point inputs; these are {kinds[0]}"
            )
        state = generator.get_state()

        def sigma(deviation: float) -> float:
            # The same samples and the same draw, scaled: σ then grows nearly monotonically.
            twin = torch.Generator().set_state(state)
            noisy = add_input_noise(inputs, self.fraction, deviation, twin)
            try:
                return _sigma(rows((noisy, targets)))
            except InputError:
                # The clean batch has finite gradients, so this noise is what makes one infinite.
                return math.inf

        level = self.level if self.fraction else 0.0
        return replace(self, reached=_search(sigma, _sigma(rows(batch)), level))

    def samples(
        self, batch: Batch, generator: torch.Generator, classes: int | None = None
    ) -> Batch:
        """The batch with noise on the inputs of some samples."""
        if self.reached is None:
            raise InputError("noise kind='input' has no deviation yet; call calibrate first")
        return (
            add_input_noise(batch[0], self.fraction, self.reached.deviation, generator),
            batch[1],
        )


@dataclass(frozen=True)
class EntryNoise(Noise):
    """The authors' code: Gaussian noise on a random fraction of the entries of every row of `G`.

    Attributes:
        fraction: of the entries of each row, in [0, 1].
        level: the noise's standard deviation in units of that row's own.
    """

    fraction: float
    level: float
    kind: ClassVar[str] = "gradient-entries"

    def rows(self, matrix: Tensor, generator: torch.Generator) -> None:
        """Put noise on some entries of every row of `matrix` (n, p), in place."""
        for row in matrix:
            chosen = _choose(len(row), self.fraction, generator)
            noise = torch.randn(len(chosen), generator=generator)
            row.index_add_(0, chosen, noise, alpha=self.level * _sigma(row))


@dataclass(frozen=True)
class RowNoise(Noise):
    """Gaussian noise on every entry of a random fraction of the rows of `G`.

    Its standard deviation is `level` σ, that of the whole of `G`, not the row's own: most gradients
    of a model that fits its data nearly vanish, and noise in proportion would vanish with them.

    Attributes:
        fraction: of the rows, in [0, 1].
        level: the noise's standard deviation in units of σ.
    """

    fraction: float
    level: float
    kind: ClassVar[str] = "gradient-rows"

    def rows(self, matrix: Tensor, generator: torch.Generator) -> None:
        """Put noise on some rows of `matrix` (n, p), in place."""
        deviation = self.level * _sigma(matrix)
        for index in _choose(len(matrix), self.fraction, generator).tolist():
            noise = torch.randn(matrix.shape[1], generator=generator)
            matrix[index].add_(noise, alpha=deviation)


@dataclass(frozen=True)
class LabelNoise(Noise):
    """A fraction of the labels replaced by another class, each of the others as likely.

    Attributes:
        fraction: of the samples, in [0, 1].
    """

    fraction: float
    kind: ClassVar[str] = "labels"

    def samples(
        self, batch: Batch, generator: torch.Generator, classes: int | None = None
    ) -> Batch:
        """The batch with some labels, integers (samples, ...) below `classes`, replaced."""
        inputs, labels = batch
        classes = _check_labels(labels, classes)
        chosen = _choose(len(labels), self.fraction, generator)
        old = labels[chosen].long()
        # A step of 1 ... classes - 1 around the circle of classes ends at each of the others.
        steps = torch.randint(1, classes, old.shape, generator=generator)
        replaced = labels.clone()
        replaced[chosen] = ((old + steps) % classes).to(labels.dtype)
        return inputs, replaced


@dataclass(frozen=True)
class AnalogNoise(Noise):
    """Multiplicative Gaussian noise, `w (1 + level · N(0, 1))`, while gradients are taken.

    It acts on the prunable weights, those an analog array would hold: biases and normalisation are
    digital. One draw serves all samples of a stage, as one programming of a chip does. Weights
    pruned already stay zero.

    Attributes:
        level: the noise's standard deviation in units of each weight.
    """

    level: float
    kind: ClassVar[str] = "analog"

    @contextmanager
    def weights(
        self, model: nn.Module, prunable: PrunableWeights, generator: torch.Generator
    ) -> Iterator[None]:
        """A context in which the prunable weights are noisy; they are restored to the bit."""
        with prunable.kept(model) as parameters:
            with torch.no_grad():
                for parameter in parameters:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.mul_((1 + self.level * noise).to(parameter))
            yield


@dataclass(frozen=True)
class AdversarialRows(Noise):
    """A random fraction of the rows of `G` replaced by `-level` times themselves.

    Attributes:
        fraction: of the rows, in [0, 1].
        level: the factor; 1 flips signs alone, and 0 makes the rows vanish.
    """

    fraction: float
    level: float
    kind: ClassVar[str] = "adversarial"

    def rows(self, matrix: Tensor, generator: torch.Generator) -> None:
        """Flip and scale some rows of `matrix` (n, p), in place."""
        for index in _choose(len(matrix), self.fraction, generator).tolist():
            matrix[index].mul_(-self.level)


NOISES: dict[str, type[Noise]] = {
    noise.kind: noise
    for noise in (InputNoise, EntryNoise, RowNoise, LabelNoise, AnalogNoise, AdversarialRows)
}


def build(kind: str, fraction: float | None = None, level: float | None = None) -> Noise:
    """The noise of a name in `NOISES`.

    Args:
        kind: "input", "gradient-entries", "gradient-rows", "labels", "analog" or "adversarial".
        fraction: of what it acts on, in [0, 1]; none for "analog".
        level: how strong it is, at least 0; none for "labels".

    Raises:
        InputError: a value can't be used, is missing, or has no part in this kind.
    """
    if not isinstance(kind, str) or kind not in NOISES:
        raise InputError(f"noise kind={kind!r} is unknown; accepted are {', '.join(NOISES)}")
    taken = _settings_of(NOISES[kind])
    given = {"fraction": fraction, "level": level}
    for name, value in given.items():
        if value is not None and name not in taken:
            raise InputError(
                f"noise {name}={value!r} has no part in kind={kind!r}, "
                f"which takes only a {' and a '.join(taken)}; leave it out"
            )
    return NOISES[kind](**{name: given[name] for name in taken})


def resolve(given: Any) -> tuple[Noise, ...]:
    """The noises that a user means.

    Args:
        given: None; a `Noise`; a mapping with "kind" and, as it takes them, "fraction" and "level";
            or a list of such.

    Raises:
        InputError: a noise is not one of these, or a value can't be used.
    """
    if given is None:
        return ()
    noises = []
    for one in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(one, Mapping):
            unknown = one.keys() - {"kind", "fraction", "level"}
            if unknown or "kind" not in one:
                raise InputError(
                    f"noise={dict(one)!r} must have a kind and, as the kind takes them, a fraction "
                    "and a level"
                )
            one = build(**one)
        if not isinstance(one, Noise):
            raise InputError(
                f"noise is of type {type(one).__name__}; give a Noise, a mapping with its kind, "
                "fraction and level, or a list of these"
            )
        noises.append(one)
    return tuple(noises)


def from_description(described: Mapping[str, Any]) -> Noise:
    """The noise that `Noise.describe` described, with what its calibration reached."""
    values = dict(described)
    noise = NOISES[values.pop("kind")]
    if values.get("reached") is not None:
        values["reached"] = Reached(**values["reached"])
    return noise(**values)


def add_input_noise(
    inputs: Any, fraction: float, deviation: float, generator: torch.Generator
) -> Any:
    """A copy of `inputs` (samples, ...) in which a random fraction of samples is noisy.

    Args:
        inputs: a tensor, tuple or dict of tensors, samples first; those of integers stay.
        fraction: of the samples, in [0, 1].
        deviation: standard deviation of the Gaussian noise, in units of each tensor's own.
        generator: what samples and noise are drawn from.
    """
    chosen = _choose(tree_leaves(inputs)[0].shape[0], fraction, generator)

    def noisy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        noise = torch.randn((len(chosen), *leaf.shape[1:]), generator=generator)
        # The estimate from one number alone would be NaN.
        own = leaf.std(correction=int(leaf.numel() > 1))
        changed = leaf.clone()
        changed[chosen] += (deviation * own * noise).to(leaf.dtype)
        return changed

    return tree_map(noisy, inputs)


def _settings_of(noise: type[Noise]) -> list[str]:
    """Which of fraction and level a kind of noise takes."""
    return [field.name for field in fields(noise) if field.name in ("fraction", "level")]


def _choose(count: int, fraction: float, generator: torch.Generator) -> Tensor:
    """A random fraction of the indices below `count`."""
    return torch.randperm(count, generator=generator)[: round(fraction * count)]


def _sigma(gradients: Tensor | GradientOperator) -> float:
    """The standard deviation over all entries."""
    matrix = gradients if isinstance(gradients, Tensor) else gradients.rows()
    return float(matrix.std(correction=0))


def _search(sigma: Callable[[float], float], clean: float, level: float) -> Reached:
    """The deviation whose σ is `(1 + level) · clean`: doubled until it is too much, then between.

    σ² = a + b deviation², as of independent noise, says where between, not too near to either end;
    every other time it is the middle, for gradients that jump.

    Args:
        sigma: from the deviation of the inputs' noise to σ of the gradients.
        clean: σ without noise.
        level: wanted.
    """
    if level > 0 and not clean > 0:
        raise InputError(
            f"noise level={level} can't be reached: it is relative to the standard deviation of "
            "the clean gradients, and they all vanish"
        )
    target = (1 + level) * clean
    measured = {0.0: clean}

    def miss(deviation: float) -> float:
        return abs(measured[deviation] - target)

    def between(low: float, high: float) -> float:
        rise = measured[high] ** 2 - measured[low] ** 2
        share = (target**2 - measured[low] ** 2) / rise
        middle, quarter = (low + high) / 2, (high - low) / 4
        if len(measured) % 2 or not 0 < share < 1:
            return middle
        trial = math.sqrt(low**2 + share * (high**2 - low**2))
        return min(max(trial, middle - quarter), middle + quarter)

    low, high, trial, best = 0.0, math.inf, FIRST_DEVIATION, 0.0
    while miss(best) > TOLERANCE * level * clean:
        if trial > LARGEST_DEVIATION or len(measured) > MOST_ITERATIONS:
            break
        measured[trial] = sigma(trial)
        best = min(best, trial, key=miss)
        low, high = (low, trial) if measured[trial] >= target else (trial, high)
        trial = 2 * low if high == math.inf else between(low, high)
    jumps = high < math.inf
    if miss(best) > (ACCEPTED_MISS if jumps else TOLERANCE) * level * clean:
        deviation = max((d for d in measured if measured[d] < target), key=measured.__getitem__)
        raise InputError(
            f"noise level={level} can't be reached: the largest below it is "
            f"{measured[deviation] / clean - 1:.3g}, with noise of {deviation:.3g} times the "
            "inputs' own standard deviation"
        )
    return Reached(best, clean, measured[best], len(measured) - 1)


def _check_labels(labels: Any, classes: int | None) -> int:
    """The number of classes, once every label is known to be one of them."""
    if not isinstance(labels, Tensor) or labels.dtype not in LABEL_TYPES:
        described = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise InputError(f"noise kind='labels' needs integer labels; the targets are {described}")
    least, most = int(labels.min()), int(labels.max())
    classes = most + 1 if classes is None else classes
    if classes < 2 or least < 0 or most >= classes:
        raise InputError(
            f"noise kind='labels' needs two classes or more, numbered from 0; the labels are "
            f"{least} to {most}, of {classes} classes"
        )
    return classes
