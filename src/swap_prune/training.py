"""Fine-tuning: training in which pruned weights stay zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from swap_prune import batchnorm
from swap_prune.calibration import Samples, to_device
from swap_prune.calling import call, evaluation_mode, fastest_format, formatted
from swap_prune.errors import DivergedError, InputError, reason
from swap_prune.evaluation import check_task, cross_entropy
from swap_prune.gradients.rows import Loss
from swap_prune.masks import apply_masks, make_permanent

# Pixels by which "crop-flip" shifts an image at most.
SHIFT = 4
# The part of a period's steps before sharpness counts: where training ends is decided late.
SHARP_FROM = 2 / 3


@dataclass(frozen=True)
class FineTuning:
    """Settings of training with held masks.

    Attributes:
        epochs_per_stage: epochs after every stage of pruning.
        epochs_after: epochs after the last stage.
        optimizer: "sgd" or "adam".
        learning_rate: at the start of a period (the epochs after one stage).
        momentum: of SGD; Adam's first beta.
        weight_decay: the L2 penalty of every trained parameter.
        batch_size: samples a step.
        learning_rate_schedule: "cosine" from the learning rate to zero over a period, or
            "constant".
        distillation: weight in [0, 1] of the dense model's soft labels against the loss; with
            "crop-flip" they are of the mean of the logits of an image and of its mirror image.
        temperature: of the soft labels.
        sharpness: ρ of sharpness-aware minimisation (Foret et al. 2021), over the last third of a
            period's steps: gradients are taken where a step of this length has raised the loss
            most, which costs a second forward and backward pass; 0 for none.
        augmentation: "none", or "crop-flip" of images (samples, channels, height, width): a shift
            of up to 4 pixels and, half of the time, a horizontal flip.
        precision: "float32", or "bfloat16" for the models' forward and backward passes (torch's
            autocast; weights, loss and optimiser stay as they are), or "auto": bfloat16 where the
            processor has instructions for it, which `machine.fastest_precision` decides.
    """

    epochs_per_stage: int = 0
    epochs_after: int = 10
    optimizer: str = "sgd"
    learning_rate: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 5e-4
    batch_size: int = 128
    learning_rate_schedule: str = "cosine"
    distillation: float = 0.0
    temperature: float = 4.0
    sharpness: float = 0.0
    augmentation: str = "none"
    precision: str = "float32"


# What the paper's authors published: one short epoch after each stage, and none at the end.
_AUTHORS = FineTuning(
    epochs_per_stage=1,
    epochs_after=0,
    learning_rate=0.001,
    batch_size=64,
    learning_rate_schedule="constant",
)
PRESETS: dict[str, FineTuning] = {
    "default": FineTuning(),
    "authors-mlpnet": replace(_AUTHORS, momentum=0.5, weight_decay=0.0),
    # WoodFisher's script for CIFAR-10, which has these settings, trains on crops and flips.
    "authors-resnet20": replace(
        _AUTHORS, momentum=0.9, weight_decay=1e-4, augmentation="crop-flip"
    ),
}


def resolve(given: str | Mapping[str, Any] | FineTuning | None) -> FineTuning | None:
    """The settings that a user means.

    Args:
        given: the name of a preset; a mapping of fields, with the preset to start from under
            "preset" ("default" unless given); settings; or None for no training.

    Raises:
        InputError: there is no such preset or field, or a value can't be used.
    """
    if given is None:
        return None
    if isinstance(given, str):
        given = {"preset": given}
    if isinstance(given, Mapping):
        given = _from_mapping(given)
    if not isinstance(given, FineTuning):
        raise InputError(
            f"fine_tuning is of type {type(given).__name__}; give the name of a preset, a mapping "
            "of fields, or a FineTuning"
        )
    check(given)
    return given


def _from_mapping(given: Mapping[str, Any]) -> FineTuning:
    changes = dict(given)
    preset = changes.pop("preset", "default")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise InputError(
            f"the fine_tuning preset {preset!r} doesn't exist; accepted are {', '.join(PRESETS)}"
        )
    accepted = [field.name for field in fields(FineTuning)]
    for name in changes:
        if name not in accepted:
            raise InputError(
                f"the fine_tuning field {name!r} doesn't exist; "
                f"accepted are preset, {', '.join(accepted)}"
            )
    return replace(PRESETS[preset], **changes)


def check(settings: FineTuning) -> None:
    """Raise an InputError for a value that no training can use."""
    for name, accepted in (
        ("optimizer", ("sgd", "adam")),
        ("learning_rate_schedule", ("cosine", "constant")),
        ("augmentation", ("none", "crop-flip")),
        ("precision", ("float32", "bfloat16", "auto")),
    ):
        value = getattr(settings, name)
        if value not in accepted:
            raise InputError(f"{name}={value!r} is unknown; accepted are {', '.join(accepted)}")
    for name, least in (("epochs_per_stage", 0), ("epochs_after", 0), ("batch_size", 1)):
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise InputError(f"{name}={value!r} must be a whole number of at least {least}")
    number_checks: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
        ("learning_rate", "a positive number", lambda v: 0 < v < math.inf),
        ("momentum", "a number in [0, 1)", lambda v: 0 <= v < 1),
        ("weight_decay", "a number of at least 0", lambda v: 0 <= v < math.inf),
        ("distillation", "a number in [0, 1]", lambda v: 0 <= v <= 1),
        ("temperature", "a positive number", lambda v: 0 < v < math.inf),
        ("sharpness", "a number of at least 0", lambda v: 0 <= v < math.inf),
    )
    for name, described, accepts in number_checks:
        value = getattr(settings, name)
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not accepts(value):
            raise InputError(f"{name}={value!r} must be {described}")


class Period:
    """The epochs of training that follow a stage: one optimiser, one learning-rate schedule.

    All parameters that require gradients are trained. Between epochs the model is a plain one,
    with exact zeros and contiguous weights, in the mode (training or eval) in which it was given.
    An epoch depends on the model, the optimiser's state and the numbers (seed, period, epoch)
    alone, so that training goes on after an interruption as if there had been none.

    Args:
        model: trained in place.
        masks: by parameter name, True where a weight stays.
        teacher: the dense model that `settings.distillation` takes soft labels from.
        loss: `loss(model(x), targets)`, a scalar, the mean over the batch.
        samples: the data.
        indices: which of the samples to train on, (samples,).
        settings: as checked by `check`.
        epochs: how many the learning-rate schedule is laid out for.
        seed: of the run.
        period: the number of the period in the run.

    Raises:
        InputError: the model has nothing to train, or settings and data do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        masks: dict[str, Tensor],
        teacher: nn.Module | None,
        loss: Loss,
        samples: Samples,
        indices: Tensor,
        settings: FineTuning,
        epochs: int,
        seed: int,
        period: int,
    ) -> None:
        self.model, self.masks, self.loss = model, masks, loss
        self.samples, self.indices, self.settings = samples, indices, settings
        self.seed, self.period = seed, period
        self.teacher = teacher if settings.distillation else None
        if settings.distillation and teacher is None:
            raise InputError(f"distillation={settings.distillation} needs a dense model to teach")
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise InputError("the model has nothing to train: no parameter has requires_grad=True")
        self.device = next(iter(self.parameters.values())).device
        self.optimizer = _optimizer(settings, list(self.parameters.values()))
        self.steps = len(_batches(indices, settings.batch_size))
        self.total_steps = epochs * self.steps
        inputs = to_device(samples.read(indices[:1]), self.device)[0]
        self.memory_format = fastest_format(model, inputs)

    def run_epoch(self, epoch: int, progress: Callable[[int], None] | None = None) -> float:
        """Train on every sample once.

        Args:
            epoch: its number in the period, from 0.
            progress: called with the number of samples after every step.

        Returns:
            The mean training loss.

        Raises:
            InputError: the model or the loss fails on a batch.
            DivergedError: the loss or a weight is not finite any more.
        """
        with self._seeded(epoch), self._training_state():
            order = self.indices[torch.randperm(len(self.indices))]
            total = 0.0
            for number, batch in enumerate(_batches(order, self.settings.batch_size)):
                value = self._step(batch, epoch * self.steps + number)
                if not math.isfinite(value):
                    raise self._diverged(epoch, f"the loss is {value}")
                total += value * len(batch)
                if progress is not None:
                    progress(len(batch))
            # A loss tells of the step before it, so the last one's is not among them.
            if not all(torch.isfinite(parameter).all() for parameter in self.parameters.values()):
                raise self._diverged(epoch, "a weight is not finite")
        return total / len(order)

    def _diverged(self, epoch: int, sign: str) -> DivergedError:
        return DivergedError(
            f"training diverged in epoch {epoch + 1}: {sign}; a smaller learning_rate than "
            f"{self.settings.learning_rate} is needed"
        )

    def rehearse(self) -> None:
        """Take one step, on a model of which no more is wanted.

        Raises:
            InputError: the model, the data and the settings do not go together.
        """
        with self._seeded(0), self._training_state():
            # The last step, for it is the one that may be a sharp one.
            batch = _batches(self.indices, self.settings.batch_size)[0]
            self._step(batch, self.total_steps - 1)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Copies of the optimiser's tensors, and values for JSON: what `restore` needs."""
        tensors = {
            f"{name}.{key}": value.detach().clone(memory_format=torch.contiguous_format)
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state[parameter].items()
            if isinstance(value, Tensor)  # no momentum yet is None
        }
        return tensors, {
            "optimizer": self.settings.optimizer,
            "period": self.period,
        }

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from the `state` of a period with the same settings; the model is the caller's.

        Raises:
            InputError: the state is that of another training.
        """
        for name, own in (("optimizer", self.settings.optimizer), ("period", self.period)):
            if values.get(name) != own:
                raise InputError(
                    f"the state of training is of {name} {values.get(name)!r}, not {own!r}"
                )
        numbers = {name: number for number, name in enumerate(self.parameters)}
        restored: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, field = key.rpartition(".")
            # Adam counts its steps in a tensor without dimensions.
            if name not in numbers or (value.ndim and value.shape != self.parameters[name].shape):
                raise InputError(f"the state of training has {key}, which doesn't fit the model")
            restored.setdefault(numbers[name], {})[field] = value.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": restored, "param_groups": groups})

    def _step(self, indices: Tensor, step: int) -> float:
        """One step of the optimiser on the samples `indices` (b,); the loss before it."""
        inputs, targets = self._read(indices)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        try:
            soft = None if self.teacher is None else self._soft_labels(inputs)
            self.optimizer.zero_grad()
            value = self._objective(inputs, targets, soft)
            value.backward()
            if self.settings.sharpness and step >= SHARP_FROM * self.total_steps:
                with self._uphill():
                    self.optimizer.zero_grad()
                    self._objective(inputs, targets, soft).backward()
            self.optimizer.step()
        except InputError:
            raise
        except Exception as error:  # model and loss are the user's: anything may come out of them
            raise InputError(
                f"the model can't be trained on a batch of {len(indices)} samples of "
                f"{self.samples.name}: {self._reason(error, inputs, targets, indices)}"
            ) from error
        return value.item()

    def _objective(self, inputs: Any, targets: Any, soft: Tensor | None) -> Tensor:
        """The loss, with its share of the distance to soft labels."""
        output = self._output(self.model, inputs)
        value = self.loss(output, targets)
        if soft is None:
            return value
        share = self.settings.distillation
        distance = soft_label_distance(output, soft, self.settings.temperature)
        return (1 - share) * value + share * distance

    @contextmanager
    def _uphill(self) -> Iterator[None]:
        """The parameters a step of length `sharpness` up their gradients, put back afterwards.

        So are the buffers: BatchNorm's statistics are to be those of the model itself.
        """
        moved = {p: p.grad for p in self.parameters.values() if p.grad is not None}
        length = torch.stack([gradient.norm().float() for gradient in moved.values()]).norm()
        saved = [tensor.detach().clone() for tensor in (*moved, *self.model.buffers())]
        with torch.no_grad():
            for parameter, gradient in moved.items():
                parameter.add_(gradient * (self.settings.sharpness / (length + 1e-12)))
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip((*moved, *self.model.buffers()), saved, strict=True):
                    tensor.copy_(before)

    def _output(self, model: nn.Module, inputs: Any) -> Any:
        """What a model says of the inputs, in the precision of the settings."""
        if self.settings.precision == "float32":
            return call(model, inputs)
        with torch.autocast(self.device.type, torch.bfloat16):
            output = call(model, inputs)
        # The loss is a sum of many small terms, of which eight bits would lose some.
        return tree_map(
            lambda leaf: (
                leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == torch.bfloat16 else leaf
            ),
            output,
        )

    def _reason(self, error: Exception, inputs: Any, targets: Any, indices: Tensor) -> str:
        """What went wrong; of the default loss, which label is to blame."""
        if self.loss is cross_entropy:
            try:
                check_task(self.model, (inputs, targets), None, indices)
            except InputError as found:
                return str(found)
        return reason(error)

    def _read(self, indices: Tensor) -> tuple[Any, Any]:
        inputs, targets = to_device(self.samples.read(indices), self.device)
        if self.settings.augmentation == "crop-flip":
            inputs = crop_flip(inputs)
        return formatted(inputs, self.memory_format), targets

    def _soft_labels(self, inputs: Any) -> Tensor:
        """The dense model's logits (samples, classes)."""
        assert self.teacher is not None
        with torch.no_grad(), evaluation_mode(self.teacher):
            output = self._output(self.teacher, inputs)
        fits = isinstance(output, Tensor) and output.ndim == 2 and output.is_floating_point()
        if not fits or output.shape[1] < 2:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                f"distillation={self.settings.distillation} takes outputs (samples, classes) of "
                f"at least two classes; the model's are {shape}"
            )
        if self.settings.augmentation != "crop-flip":
            return output
        with torch.no_grad(), evaluation_mode(self.teacher):
            return (output + self._output(self.teacher, inputs.flip(3))) / 2

    def _learning_rate(self, step: int) -> float:
        if self.settings.learning_rate_schedule == "constant":
            return self.settings.learning_rate
        return self.settings.learning_rate * (1 + math.cos(math.pi * step / self.total_steps)) / 2

    @contextmanager
    def _seeded(self, epoch: int) -> Iterator[None]:
        """Torch's random numbers from (seed, period, epoch); the caller's own are untouched."""
        sequence = np.random.SeedSequence((self.seed, self.period, epoch))
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
            yield

    @contextmanager
    def _training_state(self) -> Iterator[None]:
        """The model masked, in training mode and in the fast memory format; a plain one after."""
        modes = {module: module.training for module in self.model.modules()}
        apply_masks(self.model, self.masks)
        try:
            # Values don't depend on the layout but their last bits may: all epochs start alike.
            self._lay_out(self.memory_format)
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    state[key] = formatted(value, self.memory_format)
            self.model.train()
            for norm in batchnorm.layers(self.model):
                own = list(norm.parameters())
                if own and not any(parameter.requires_grad for parameter in own):
                    norm.eval()  # who freezes its weights does not want other statistics either
            with torch.enable_grad():
                yield
        finally:
            make_permanent(self.model)
            self._lay_out(torch.contiguous_format)
            self.optimizer.zero_grad()
            for module, mode in modes.items():
                module.training = mode

    def _lay_out(self, memory_format: torch.memory_format) -> None:
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            tensor.data = formatted(tensor.data, memory_format)


def crop_flip(images: Any) -> Tensor:
    """Images (samples, channels, height, width), each shifted and, by chance, flipped.

    What comes in where an image is shifted away is each channel's darkest value of the batch:
    black, as where photographs are shifted before they are normalised. Zeros would be gray, which
    a network trained in that order does not know (docs/choices.md). Random numbers are torch's own.

    Raises:
        InputError: the inputs are no such tensor.
    """
    if not isinstance(images, Tensor) or images.ndim != 4:
        kind = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise InputError(
            "augmentation='crop-flip' takes images (samples, channels, height, width); "
            f"the inputs are {kind}"
        )
    count, _, height, width = images.shape
    down, right = torch.randint(0, 2 * SHIFT + 1, (2, count, 1), device=images.device)
    flipped = torch.randint(0, 2, (count, 1), device=images.device).bool()
    rows = torch.arange(height, device=images.device) + down
    columns = torch.arange(width, device=images.device)
    columns = torch.where(flipped, width - 1 - columns, columns) + right
    # With the channels last a pixel is one piece of memory.
    padded = images.amin((0, 2, 3)).repeat(count, height + 2 * SHIFT, width + 2 * SHIFT, 1)
    padded[:, SHIFT:-SHIFT, SHIFT:-SHIFT] = images.permute(0, 2, 3, 1)
    sample = torch.arange(count, device=images.device)[:, None, None]
    return padded[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def soft_label_distance(output: Tensor, soft: Tensor, temperature: float) -> Tensor:
    """T² KL(softmax(soft / T) ‖ softmax(output / T)), the mean over the batch.

    The factor T² keeps the gradient's size independent of the temperature.

    Args:
        output: the student's logits (samples, classes).
        soft: the teacher's logits (samples, classes).
        temperature: T.
    """
    student = functional.log_softmax(output / temperature, dim=1)
    teacher = functional.log_softmax(soft / temperature, dim=1)
    distance = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return temperature**2 * distance


def _optimizer(settings: FineTuning, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "adam":
        betas = (settings.momentum, 0.999)
        return torch.optim.Adam(parameters, rate, betas, weight_decay=decay)
    return torch.optim.SGD(parameters, rate, settings.momentum, weight_decay=decay)


def _batches(order: Tensor, size: int) -> list[Tensor]:
    """The indices (samples,) in batches; a last single sample joins the batch before it.

    BatchNorm has no variance to learn from one sample.
    """
    batches = list(order.split(size))
    if size > 1 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches
