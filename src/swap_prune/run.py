"""One call of `prune`: its stages and epochs, each measured and saved, and what they come to."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from swap_prune import settings as settings_of
from swap_prune import training
from swap_prune.calibration import Samples, some_of
from swap_prune.drawing import step_seed
from swap_prune.errors import DivergedError, NotFiniteError, warn
from swap_prune.evaluation import check_task, evaluate, mean_loss
from swap_prune.run_directory import RunDirectory, Step, fingerprint
from swap_prune.stages import Pruner

# What the steps of a run directory hold and mean; another number for every change of it, so that
# no run goes on from what an older version has saved.
FORMAT = 4
# By so much of itself the held-out loss has risen if training is to be told of.
RAISED = 0.02


@dataclass
class PruneResult:
    """A pruned model and how it came about.

    Attributes:
        model: the pruned model; pruned weights are exactly zero.
        masks: by parameter name, True where a weight stays.
        sparsity: the fraction of the prunable weights that is zero.
        nonzeros: how many are not.
        parameters: how many numbers the model's parameters have in all, prunable or not.
        layer_sparsity: the fraction of zeros by parameter name.
        history: one dict a stage or epoch: sparsity, nonzeros, held-out loss and top-1, the
            settings chosen, seconds.
        seconds: the time spent on `gradients`, `solve`, `training` and in `total`.
        settings: the resolved settings of the run.
    """

    model: nn.Module
    masks: dict[str, Tensor]
    sparsity: float
    nonzeros: int
    parameters: int
    layer_sparsity: dict[str, float]
    history: list[dict[str, Any]]
    seconds: dict[str, float]
    settings: dict[str, Any]


class Run:
    """The stages and epochs of one call of `prune`.

    Args:
        pruner: of a model of the run's own.
    """

    def __init__(self, pruner: Pruner) -> None:
        self.pruner, self.drawing, self.bar = pruner, pruner.drawing, pruner.bar
        self.model, self.weights, self.settings = pruner.model, pruner.weights, pruner.settings
        self.given_loss, self.loss = self.drawing.given_loss, self.drawing.loss
        self.history: list[dict[str, Any]] = []
        self.seconds = {"gradients": 0.0, "solve": 0.0, "training": 0.0, "total": 0.0}
        stream = self.drawing.stream
        self.training_samples, self.training_indices = stream.source, stream.pool.indices
        self.test_data: Samples | None = None
        fine_tuning = self.settings.fine_tuning
        self.epochs_per_stage = fine_tuning.epochs_per_stage if fine_tuning else 0
        self.epochs_after = fine_tuning.epochs_after if fine_tuning else 0
        distils = fine_tuning is not None and fine_tuning.distillation
        self.teacher = copy.deepcopy(self.model) if distils else None

    def train_on(self, samples: Samples) -> None:
        """Fine-tune on other data than the calibration's."""
        self.training_samples, self.training_indices = samples, torch.arange(len(samples))

    def execute(self, sparsities: list[float], directory: RunDirectory | None) -> PruneResult:
        """One stage for each sparsity, the epochs after them, then the report."""
        with self.bar:
            if directory is None:
                self._advance(sparsities, None)
                return self._report()
            with directory.lock():
                directory.configure(self._configuration())
                try:
                    self._advance(sparsities, directory)
                except Exception:
                    directory.clear_unless_saved()
                    raise
                directory.write_model(self.model)
            return self._report()

    def _configuration(self) -> dict[str, Any]:
        """What a run has to share with another to be continued by it."""
        source = self.drawing.stream.source
        inputs, targets = some_of(source, self.settings.seed)
        check_task(self.model, (inputs, targets), self.given_loss)
        fixed = self._fingerprints(source)["inputs_sha256"] is not None
        others = {"training": self.training_samples, "test": self.test_data}
        return {
            "format": FORMAT,
            "settings": settings_of.describe(self.settings),
            "loss": getattr(self.loss, "__qualname__", type(self.loss).__qualname__),
            # To three digits, for the number of threads may be another.
            "value_of_loss": f"{mean_loss(self.model, (inputs, targets), self.loss):.3g}"
            if fixed
            else None,
            "model_sha256": fingerprint(tensors_of(self.model)),
            **self._fingerprints(source),
            "calibration_samples": len(source),
            "training_samples": len(self.training_indices),
            "test_samples": None if self.test_data is None else len(self.test_data),
            **{
                f"{name}_{key}": value
                for name, other in others.items()
                if other is not None and other is not source
                for key, value in self._fingerprints(other).items()
            },
        }

    def _fingerprints(self, source: Samples) -> dict[str, str | None]:
        """What tells data from others; None for inputs that differ from look to look.

        Random transforms may do so from process to process, if torch's seed is not theirs.
        """
        seed = self.settings.seed
        inputs, targets = some_of(source, seed)
        first, second = _fingerprint(inputs), _fingerprint(some_of(source, seed)[0])
        return {
            "inputs_sha256": first if first == second else None,
            "targets_sha256": _fingerprint(targets),
        }

    def rehearse(self) -> None:
        """Take one step of training on a copy: what can't be trained is to be known first."""
        if self.epochs_per_stage or self.epochs_after:
            model = copy.deepcopy(self.model)
            self._period(model, 1, 0, None).rehearse()

    def _advance(self, sparsities: list[float], directory: RunDirectory | None) -> None:
        """Run every step, stage or epoch, that is not saved yet, and save it."""
        stages = len(sparsities)
        self.bar.total = self._samples_of(stages + self.epochs_after, stages)
        saved = None if directory is None else directory.last_step()
        if saved is not None:
            self._restore(saved, stages)
        period: training.Period | None = None
        for number in range((saved.number if saved else 0) + 1, stages + self.epochs_after + 1):
            start = time.perf_counter()
            # A step depends on nothing but what was saved before it.
            torch.manual_seed(step_seed(self.settings.seed, number))
            if number <= stages:
                line = self._checked_stage(stages, sparsities[:number])
            else:
                period = period or self._period(self.model, self.epochs_after, stages + 1, saved)
                line = self._epoch(period, number - stages - 1)
            line["seconds"] = time.perf_counter() - start
            self.seconds["total"] += line["seconds"]
            self.history.append(line)
            if directory is not None:
                directory.save_step(self._step(number, stages, period))

    def _step(self, number: int, stages: int, period: training.Period | None) -> Step:
        """What the next step needs to know."""
        optimizer, values = ({}, {}) if period is None else period.state()
        method, values_of_pruner = self.pruner.state()
        model = self.model.state_dict()
        return Step(
            number=number,
            model=model,
            buffers={n: t for n, t in tensors_of(self.model).items() if n not in model},
            optimizer=optimizer,
            # After the last stage there is no more use for it.
            method=method if number < stages else {},
            values={
                "history": self.history,
                "seconds": self.seconds,
                "optimizer": values,
                **values_of_pruner,
            },
        )

    def _restore(self, saved: Step, stages: int) -> None:
        """Go on from a saved step."""
        load_tensors(self.model, saved.model | saved.buffers)
        self.history = saved.values["history"]
        self.seconds = saved.values["seconds"]
        number, ended = min(saved.number, stages), saved.number >= stages
        self.pruner.restore(saved.method, saved.values, number, ended)
        # Not as progress of this process, from which the time left is reckoned.
        self.bar.n = self.bar.initial = self._samples_of(saved.number, stages)
        self.bar.refresh()

    def _samples_of(self, steps: int, stages: int) -> int:
        """The samples that the first `steps` steps go through, the bar's unit."""
        pruning = min(steps, stages)
        epochs = pruning * self.epochs_per_stage + steps - pruning
        return pruning * self.drawing.stage_samples + epochs * len(self.training_indices)

    def _report(self) -> PruneResult:
        w = self.weights.read(self.model)
        masks = self._masks(w)
        nonzeros = int((w != 0).sum())
        self._warn_of_training()
        self._warn_of_lost(masks)
        return PruneResult(
            model=self.model,
            masks=masks,
            sparsity=1 - nonzeros / self.weights.size,
            nonzeros=nonzeros,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            layer_sparsity={name: 1 - float(m.float().mean()) for name, m in masks.items()},
            history=self.history,
            seconds=self.seconds,
            settings=settings_of.describe(self.settings),
        )

    def _warn_of_lost(self, masks: dict[str, Tensor]) -> None:
        """Warn if layers have no weight left."""
        lost = [name for name, mask in masks.items() if not mask.any()]
        if lost and self.settings.sparsity > 0:
            others = f" and of {len(lost) - 1} more" if len(lost) > 1 else ""
            evenly = "" if self.settings.per_layer else "per_layer=True keeps some in every layer, "
            warn(
                f"no weight is left of {lost[0]}{others}, through which nothing passes any more; "
                f"{evenly}exclude= leaves a layer as it is",
            )

    def _warn_of_training(self) -> None:
        """Warn if the epochs after the last stage did more harm than good."""
        if not self.epochs_after or self.drawing.held_out is None:
            return
        before, after = (
            self.history[line]["held_out_loss"] for line in (-1 - self.epochs_after, -1)
        )
        if not after <= before + RAISED * abs(before):
            warn(
                f"fine-tuning raised the held-out loss from {before:.4g} to {after:.4g}; a smaller "
                "learning_rate, or optimizer='adam' with one of 0.002 (for attention), may suit "
                "the model better",
            )

    def _masks(self, w: Tensor) -> dict[str, Tensor]:
        return {name: part != 0 for name, part in self.weights.split(w).items()}

    def _checked_stage(self, stages: int, sparsities: list[float]) -> dict[str, Any]:
        """A stage; what isn't finite after the first is most likely the work of those before."""
        number = len(sparsities)
        where = f"stage {number} of {stages} can't be done"
        try:
            return self._stage(stages, sparsities)
        except NotFiniteError as error:
            if number == 1:
                raise
            raise DivergedError(f"{where}: {error}") from error
        except torch.linalg.LinAlgError as error:
            raise DivergedError(
                f"{where}: products of gradients are beyond float32; a larger damping is needed"
            ) from error

    def _stage(self, stages: int, sparsities: list[float]) -> dict[str, Any]:
        """Take gradients, prune to the last of the sparsities so far; a line of the history."""
        number = len(sparsities)
        where = f"stage {number}/{stages}, sparsity {sparsities[-1]:.3f}"
        start = time.perf_counter()
        taken = self.pruner.take(number, where)
        self.seconds["gradients"] += time.perf_counter() - start
        start = time.perf_counter()
        chosen = self.pruner.solve(taken, sparsities, stages, where)
        self.seconds["solve"] += time.perf_counter() - start
        line = {"stage": number, **chosen, **taken.found}
        if self.test_data is not None:
            self.bar.set_description(f"{where}: testing")
            score = evaluate(self.model, self.test_data, self.given_loss)
            line |= {f"test_{name}": getattr(score, name) for name in ("loss", "top1", "top5")}
        if self.epochs_per_stage:
            period = self._period(self.model, self.epochs_per_stage, number, None)
            for epoch in range(self.epochs_per_stage):
                line["training_loss"] = self._train(period, epoch, where)
        return line | self._measure()

    def _epoch(self, period: training.Period, epoch: int) -> dict[str, Any]:
        """Train an epoch after the last stage; a line of the history."""
        where = f"epoch {epoch + 1}/{self.epochs_after}"
        # From the weights alone, as a resumed run has to: training may have made one zero.
        period.masks = self._masks(self.weights.read(self.model))
        loss = self._train(period, epoch, where)
        return {"epoch": epoch + 1, "training_loss": loss} | self._measure()

    def _period(
        self, model: nn.Module, epochs: int, number: int, saved: Step | None
    ) -> training.Period:
        """The training that follows stage `number`, from its beginning or from a saved step."""
        assert self.settings.fine_tuning is not None
        period = training.Period(
            model,
            self._masks(self.weights.read(model)),
            self.teacher,
            self.loss,
            self.training_samples,
            self.training_indices,
            self.settings.fine_tuning,
            epochs,
            self.settings.seed,
            number,
        )
        if saved is not None and saved.values["optimizer"]:
            period.restore(saved.optimizer, saved.values["optimizer"])
        return period

    def _train(self, period: training.Period, epoch: int, where: str) -> float:
        self.bar.set_description(f"{where}: training")
        start = time.perf_counter()
        loss = period.run_epoch(epoch, self.bar.update)
        self.seconds["training"] += time.perf_counter() - start
        return loss

    def _measure(self) -> dict[str, Any]:
        """Sparsity, held-out loss and, for a classifier, top-1; shown beside the bar."""
        nonzeros = int((self.weights.read(self.model) != 0).sum())
        measured = {"sparsity": 1 - nonzeros / self.weights.size, "nonzeros": nonzeros}
        if self.drawing.held_out is None:
            return measured
        score = evaluate(self.model, self.drawing.held_out, self.given_loss)
        shown = {"held_out_loss": score.loss}
        if score.top1 is not None:
            shown["held_out_top1"] = score.top1
        self.bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()})
        return measured | shown


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, those that the state dict leaves out included."""
    return {
        name: tensor.detach()
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }


def load_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy what `tensors_of` gave into a model."""
    with torch.no_grad():
        for name, tensor in tensors_of(model).items():
            tensor.copy_(tensors[name])


def _fingerprint(tree: Any) -> str:
    """What tells tensors, in tuples and dicts or alone, from others."""
    return fingerprint({str(i): torch.as_tensor(x) for i, x in enumerate(tree_leaves(tree))})
