"""The stages of Algorithm 1 on one model: fresh samples, their gradients, a cut and its solve."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from swap_prune import audit, batchnorm, reconstruction, residuals
from swap_prune.calibration import Batch, Samples
from swap_prune.calling import fastest_format, formatted
from swap_prune.drawing import SEED_STRIDE, Drawing, Drawn, step_seed
from swap_prune.errors import DivergedError, InputError, warn
from swap_prune.evaluation import beyond_chance
from swap_prune.gradients import GradientOperator, gradient_rows
from swap_prune.gradients.rows import Loss
from swap_prune.methods import (
    CombinatorialBrainSurgeon,
    Magnitude,
    Method,
    OptimalBrainDamage,
    Stage,
    WassersteinRegression,
    WoodFisher,
)
from swap_prune.prunable import PrunableWeights
from swap_prune.regression import Budget
from swap_prune.schedule import round_to_kept
from swap_prune.settings import Settings

BASELINES: dict[str, type[Method]] = {
    "magnitude": Magnitude,
    "obd": OptimalBrainDamage,
    "wf": WoodFisher,
    "cbs": CombinatorialBrainSurgeon,
}
# Rows that were not what they should be, as the history counts them.
MENDED = ("filtered_rows", "corrected_rows")


@dataclass(frozen=True)
class Taken:
    """What a stage is solved with.

    Attributes:
        drawn: its samples.
        w_bar: the weights (p,) at which its gradients were taken.
        gradients: None for a method that needs none.
        found: what is known of samples and gradients, for the history.
    """

    drawn: Drawn
    w_bar: Tensor
    gradients: GradientOperator | None
    found: dict[str, Any]


class Pruner:
    """One stage after the other: `take` its gradients, then `solve` it.

    Args:
        model: is pruned in place.
        weights: its prunable ones.
        samples: all there are.
        loss: the user's own; None for cross-entropy.
        settings: resolved ones.
        progress: whether a bar shows what is done.
        spares_held_out: as for `Drawing`.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: PrunableWeights,
        samples: Samples,
        loss: Loss | None,
        settings: Settings,
        progress: bool,
        spares_held_out: bool,
    ) -> None:
        self.model, self.weights, self.settings = model, weights, settings
        self.samples_per_row = settings.samples_per_row or 1
        self.method = build_method(settings)
        # Without held-out samples "auto" has nothing to decide by, and leaves them alone.
        decidable = settings.batchnorm == "auto" and settings.held_out != 0
        wanted = decidable or settings.batchnorm == "always"
        self.takes_statistics = wanted and bool(batchnorm.layers(model))
        self.drawing = Drawing(
            model,
            samples,
            loss,
            settings,
            self.method.needs_gradients,
            self.takes_statistics,
            spares_held_out,
        )
        self.buffer: Tensor | None = None
        self.warned = False  # of rows that were not what they should be
        # Last, for what can't be pruned is to be told without one.
        self.bar = tqdm(disable=not progress, unit="sample", file=sys.stderr)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What later stages depend on, tensors and values for JSON."""
        tensors, values = self.method.state()
        return tensors, {"method": values, **self.drawing.state()}

    def restore(
        self, tensors: dict[str, Tensor], values: dict[str, Any], number: int, ended: bool
    ) -> None:
        """Take up what `state` gave after stage `number`, the last one if the stages have ended.

        Args:
            tensors: of `state`.
            values: of `state`, and the history.
            number: of the stage, in order from 1.
            ended: whether none follows.
        """
        if not ended:
            self.method.restore(tensors, values["method"])
        self.drawing.restore(values, number, ended)
        self.warned = any(line.get(name) for line in values["history"] for name in MENDED)

    # --- gradients ------------------------------------------------------------------------------

    def take(self, number: int, where: str) -> Taken:
        """The samples of a stage and their gradients at the model's weights.

        Args:
            number: of the stage, in order from 1.
            where: the same in words.
        """
        w_bar = self.weights.read(self.model)
        # The noise of samples, of weights and of rows is drawn from it in this order.
        generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        trials = count(1)

        def rows(noisy: Batch, indices: Tensor) -> GradientOperator:
            self.bar.set_description(f"calibrating the noise: gradients, trial {next(trials)}")
            return self._gradients(noisy, self.drawing.fitted_loss, indices)

        drawn = self.drawing.draw(number, generator, rows)
        if not self.method.needs_gradients or drawn.batch is None:
            self.bar.update(self.drawing.stage_samples)
            return Taken(drawn, w_bar, None, drawn.found)
        gradients, checked = self._checked_gradients(
            drawn.batch, drawn.indices, w_bar, number, where, generator
        )
        return Taken(drawn, w_bar, gradients, checked | drawn.found)

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
        loss, noises = self.drawing.fitted_loss, self.drawing.noises
        self.bar.update(self.drawing.stage_samples - len(indices))
        self.bar.set_description(f"{where}: gradients")
        with ExitStack() as noisy:
            for noise in noises:
                noisy.enter_context(noise.weights(self.model, self.weights, generator))
            own = self._by_own_outputs(batch, w_bar) if self.settings.audit else None
            gradients = self._gradients(
                own or batch, residuals.linear_loss if own else loss, indices, self.bar.update
            )
        if number == 1:
            self._check_reached(gradients, batch, w_bar)
        for noise in noises:
            noise.rows(gradients.rows(), generator)
        if not self.settings.audit:
            return gradients, {}
        self.bar.set_description(f"{where}: checking gradients")
        # The generator that made the noise: a twin of it would draw the rows that it was put on.
        mended = audit.mend_rows(
            self.model,
            self.weights,
            gradients,
            batch,
            loss,
            self.samples_per_row,
            w_bar,
            generator,
        )
        self._warn_of(mended, len(gradients.rows()), number)
        return gradients, mended if own is None else mended | {"own_residuals": True}

    def _by_own_outputs(self, batch: Batch, w_bar: Tensor) -> Batch | None:
        """The batch with residuals as targets, if the model has other outputs than by `w_bar`."""
        few = tree_map(lambda leaf: leaf[: residuals.COMPARED_SAMPLES], batch[0])
        seen = residuals.outputs(self.model, few)
        with self.weights.kept(self.model):
            self.weights.write(self.model, w_bar)
            return residuals.by_own_outputs(
                self.model,
                seen,
                batch,
                self.drawing.fitted_loss,
                self.samples_per_row,
                self.weights.size,
            )

    def _gradients(
        self,
        batch: Batch,
        loss: Loss,
        indices: Tensor,
        progress: Callable[[int], Any] | None = None,
    ) -> GradientOperator:
        if self.buffer is None:
            rows = self.drawing.stage_samples // self.samples_per_row
            self.buffer = torch.empty(rows, self.weights.size, dtype=torch.float32)
        return gradient_rows(
            self.model,
            self.weights,
            batch[0],
            batch[1],
            loss,
            self.samples_per_row,
            out=self.buffer[: len(indices) // self.samples_per_row],
            progress=progress,
            numbers=indices,
        )

    def _check_reached(self, gradients: GradientOperator, batch: Batch, w_bar: Tensor) -> None:
        """Raise if only some layers have gradients; warn if none has."""
        if not gradients.rows().any():
            warn(
                "all gradients are zero, so that there are only magnitudes to go by: does the "
                "loss depend on the weights, without no_grad or detach on the way?"
            )
            return
        if self.drawing.random:
            return  # losses would differ all the same
        names = audit.unreached(
            self.model, self.weights, gradients, batch, self.drawing.fitted_loss, w_bar
        )
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"no gradient reaches {names[0]}{others}, though the loss depends on it: take "
                "no_grad, detach, rounding or a checkpoint with use_reentrant=True out of the way, "
                "or exclude= what is behind it "
                "(method='magnitude' takes no gradients)"
            )

    def _warn_of(self, checked: dict[str, int], rows: int, number: int) -> None:
        """Tell of rows that were not what they should be, the first time, unless it was wanted."""
        if self.settings.noise or self.warned or not any(checked[name] for name in MENDED):
            return
        self.warned = True
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

    # --- the cut and its solve ------------------------------------------------------------------

    def solve(
        self, taken: Taken, sparsities: list[float], stages: int, where: str
    ) -> dict[str, Any]:
        """Prune the model to the last of the sparsities; what was chosen, for the history.

        Args:
            taken: by the stage.
            sparsities: those of all stages so far.
            stages: how many there are in all.
            where: the stage in words.
        """
        number = len(sparsities)
        self.bar.set_description(f"{where}: solving")
        inputs = None if taken.drawn.batch is None else taken.drawn.batch[0]
        holds_out = self.drawing.held_out is not None
        stage = Stage(
            gradients=taken.gradients,
            w_bar=taken.w_bar,
            budget=self._budget(sparsities),
            samples_per_row=self.samples_per_row,
            remaining=stages - number,
            layers=tuple(part for _, _, part in self.weights.slices()),
            held_out_losses=self._held_out_losses if holds_out else None,
            input_moments=lambda: self._input_moments(taken.w_bar, inputs, number),
            drawn=taken.drawn.part,
        )
        w, chosen = self.method.prune(stage)
        if not torch.isfinite(w).all():
            raise DivergedError(
                f"the weights became infinite at {where}; a larger damping than "
                f"{chosen.get('damping')} is needed"
            )
        self.weights.write(self.model, w)
        if holds_out and "held_out_loss" not in chosen:
            chosen["held_out_loss"] = float(self.drawing.held_out_losses().mean())
        if inputs is not None and self.takes_statistics:
            chosen |= self._reestimate(inputs)
        return chosen

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
        self.weights.write(self.model, w)
        return self.drawing.held_out_losses()

    def _input_moments(
        self, w_bar: Tensor, inputs: Any, number: int
    ) -> list[reconstruction.Moments | None]:
        """The second moments of the layers' inputs with the weights `w_bar` (p,)."""
        self.weights.write(self.model, w_bar)
        few = tree_map(lambda leaf: leaf[: reconstruction.SAMPLES], inputs)
        few = formatted(few, fastest_format(self.model, few))
        # Not the stage's own seed: its noise was drawn by that.
        seed = step_seed(self.settings.seed, SEED_STRIDE // 2 + number)
        generator = torch.Generator().manual_seed(seed)
        return reconstruction.input_moments(self.model, self.weights, few, generator)

    def _reestimate(self, inputs: Any) -> dict[str, Any]:
        """Re-estimate BatchNorm's statistics; under "auto" keep them only where that helps.

        Args:
            inputs: calibration inputs, samples first.
        """
        before = batchnorm.statistics(self.model)
        holds_out = self.drawing.held_out is not None
        losses = self.drawing.held_out_losses() if holds_out else None
        few = tree_map(lambda leaf: leaf[: batchnorm.SAMPLES], inputs)
        batchnorm.reestimate(self.model, few)
        if losses is None:
            return {"batchnorm": "re-estimated"}
        after = self.drawing.held_out_losses()
        if self.settings.batchnorm == "auto" and not beyond_chance(after, losses):
            batchnorm.restore(self.model, before)
            return {"batchnorm": "kept"}
        return {"batchnorm": "re-estimated", "held_out_loss": float(after.mean())}


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
