"""How good a model is: mean loss, top-1 and top-5 accuracy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from swap_prune.calibration import Batch, Samples, to_device
from swap_prune.calling import call, check_module, evaluation_mode, fastest_format, formatted
from swap_prune.contamination import log_likelihoods
from swap_prune.errors import InputError, reason
from swap_prune.gradients.rows import Loss

# Numbers in a batch's inputs, and samples: the activations of 16 ImageNet images still lie in
# cache, and those of 100 CIFAR images in memory that the allocator hands out again. Vectors have
# none that are much larger than themselves.
BATCH_NUMBERS = 2_400_000
MOST_SAMPLES = 100
MOST_VECTORS = 1000
# Samples that a loss is tried on before it is used.
TRIED_SAMPLES = 16
# Held-out samples are evaluated in about this many groups, whose spread tells what is chance.
GROUPS = 20
# A gain has to be above so many standard errors of itself, which is taken group by group: with few
# held-out samples, what is no better would else be taken for better (docs/choices.md).
CHANCE = 1.0


@dataclass(frozen=True)
class Evaluation:
    """A model on a data set.

    Attributes:
        loss: the mean loss.
        top1: percentage of samples whose label scores highest; None unless the model is a
            classifier (outputs (samples, classes), integer labels (samples,), each of a class).
        top5: percentage of samples whose label is among the five highest.
        samples: how many there were.
    """

    loss: float
    top1: float | None
    top5: float | None
    samples: int


def evaluate(model: nn.Module, data: Any, loss: Loss | None = None) -> Evaluation:
    """Evaluate `model`, in eval mode, on all samples of `data`.

    Args:
        model: called as `model(x)`, `model(*x)` for tuples, `model(**x)` for dicts.
        data: a Dataset or DataLoader of pairs (input, target), or a pair of tensors.
        loss: `loss(output, targets)`, a mean over the batch; default: cross-entropy.
    """
    check_module(model)
    samples = data if isinstance(data, Samples) else Samples(data, "data")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    total, hits = 0.0, torch.zeros(2, device="cpu")
    classifier = True
    some = to_device(samples.spread(TRIED_SAMPLES), device)
    check_task(model, some, loss)
    first = tree_map(lambda leaf: leaf[:1], some[0])
    memory_format, size = fastest_format(model, first), batch_samples(model, first)
    for start in range(0, len(samples), size):
        indices = torch.arange(start, min(start + size, len(samples)), device="cpu")
        inputs, targets = to_device(samples.read(indices), device)
        inputs = formatted(inputs, memory_format)
        with torch.no_grad(), evaluation_mode(model):
            output = _output(model, inputs)
            if loss is None:
                _check_labels(output, targets, indices)
            total += len(indices) * _scalar_loss(loss or cross_entropy, output, targets)
        classifier = classifier and _names_classes(output, targets)
        if classifier:
            ranks = output.topk(min(5, output.shape[1])).indices == targets[:, None]
            # A NaN ranks highest, but it is no answer.
            ranks &= ~output.isnan().any(1, keepdim=True)
            hits += torch.stack([ranks[:, 0].sum(), ranks.sum()]).cpu()
    percent = (100 * hits / len(samples)).tolist() if classifier else [None, None]
    return Evaluation(total / len(samples), percent[0], percent[1], len(samples))


def mean_loss(model: nn.Module, batch: Batch, loss: Loss) -> float:
    """The mean loss of `model` on a batch held in memory; infinite rather than NaN."""
    return float(_losses(model, batch, loss, MOST_SAMPLES).mean())


def group_losses(model: nn.Module, batch: Batch, loss: Loss) -> Tensor:
    """Losses (groups,) of samples side by side, in float64, whose mean is that of all samples.

    Their spread tells how far the mean is chance; the loss need not know of single samples, as
    long as it is a mean over its batch. Infinite rather than NaN.
    """
    return _losses(model, batch, loss, max(1, tree_leaves(batch[0])[0].shape[0] // GROUPS))


def row_losses(model: nn.Module, batch: Batch, loss: Loss, samples_per_row: int) -> Tensor:
    """The losses (n,), in float64, of the samples of each row; infinite rather than NaN."""
    inputs, _ = batch
    if samples_per_row <= batch_samples(model, inputs):
        return _losses(model, batch, loss, samples_per_row)
    found = []
    for part in torch.arange(tree_leaves(inputs)[0].shape[0]).split(samples_per_row):
        x, y = tree_map(lambda leaf, part=part: leaf[part], batch)
        # In one call, as for its gradient: outputs of several may be nothing that can be joined.
        with torch.no_grad(), evaluation_mode(model):
            found.append(_scalar_loss(loss, _output(model, x), y))
    return torch.tensor(found, dtype=torch.float64).nan_to_num(nan=torch.inf, neginf=torch.inf)


def _losses(model: nn.Module, batch: Batch, loss: Loss, most: int) -> Tensor:
    """The losses of parts of at most `most` samples, as sums in units of the mean part."""
    sums, sizes = [], []
    for size, output, targets in _parts(model, batch, most):
        sums.append(size * _scalar_loss(loss, output, targets))
        sizes.append(size)
    found = torch.tensor(sums, dtype=torch.float64) * len(sums) / sum(sizes)
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)


def _parts(model: nn.Module, batch: Batch, most: int) -> Iterator[tuple[int, Any, Any]]:
    """Parts of at most `most` samples: how many they are, their outputs and targets.

    A classifier is called on several parts at once, for calls of a small one cost more than its
    arithmetic; what other outputs are made of is not known.
    """
    inputs, targets = batch
    largest = batch_samples(model, inputs)
    size = min(most, largest)
    at_once = size * (largest // size) if _are_labels(targets) else size
    for part, output in outputs_of(model, inputs, at_once):
        x, y = tree_map(lambda leaf, part=part: leaf[part], batch)
        if at_once == size:
            yield part.stop - part.start, output, y
        elif _names_classes(output, y):
            for some, labels in zip(output.split(size), y.split(size), strict=True):
                yield len(labels), some, labels
        else:
            for few, some in outputs_of(model, x, size):
                yield few.stop - few.start, some, y[few]


def beyond_chance(losses: Tensor, others: Tensor) -> bool:
    """Whether losses (groups,) are lower than others by more than `CHANCE` standard errors."""
    if torch.isinf(others.mean()):
        return bool(torch.isfinite(losses.mean()))
    gains = others - losses
    if len(gains) == 1:
        return False  # which tells nothing of chance
    return float(gains.mean()) > CHANCE * float(gains.std()) / math.sqrt(len(gains))


def outputs_of(
    model: nn.Module, inputs: Any, most: int = MOST_VECTORS
) -> Iterator[tuple[slice, Any]]:
    """The model's outputs, in eval mode and without gradients, for slices of at most `most`."""
    samples, size = tree_leaves(inputs)[0].shape[0], min(most, batch_samples(model, inputs))
    with evaluation_mode(model):
        for start in range(0, samples, size):
            part = slice(start, min(start + size, samples))
            x = tree_map(lambda leaf, part=part: leaf[part], inputs)
            with torch.no_grad():
                output = _output(model, x)
            yield part, output


def batch_samples(model: nn.Module, inputs: Any) -> int:
    """How many samples like these (samples first) to evaluate at once."""
    numbers = sum(leaf[0].numel() for leaf in tree_leaves(inputs))
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    # A layer that takes all of a sample makes one vector of it.
    vectors = any(layer.in_features == numbers for layer in layers) and all(
        parameter.ndim <= 2 for parameter in model.parameters()
    )
    most = MOST_VECTORS if vectors else MOST_SAMPLES
    return max(1, min(most, BATCH_NUMBERS // max(1, numbers)))


def is_classification(output: Any, targets: Any) -> bool:
    """Whether outputs are (samples, classes) and targets integer labels (samples,)."""
    return isinstance(output, Tensor) and output.ndim == 2 and _are_labels(targets)


def _names_classes(output: Any, targets: Any) -> bool:
    """Whether that is so, and every sample's label names one of several classes.

    With a loss of the user's own, integers may be counts, and outputs a point in space.
    """
    return (
        is_classification(output, targets)
        and len(output) == len(targets)
        and output.shape[1] > 1
        and bool(((targets >= 0) & (targets < output.shape[1])).all())
    )


def _are_labels(targets: Any) -> bool:
    return (
        isinstance(targets, Tensor)
        and targets.ndim == 1
        and not targets.is_floating_point()
        and not targets.is_complex()
    )


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """The default loss, for integer labels of any width."""
    return -log_likelihoods(output, targets).mean()


def check_task(
    model: nn.Module, batch: Batch, loss: Loss | None, numbers: Tensor | None = None
) -> None:
    """Raise unless the model takes the inputs, and the loss its output and the targets.

    Model and loss are tried on one sample and on two copies of it; of the default loss every label
    is looked at, and a loss of the user's own is tried on more samples.

    Args:
        model: called on inputs.
        batch: inputs and targets.
        loss: None for the default.
        numbers: the samples' numbers (samples,) in the user's data; counted from 0 unless given.
    """
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise InputError(
            f"loss={loss!r} must be a function of outputs and targets, as "
            "torch.nn.functional.mse_loss or torch.nn.MSELoss()"
        )
    one_input, one_target = tree_map(lambda leaf: leaf[:1], batch)
    with torch.no_grad(), evaluation_mode(model):
        output = _output(model, one_input)
        of_two = _output(model, _twice(one_input))
        if loss is None:
            if not is_classification(output, one_target):
                raise InputError(
                    "the default loss, cross-entropy, takes outputs (samples, classes) and integer "
                    f"labels (samples,), not, of one sample, outputs {_kind(output)} and targets "
                    f"{_kind(one_target)}; for another task pass loss= (in Python)"
                )
            if output.shape[1] == 1:
                raise InputError(
                    "the default loss, cross-entropy, takes an output for each class, and the "
                    "model has one output; pass loss= (in Python), torch.nn.BCEWithLogitsLoss() say"
                )
            _check_labels(output, batch[1], numbers)
            if of_two.shape[0] != 2:
                raise InputError(
                    f"the model's output is {_kind(of_two)} for two samples; each must have its own"
                )
            return
        _check_loss(model, batch, loss)


def _check_loss(model: nn.Module, batch: Batch, loss: Loss) -> None:
    """Raise unless a loss is the mean over its batch.

    It is tried on samples one by one, on the one of the largest loss twice, on pairs and on all
    together. Call it without gradients.
    """
    count = len(tree_leaves(batch)[0])
    most = min(count, TRIED_SAMPLES)
    tried = {*(i * count // most for i in range(most)), count - 1}

    def of(chosen: Sequence[int]) -> float:
        inputs, targets = tree_map(lambda leaf: leaf[list(chosen)], batch)
        return _scalar_loss(loss, _output(model, inputs), targets)

    singles = {i: of([i]) for i in sorted(tried)}
    if not all(map(math.isfinite, singles.values())):
        return  # which is told elsewhere
    worst = max(singles, key=lambda i: abs(singles[i]))
    value, again = singles[worst], of([worst, worst])
    # Rounding is far below this; a sum is twice the mean.
    if abs(again - value) > 0.01 * abs(value) + 1e-6:
        raise InputError(
            f"loss returned {value:.4g} for a sample and {again:.4g} for two copies of it; "
            "it must be the batch's mean"
        )
    mixed = _mixes(model, batch, loss, list(singles), list(singles.values()))
    some = () if mixed else (*pairwise(singles), (0, count - 1))
    for several in (*some, tuple(singles)):
        losses = [singles[i] for i in several]
        # A mean, however it weighs samples, lies between their losses.
        tolerance = 0.01 * max(map(abs, losses)) + 1e-6
        together = of(several)
        within = min(losses) - tolerance <= together <= max(losses) + tolerance
        if math.isfinite(together) and (mixed or not within):
            raise InputError(
                f"loss returned {min(losses):.4g} to {max(losses):.4g} for single samples and "
                f"{together:.4g} for {len(several)} of them together; it must be the batch's mean, "
                "of losses that each have one sample's output and target "
                f"({mixed or 'do their shapes broadcast?'})"
            )


def _mixes(
    model: nn.Module, batch: Batch, loss: Loss, chosen: list[int], singles: list[float]
) -> str | None:
    """The shapes by which a loss is over all pairs of an output and a target; None if it isn't.

    Which target belongs to which output then makes no difference, and yet the loss is not the mean
    of those of single samples.

    Args:
        model: called on inputs.
        batch: inputs and targets.
        loss: of the user's own.
        chosen: samples to try.
        singles: the loss of each.
    """
    inputs, targets = tree_map(lambda leaf: leaf[chosen], batch)
    output = _output(model, inputs)
    if not (isinstance(output, Tensor) and isinstance(targets, Tensor)):
        return None
    if {output.shape[1:], targets.shape[1:]} != {(), (1,)}:
        return None
    together = _scalar_loss(loss, output, targets)
    rolled = _scalar_loss(loss, output, targets.roll(1, 0))
    size = max(map(abs, singles))
    # Some steps of the coarser type's rounding.
    types = [x.dtype for x in (output, targets) if x.is_floating_point()]
    rounding = 8 * max((torch.finfo(kind).eps for kind in types), default=0.0)
    paired = abs(rolled - together) > rounding * size
    if paired or abs(together - statistics.mean(singles)) <= max(1e-4, rounding) * size + 1e-6:
        return None
    shapes = ["(samples, 1)" if x.ndim == 2 else "(samples,)" for x in (output, targets)]
    return f"outputs {shapes[0]} with targets {shapes[1]} do broadcast"


def _output(model: nn.Module, inputs: Any) -> Any:
    """The model's output, or in one sentence why there is none."""
    try:
        return call(model, inputs)
    except Exception as error:  # the model is the user's: anything may come out of it
        count = tree_leaves(inputs)[0].shape[0]
        samples = "a sample" if count == 1 else f"{count} samples"
        raise InputError(
            f"the model can't be called on {samples} of the data: {reason(error)}"
        ) from error


def _twice(tree: Any) -> Any:
    """The samples of a tree of tensors, then the same again."""
    return tree_map(lambda leaf: torch.cat([leaf, leaf]), tree)


def _scalar_loss(loss: Loss, output: Any, targets: Any) -> float:
    """The loss as a number, if it is one."""
    try:
        value = loss(output, targets)
    except Exception as error:
        raise InputError(
            f"loss can't be computed from the model's output and the targets: {reason(error)}"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"loss returned {shape}; it must be a scalar tensor, the batch's mean")
    return float(value)


def _kind(value: Any) -> str:
    """What a user sees of a value: a tensor's shape and type."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} of {value.dtype}"
    return f"of type {type(value).__name__}"


def _check_labels(output: Tensor, targets: Tensor, numbers: Tensor | None) -> None:
    """Raise unless every label (samples,) names one of the classes of an output."""
    wrong = ((targets < 0) | (targets >= output.shape[1])).nonzero().flatten()
    if len(wrong):
        number = int(wrong[0] if numbers is None else numbers[wrong[0]])
        raise InputError(
            f"label {int(targets[wrong[0]])} of sample {number} is out of range: the model's "
            f"{output.shape[1]} outputs take labels 0 to {output.shape[1] - 1}"
        )
