"""The stages of one call of `prune` (Algorithm 1): cut, solve, measure, train, save."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm

from swap_prune import audit, outliers, reconstruction, residuals, training
from swap_prune import batchnorm as batchnorm_statistics
from swap_prune import contamination as contamination_of
from swap_prune import settings as settings_of
from swap_prune.calibration import Batch, CalibrationStream, Samples, to_device
from swap_prune.calling import fastest_format, formatted
from swap_prune.errors import DivergedError, InputError, NotFiniteError, warn
from swap_prune.evaluation import (
    beyond_chance,
    check_task,
    cross_entropy,
    evaluate,
    group_losses,
    mean_loss,
    outputs_of,
    row_losses,
)
from swap_prune.gradients import GradientOperator, gradient_rows
from swap_prune.gradients.rows import Loss, blame_sample
from swap_prune.methods import (
    CombinatorialBrainSurgeon,
    Magnitude,
    Method,
    OptimalBrainDamage,
    Stage,
    WassersteinRegression,
    WoodFisher,
)
from swap_prune.noise import Noise
from swap_prune.noise import from_description as noise_from
from swap_prune.prunable import PrunableWeights
from swap_prune.regression import Budget
from swap_prune.run_directory import RunDirectory, Step, fingerprint
from swap_prune.settings import HELD_OUT_FRACTION, Settings

BASELINES: dict[str, type[Method]] = {
    "magnitude": Magnitude,
    "obd": OptimalBrainDamage,
    "wf": WoodFisher,
    "cbs": CombinatorialBrainSurgeon,
}
# What the steps of a run directory hold and mean; another number for every change of it, so that
# no run goes on from what an older version has saved.
FORMAT = 4
# Samples by which a run directory knows its data again.
FINGERPRINT_SAMPLES = 64
# Samples that BatchNorm's statistics are taken of.
STATISTICS_SAMPLES = 1000
# Seeds of the steps of runs with neighbouring seeds must not meet.
SEED_STRIDE = 1_000_003


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
    """The stages of one call of `prune`, on a model of its own."""

    def __init__(
        self,
        model: nn.Module,
        weights: PrunableWeights,
        samples: Samples,
        loss: Loss | None,
        settings: Settings,
        progress: bool,
        trains_on_calibration: bool,
    ) -> None:
        assert settings.held_out is not None
        self.model, self.weights, self.settings = model, weights, settings
        self.given_loss = loss
        self.loss: Loss = cross_entropy if loss is None else loss
        # What pruning fits and chooses by; training and reports keep to the loss itself.
        self.fitted_loss = self.loss
        self.contamination = 0.0
        self.screen: outliers.Screen | None = None  # what tells inputs that are left out
        self.left_out_share = 0.0  # of the samples, as those held out at the first stage tell
        self.method = build_method(settings)
        self.has_statistics = bool(batchnorm_statistics.layers(model))
        reserve = settings.held_out if trains_on_calibration else self._reserve(len(samples))
        self.stream = CalibrationStream(samples, settings.held_out, reserve, settings.seed)
        self.noises: tuple[Noise, ...] = ()  # until the first stage has calibrated them
        if loss is not None and (self._draws() or settings.held_out):
            check_task(model, self._some_samples(samples), loss)
        self.held_out = self._hold_out(1)
        self._check_held_out()
        self.buffer: Tensor | None = None
        self.history: list[dict[str, Any]] = []
        self.seconds = {"gradients": 0.0, "solve": 0.0, "training": 0.0, "total": 0.0}
        self.noises = settings.noise
        self.training_samples, self.training_indices = samples, self.stream.pool.indices
        self.test_data: Samples | None = None
        fine_tuning = settings.fine_tuning
        self.epochs_per_stage = fine_tuning.epochs_per_stage if fine_tuning else 0
        self.epochs_after = fine_tuning.epochs_after if fine_tuning else 0
        self.teacher = copy.deepcopy(model) if fine_tuning and fine_tuning.distillation else None
        self.bar = tqdm(disable=not progress, unit="sample", file=sys.stderr)

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
        source = self.stream.source
        inputs, targets = self._some_samples(source)
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
        inputs, targets = self._some_samples(source)
        first, second = _fingerprint(inputs), _fingerprint(self._some_samples(source)[0])
        return {
            "inputs_sha256": first if first == second else None,
            "targets_sha256": _fingerprint(targets),
        }

    def _some_samples(self, source: Samples) -> Batch:
        """The samples, from everywhere, by which a run knows its data again."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            return to_device(source.spread(FINGERPRINT_SAMPLES), torch.device("cpu"))

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
            torch.manual_seed(self._seed(number))
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

    def _seed(self, number: int) -> int:
        """The seed of a step."""
        return (self.settings.seed * SEED_STRIDE + number) % 2**63

    def _step(self, number: int, stages: int, period: training.Period | None) -> Step:
        """What the next step needs to know."""
        optimizer, values = ({}, {}) if period is None else period.state()
        method, method_values = self.method.state()
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
                "method": method_values,
                "noise": [noise.describe() for noise in self.noises],
                "contamination": self.contamination,
                "screen": None if self.screen is None else asdict(self.screen),
                "left_out_share": self.left_out_share,
                "optimizer": values,
            },
        )

    def _restore(self, saved: Step, stages: int) -> None:
        """Go on from a saved step."""
        load_tensors(self.model, saved.model | saved.buffers)
        self.history = saved.values["history"]
        self.seconds = saved.values["seconds"]
        if saved.number < stages:
            self.method.restore(saved.method, saved.values["method"])
        self.noises = tuple(noise_from(described) for described in saved.values["noise"])
        self._use_contamination(saved.values["contamination"])
        screen = saved.values["screen"]
        self.screen = None if screen is None else outliers.Screen(**screen)
        self.left_out_share = saved.values["left_out_share"]
        for number in range(1, min(saved.number, stages) + 1):
            if number > 1:
                self.stream.hold_out()
            if self._draws():
                self.stream.skip(self._drawn_samples(number))
        if saved.number >= stages:
            self.held_out = self._hold_out(stages)
        # Not as progress of this process, from which the time left is reckoned.
        self.bar.n = self.bar.initial = self._samples_of(saved.number, stages)
        self.bar.refresh()

    def _samples_of(self, steps: int, stages: int) -> int:
        """The samples that the first `steps` steps go through, the bar's unit."""
        pruning = min(steps, stages)
        epochs = pruning * self.epochs_per_stage + steps - pruning
        return pruning * self._stage_samples() + epochs * len(self.training_indices)

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
            warn(
                f"no weight is left of {lost[0]}{others}, through which nothing passes any more; "
                "per_layer=True keeps some in every layer, exclude= leaves a layer as it is",
            )

    def _warn_of_training(self) -> None:
        """Warn if the epochs after the last stage did more harm than good."""
        if not self.epochs_after or self.held_out is None:
            return
        before, after = (
            self.history[line]["held_out_loss"] for line in (-1 - self.epochs_after, -1)
        )
        if not after <= before:
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
        w_bar = self.weights.read(self.model)
        # The noise of samples, of weights and of rows is drawn from it in this order.
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        batch, indices, part, seen = self._draw(number, generator)
        gradients: GradientOperator | None = None
        checked: dict[str, Any] = {}
        if self.method.needs_gradients and batch is not None:
            gradients, checked = self._checked_gradients(
                batch, indices, w_bar, number, where, generator
            )
        else:
            self.bar.update(self._stage_samples())
        self.seconds["gradients"] += time.perf_counter() - start

        start = time.perf_counter()
        chosen = self._solve(gradients, batch, part, w_bar, stages, sparsities, where)
        self.seconds["solve"] += time.perf_counter() - start
        line = {"stage": number, **chosen, **checked, **seen}
        if self.test_data is not None:
            self.bar.set_description(f"{where}: testing")
            score = evaluate(self.model, self.test_data, self.given_loss)
            line |= {f"test_{name}": getattr(score, name) for name in ("loss", "top1", "top5")}
        if self.epochs_per_stage:
            period = self._period(self.model, self.epochs_per_stage, number, None)
            for epoch in range(self.epochs_per_stage):
                line["training_loss"] = self._train(period, epoch, where)
        return line | self._measure()

    def _draw(
        self, number: int, generator: torch.Generator
    ) -> tuple[Batch | None, Tensor, float, dict[str, Any]]:
        """The samples of a stage, with their noise and without what is screened out.

        Those held out are drawn too, and tell, at the first stage, what is wrong with the others.

        Returns:
            The batch (None if the stage needs none), its indices (n,), the part that they are of
            all that are not held out or screened out, and what is known of it.
        """
        batch, indices, part = None, torch.empty(0, dtype=torch.long), 0.0
        seen: dict[str, Any] = {}
        if number > 1:
            self.stream.hold_out()
        if self._draws():
            batch, indices = self.stream.draw(self._drawn_samples(number))
            self._check_labels(batch, indices)
            if number == 1 and self.noises:
                self._calibrate_noise(batch, indices, generator)
            batch = self._noisy(batch, generator)
        self.held_out = self._hold_out(number)
        if number == 1:
            self._use_screen()
            self._use_contamination(self._estimate_contamination())
            if self.settings.contamination != 0:
                seen["contamination"] = self.contamination
            if self.noises:
                seen["noise"] = [noise.describe() for noise in self.noises]
        else:
            self._check_held_out()
        if batch is not None:
            drawn = len(indices)
            batch, indices = self._screened(batch, indices, self.settings.samples_per_row or 1)
            if self.settings.screen:
                seen["left_out_samples"] = drawn - len(indices)
            kept = len(indices)
            batch, indices = tree_map(lambda leaf: leaf[: self._stage_samples()], (batch, indices))
            part = drawn * len(indices) / (len(self.stream.pool.indices) * kept)
        return batch, indices, part, seen

    def _checked_gradients(
        self,
        batch: Batch,
        indices: Tensor,
        w_bar: Tensor,
        number: int,
        where: str,
        generator: torch.Generator,
    ) -> tuple[GradientOperator, dict[str, Any]]:
        """The gradients of a batch at `w_bar` (p,), with their noise, and what the audit found."""
        self.bar.update(self._stage_samples() - len(indices))
        self.bar.set_description(f"{where}: gradients")
        with ExitStack() as noisy:
            for noise in self.noises:
                noisy.enter_context(noise.weights(self.model, self.weights, generator))
            own = self._by_own_outputs(batch, w_bar) if self.settings.audit else None
            gradients = self._gradients(
                own or batch,
                residuals.linear_loss if own else self.fitted_loss,
                indices,
                self.bar.update,
            )
        if number == 1:
            self._check_reached(gradients, batch, w_bar)
        for noise in self.noises:
            noise.rows(gradients.rows(), generator)
        if not self.settings.audit:
            return gradients, {}
        self.bar.set_description(f"{where}: checking gradients")
        m = self.settings.samples_per_row or 1
        # The generator that made the noise: a twin of it would draw the rows that it was put on.
        mended = audit.mend_rows(
            self.model, self.weights, gradients, batch, self.fitted_loss, m, w_bar, generator
        )
        self._warn_of(mended, len(gradients.rows()), number)
        return gradients, mended if own is None else mended | {"own_residuals": True}

    def _check_reached(self, gradients: GradientOperator, batch: Batch, w_bar: Tensor) -> None:
        """Raise if only some layers have gradients; warn if none has."""
        if not gradients.rows().any():
            warn(
                "all gradients are zero, so that there are only magnitudes to go by: does the "
                "loss depend on the weights, without no_grad or detach on the way?"
            )
            return
        names = audit.unreached(self.model, self.weights, gradients, batch, self.fitted_loss, w_bar)
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"no gradient reaches {names[0]}{others}, though the loss depends on it: take "
                "no_grad, detach or rounding out of the way, or exclude= what is behind it "
                "(method='magnitude' takes no gradients)"
            )

    def _solve(
        self,
        gradients: GradientOperator | None,
        batch: Batch | None,
        part: float,
        w_bar: Tensor,
        stages: int,
        sparsities: list[float],
        where: str,
    ) -> dict[str, Any]:
        """Prune the model, from `w_bar` (p,), to the last of the sparsities; what was chosen."""
        number = len(sparsities)
        self.bar.set_description(f"{where}: solving")
        inputs = None if batch is None else batch[0]
        stage = Stage(
            gradients=gradients,
            w_bar=w_bar,
            budget=self._budget(sparsities),
            samples_per_row=self.settings.samples_per_row or 1,
            remaining=stages - number,
            layers=tuple(part for _, _, part in self.weights.slices()),
            held_out_losses=None if self.held_out is None else self._held_out_losses,
            input_moments=lambda: self._input_moments(w_bar, inputs, number),
            drawn=part,
        )
        w, chosen = self.method.prune(stage)
        if not torch.isfinite(w).all():
            raise DivergedError(
                f"the weights became infinite at {where}; a larger damping than "
                f"{chosen.get('damping')} is needed"
            )
        self.weights.write(self.model, w)
        if self.held_out is not None and "held_out_loss" not in chosen:
            chosen["held_out_loss"] = float(self._current_losses().mean())
        if inputs is not None and self._statistics_wanted():
            chosen |= self._reestimate(inputs)
        return chosen

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
        if self.held_out is None:
            return measured
        score = evaluate(self.model, self.held_out, self.given_loss)
        shown = {"held_out_loss": score.loss}
        if score.top1 is not None:
            shown["held_out_top1"] = score.top1
        self.bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()})
        return measured | shown

    def _draws(self) -> bool:
        """Whether a stage needs calibration samples."""
        return self.method.needs_gradients or self._statistics_wanted()

    def _calibrate_noise(self, batch: Batch, indices: Tensor, generator: torch.Generator) -> None:
        """Fit the noises to the model on the first batch."""
        takes = count(1)

        def rows(noisy: Batch) -> GradientOperator:
            self.bar.set_description(f"calibrating the noise: gradients, trial {next(takes)}")
            return self._gradients(noisy, self.fitted_loss, indices)

        # From a twin, so that the stage's own draw is the one that was measured.
        generator = torch.Generator().set_state(generator.get_state())
        calibrated: list[Noise] = []
        for noise in self.noises:
            calibrated.append(noise.calibrate(batch, rows, generator))
            batch = calibrated[-1].samples(batch, generator, self._classes(batch[0]))
        self.noises = tuple(calibrated)

    def _hold_out(self, number: int) -> Batch | None:
        """The held-out samples of a stage, as noisy as the others, the same in a resumed run."""
        if self.settings.held_out == 0:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed(number))
            inputs, targets = self.stream.held_out()
        self._check_labels((inputs, targets), self.stream.held_out_indices)
        batch = formatted(inputs, fastest_format(self.model, inputs)), targets
        generator = torch.Generator().manual_seed(self._seed(number))
        # Without rows there is nothing to calibrate noise by.
        batch = self._noisy(batch, generator) if self._draws() else batch
        batch, self.held_out_indices = self._screened(batch, self.stream.held_out_indices)
        return batch

    def _check_labels(self, batch: Batch, indices: Tensor) -> None:
        """Raise unless the default loss takes these samples; one of the user's own was tried."""
        if self.given_loss is None:
            check_task(self.model, batch, None, indices)

    def _noisy(self, batch: Batch, generator: torch.Generator) -> Batch:
        """The batch with the noise of samples."""
        for noise in self.noises:
            batch = noise.samples(batch, generator, self._classes(batch[0]))
        return batch

    def _classes(self, inputs: Any) -> int | None:
        """How many classes the model tells apart; None with a loss of the user's own."""
        if self.given_loss is not None:
            return None
        one = tree_map(lambda leaf: leaf[:1], inputs)
        ((_, output),) = outputs_of(self.model, one)
        return int(output.shape[1])

    def _check_held_out(self) -> None:
        """Raise unless the model has a finite held-out loss; warn unless it has only one."""
        if self.held_out is None:
            return
        losses = [mean_loss(self.model, self.held_out, self.loss) for _ in range(2)]
        if not math.isfinite(losses[0]):
            blame_sample(self.model, *self.held_out, self.loss, self.held_out_indices)
        if not math.isclose(*losses, rel_tol=1e-4):
            warn(
                f"the held-out loss was {losses[0]:.4g} and, asked again, {losses[1]:.4g}: the "
                "model is random in eval mode (dropout without training=self.training?), so that "
                "nothing can be chosen or checked by its losses"
            )

    def _use_screen(self) -> None:
        """Leave out samples like those held out, if any, that are outliers, from now on."""
        if not self.settings.screen:
            return
        assert self.held_out is not None
        losses = row_losses(self.model, self.held_out, self.loss, 1)
        self.screen = outliers.find(self.held_out[0], losses)
        self.held_out, self.held_out_indices = self._screened(self.held_out, self.held_out_indices)
        left_out = len(losses) - len(self.held_out_indices)
        self.left_out_share = left_out / len(losses)
        if left_out and not self.settings.noise:
            warn(
                f"{left_out} of {len(losses)} held-out inputs are far noisier than the others, and "
                "the model fails on them: samples like these are left out; screen=False keeps them",
            )

    def _screened(
        self, batch: Batch, indices: Tensor, samples_per_row: int = 1
    ) -> tuple[Batch, Tensor]:
        """The samples that are not left out, in whole rows, and which they are of indices (n,)."""
        if self.screen is None:
            return batch, indices
        kept = self.screen.keeps(batch[0]).nonzero()[:, 0]
        kept = kept[: len(kept) // samples_per_row * samples_per_row]
        if not len(kept):  # not one whole row of others: better these than none
            return batch, indices
        return tree_map(lambda leaf: leaf[kept], batch), indices[kept]

    def _estimate_contamination(self) -> float:
        """The fraction of wrong labels, by the unpruned model, unless it was given."""
        if self.settings.contamination != "auto":
            return self.settings.contamination or 0.0
        assert self.held_out is not None
        outputs = torch.cat([output for _, output in outputs_of(self.model, self.held_out[0])])
        likelihoods = contamination_of.log_likelihoods(outputs, self.held_out[1])
        return contamination_of.significant(likelihoods, outputs.shape[1])

    def _use_contamination(self, contamination: float) -> None:
        self.contamination = contamination
        if contamination:
            self.fitted_loss = contamination_of.ContaminatedCrossEntropy(contamination)

    def _by_own_outputs(self, batch: Batch, w_bar: Tensor) -> Batch | None:
        """The batch with residuals as targets, if the model has other outputs than by `w_bar`."""
        few = tree_map(lambda leaf: leaf[: residuals.COMPARED_SAMPLES], batch[0])
        seen = residuals.outputs(self.model, few)
        m = self.settings.samples_per_row or 1
        with self.weights.kept(self.model):
            self.weights.write(self.model, w_bar)
            return residuals.by_own_outputs(
                self.model, seen, batch, self.fitted_loss, m, self.weights.size
            )

    def _gradients(
        self,
        batch: Batch,
        loss: Loss,
        indices: Tensor,
        progress: Callable[[int], Any] | None = None,
    ) -> GradientOperator:
        if self.buffer is None:
            rows = self._stage_samples() // (self.settings.samples_per_row or 1)
            self.buffer = torch.empty(rows, self.weights.size, dtype=torch.float32)
        return gradient_rows(
            self.model,
            self.weights,
            batch[0],
            batch[1],
            loss,
            self.settings.samples_per_row or 1,
            out=self.buffer[: len(indices) // (self.settings.samples_per_row or 1)],
            progress=progress,
            numbers=indices,
        )

    def _input_moments(
        self, w_bar: Tensor, inputs: Any, number: int
    ) -> list[reconstruction.Moments | None]:
        """The second moments of the layers' inputs with the weights `w_bar` (p,)."""
        self.weights.write(self.model, w_bar)
        few = tree_map(lambda leaf: leaf[: reconstruction.SAMPLES], inputs)
        few = formatted(few, fastest_format(self.model, few))
        # Not the stage's own seed: its noise was drawn by that.
        generator = torch.Generator().manual_seed(self._seed(SEED_STRIDE // 2 + number))
        return reconstruction.input_moments(self.model, self.weights, few, generator)

    def _warn_of(self, checked: dict[str, int], rows: int, number: int) -> None:
        """Tell of rows that were not what they should be, the first time, unless it was wanted."""
        if self.settings.noise or not any(checked.values()):
            return
        if any(line.get(name) for line in self.history for name in checked):
            return
        if checked["filtered_rows"]:
            found = (
                f"{checked['filtered_rows']} of {rows} gradients at stage {number} have parts that "
                "no input of their layers can make, and these were filtered"
            )
        else:
            found = (
                f"{checked['corrected_rows']} of {rows} gradients at stage {number} disagree with "
                "the losses' own changes and were corrected"
            )
        warn(
            f"{found}; if they are meant to differ, as with straight-through estimators, give "
            "audit=False",
        )

    def _budget(self, sparsities: list[float]) -> Budget:
        """What may stay after the last of the sparsities, those of all stages so far."""
        layers, p = [part for _, _, part in self.weights.slices()], self.weights.size
        budget = Budget.over_all(p, p)
        most: Sequence[int] | None = None
        for sparsity in sparsities:
            k = max(1, round_to_kept(p, sparsity))
            if self.settings.per_layer:
                budget = Budget.per_layer(layers, k, most)
                most = budget.counts
            else:
                budget = Budget.over_all(p, k)
        return budget

    def _held_out_losses(self, w: Tensor) -> Tensor:
        assert self.held_out is not None
        self.weights.write(self.model, w)
        return self._current_losses()

    def _statistics_wanted(self) -> bool:
        # Without held-out samples "auto" has nothing to decide by, and leaves them alone.
        decidable = self.settings.batchnorm == "auto" and self.settings.held_out != 0
        return self.has_statistics and (decidable or self.settings.batchnorm == "always")

    def _reestimate(self, inputs: Any) -> dict[str, Any]:
        """Re-estimate BatchNorm's statistics; under "auto" keep them only where that helps.

        Args:
            inputs: calibration inputs, samples first.
        """
        before = batchnorm_statistics.statistics(self.model)
        losses = None if self.held_out is None else self._current_losses()
        few = tree_map(lambda leaf: leaf[:STATISTICS_SAMPLES], inputs)
        batchnorm_statistics.reestimate(self.model, few)
        if losses is None:
            return {"batchnorm": "re-estimated"}
        after = self._current_losses()
        if self.settings.batchnorm == "auto" and not beyond_chance(after, losses):
            batchnorm_statistics.restore(self.model, before)
            return {"batchnorm": "kept"}
        return {"batchnorm": "re-estimated", "held_out_loss": float(after.mean())}

    def _current_losses(self) -> Tensor:
        assert self.held_out is not None
        return group_losses(self.model, self.held_out, self.fitted_loss)

    def _reserve(self, available: int) -> int:
        """How many samples are set aside to be held out: others for every stage if they suffice."""
        assert self.settings.held_out is not None
        assert self.settings.stages is not None
        spare = available - self._stage_samples() if self._draws() else available
        most = min(spare, int(available * HELD_OUT_FRACTION))
        return max(self.settings.held_out, min(self.settings.stages * self.settings.held_out, most))

    def _drawn_samples(self, number: int) -> int:
        """How many samples a stage draws: so many more as will be left out, once that is known."""
        wanted, m = self._stage_samples(), self.settings.samples_per_row or 1
        if number == 1:
            return wanted
        needed = m * math.ceil(wanted / m / (1 - self.left_out_share))
        return min(needed, len(self.stream.pool.indices))

    def _stage_samples(self) -> int:
        count = (self.settings.samples or 1) * (self.settings.samples_per_row or 1)
        # Without gradients, samples serve BatchNorm's statistics alone.
        return count if self.method.needs_gradients else min(count, STATISTICS_SAMPLES)


def build_method(settings: Settings) -> Method:
    """The method that the settings name."""
    if settings.method in BASELINES:
        baseline = BASELINES[settings.method]
        takes_damping = settings.damping != "auto" and hasattr(baseline, "damping")
        return baseline(**({"damping": settings.damping} if takes_damping else {}))
    return WassersteinRegression(
        damping=settings.damping,
        first_order=settings.first_order,
        coupling="identity" if settings.method == "lr" else settings.coupling,
        epsilon=settings.epsilon,
        relative=settings.relative,
        mixture=settings.mixture,
        derivative=settings.derivative,
        selection=settings.selection,
        alternations=settings.alternations,
        memory=int(settings.memory or 0),
        discount=settings.discount,
        metric=settings.metric or 0.0,
        block_size=settings.block_size or 0,
        reconstruction=bool(settings.reconstruction),
    )


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


def round_to_kept(p: int, sparsity: float) -> int:
    """k, the number of weights that stay of `p` at a sparsity."""
    return p - round(p * sparsity)
