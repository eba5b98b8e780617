"""How good a model is: mean loss, top-1 and top-5 accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from swap_prune.calibration import Batch, Samples
from swap_prune.errors import InputError
from swap_prune.gradients.rows import Loss, call, evaluation_mode

# Large enough to keep the cores busy, small enough for ImageNet's activations.
BATCH_SAMPLES = 250


@dataclass(frozen=True)
class Evaluation:
    """A model on a data set.

    Attributes:
        loss: the mean loss.
        top1: percentage of samples whose label scores highest; None unless the model is a
            classifier (outputs (samples, classes), integer labels (samples,)).
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
    samples = Samples(data)
    total, hits = 0.0, torch.zeros(2)
    classifier = True
    for start in range(0, len(samples), BATCH_SAMPLES):
        indices = torch.arange(start, min(start + BATCH_SAMPLES, len(samples)))
        inputs, targets = samples.read(indices)
        with torch.no_grad(), evaluation_mode(model):
            output = call(model, inputs)
            check_labels(output, targets, loss)
            total += len(indices) * float((loss or functional.cross_entropy)(output, targets))
        classifier = classifier and is_classification(output, targets)
        if classifier:
            ranks = output.topk(min(5, output.shape[1])).indices == targets[:, None]
            hits += torch.stack([ranks[:, 0].sum(), ranks.sum()])
    percent = (100 * hits / len(samples)).tolist() if classifier else [None, None]
    return Evaluation(total / len(samples), percent[0], percent[1], len(samples))


def mean_loss(model: nn.Module, batch: Batch, loss: Loss) -> float:
    """The mean loss of `model` on a batch held in memory; infinite rather than NaN."""
    inputs, targets = batch
    samples = tree_leaves(inputs)[0].shape[0]
    total = 0.0
    with torch.no_grad(), evaluation_mode(model):
        for start in range(0, samples, BATCH_SAMPLES):
            part = slice(start, start + BATCH_SAMPLES)
            x, y = tree_map(lambda leaf, part=part: leaf[part], (inputs, targets))
            total += tree_leaves(x)[0].shape[0] * float(loss(call(model, x), y))
    return total / samples if total == total else float("inf")


def is_classification(output: Any, targets: Any) -> bool:
    """Whether outputs are (samples, classes) and targets integer labels (samples,)."""
    return (
        isinstance(output, Tensor)
        and isinstance(targets, Tensor)
        and output.ndim == 2
        and targets.ndim == 1
        and not targets.is_floating_point()
    )


def check_labels(output: Any, targets: Any, loss: Loss | None) -> None:
    """Raise when the default loss would meet a label that is not one of the model's classes."""
    if loss is not None:
        return
    if not is_classification(output, targets):
        raise InputError(
            "the default loss, cross-entropy, takes outputs (samples, classes) and integer labels "
            "(samples,); pass loss= for another task"
        )
    wrong = ((targets < 0) | (targets >= output.shape[1])).nonzero().flatten()
    if len(wrong):
        raise InputError(
            f"label {int(targets[wrong[0]])} of a sample is out of range: the model's "
            f"{output.shape[1]} outputs take labels 0 to {output.shape[1] - 1}"
        )
