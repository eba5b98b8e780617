"""The samples of a stage: drawn, made noisy where that is asked for, and without outliers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from swap_prune import batchnorm, outliers
from swap_prune import contamination as contamination_of
from swap_prune.calibration import Batch, CalibrationStream, Samples, some_of
from swap_prune.calling import fastest_format, formatted
from swap_prune.errors import InputError, warn
from swap_prune.evaluation import (
    check_task,
    cross_entropy,
    group_losses,
    mean_loss,
    outputs_of,
    row_losses,
)
from swap_prune.gradients import GradientOperator
from swap_prune.gradients.rows import Loss, blame_failing_sample, blame_sample
from swap_prune.noise import Noise
from swap_prune.noise import from_description as noise_from
from swap_prune.settings import HELD_OUT_FRACTION, Settings

# Seeds of the steps of runs with neighbouring seeds must not meet.
SEED_STRIDE = 1_000_003


def step_seed(seed: int, number: int) -> int:
    """The seed of a step, a stage or epoch, of a run with a seed."""
    return (seed * SEED_STRIDE + number) % 2**63


@dataclass(frozen=True)
class Drawn:
    """The samples of a stage.

    Attributes:
        batch: None if the stage needs none.
        indices: which samples they are, (n,).
        part: that they are of all that are not held out or left out.
        found: what is known of them, for the history.
    """

    batch: Batch | None
    indices: Tensor
    part: float
    found: dict[str, Any]


class Drawing:
    """The samples of all stages, those held out, and the loss that both are judged by.

    Args:
        model: as it is when a stage begins.
        samples: all there are.
        loss: the user's own; None for cross-entropy, without which labels can't be told.
        settings: resolved ones.
        takes_gradients: whether a stage's samples serve for gradients.
        takes_statistics: whether they serve for BatchNorm's statistics.
        spares_held_out: whether no more samples are to be set aside than are held out at once.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Samples,
        loss: Loss | None,
        settings: Settings,
        takes_gradients: bool,
        takes_statistics: bool,
        spares_held_out: bool,
    ) -> None:
        assert settings.held_out is not None
        self.model, self.settings, self.given_loss = model, settings, loss
        self.samples_per_row = settings.samples_per_row or 1
        self.draws = takes_gradients or takes_statistics
        wanted = (settings.samples or 1) * self.samples_per_row
        # Without gradients, samples serve BatchNorm's statistics alone.
        self.stage_samples = wanted if takes_gradients else min(wanted, batchnorm.SAMPLES)
        self.loss: Loss = cross_entropy if loss is None else loss
        # What pruning fits and chooses by; training and reports keep to the loss itself.
        self.fitted_loss = self.loss
        self.contamination = 0.0
        self.screen: outliers.Screen | None = None  # what tells inputs that are left out
        self.left_out_share = 0.0  # of the samples, as those held out at the first stage tell
        reserve = settings.held_out if spares_held_out else self._reserve(len(samples))
        self.stream = CalibrationStream(samples, settings.held_out, reserve, settings.seed)
        self.random = False  # whether the model gives other outputs when asked again
        self.noises: tuple[Noise, ...] = ()  # until the first stage has calibrated them
        if loss is not None and (self.draws or settings.held_out):
            check_task(model, some_of(samples, settings.seed), loss)
        self.held_out = self._hold_out(1)
        self._check_held_out()
        self.noises = settings.noise

    def draw(
        self,
        number: int,
        generator: torch.Generator,
        rows: Callable[[Batch, Tensor], GradientOperator],
    ) -> Drawn:
        """The samples of a stage, with their noise and without what is screened out.

        Those held out are drawn too, and tell, at the first stage, what is wrong with the others.

        Args:
            number: of the stage, in order from 1.
            generator: draws the noise.
            rows: the gradients of a batch and its indices (n,), by which noise is calibrated.
        """
        batch, indices, part = None, torch.empty(0, dtype=torch.long), 0.0
        found: dict[str, Any] = {}
        if number > 1:
            self.stream.hold_out()
        if self.draws:
            batch, indices = self.stream.draw(self._drawn_samples(number))
            self._check_labels(batch, indices)
            if number == 1 and self.noises:
                self._calibrate_noise(batch, indices, generator, rows)
            batch = self._noisy(batch, generator)
        self.held_out = self._hold_out(number)
        if number == 1:
            self._use_screen()
            self._use_contamination(self._estimate_contamination())
            if self.settings.contamination != 0:
                found["contamination"] = self.contamination
            if self.noises:
                found["noise"] = [noise.describe() for noise in self.noises]
        else:
            self._check_held_out()
        if batch is not None:
            drawn = len(indices)
            batch, indices = self._screened(batch, indices, self.samples_per_row)
            if self.settings.screen:
                found["left_out_samples"] = drawn - len(indices)
            kept = len(indices)
            batch, indices = tree_map(lambda leaf: leaf[: self.stage_samples], (batch, indices))
            part = drawn * len(indices) / (len(self.stream.pool.indices) * kept)
        return Drawn(batch, indices, part, found)

    def held_out_losses(self) -> Tensor:
        """The model's losses on groups of the held-out samples, whose mean is that of all."""
        assert self.held_out is not None
        return group_losses(self.model, self.held_out, self.fitted_loss)

    def state(self) -> dict[str, Any]:
        """What later stages depend on, as values for JSON."""
        return {
            "noise": [noise.describe() for noise in self.noises],
            "contamination": self.contamination,
            "screen": None if self.screen is None else asdict(self.screen),
            "left_out_share": self.left_out_share,
        }

    def restore(self, values: dict[str, Any], number: int, ended: bool) -> None:
        """Take up what `state` gave after stage `number`, the last one if the stages have ended."""
        self.noises = tuple(noise_from(described) for described in values["noise"])
        self._use_contamination(values["contamination"])
        screen = values["screen"]
        self.screen = None if screen is None else outliers.Screen(**screen)
        self.left_out_share = values["left_out_share"]
        for earlier in range(1, number + 1):
            if earlier > 1:
                self.stream.hold_out()
            if self.draws:
                self.stream.skip(self._drawn_samples(earlier))
        if ended:
            self.held_out = self._hold_out(number)

    # --- how many -------------------------------------------------------------------------------

    def _reserve(self, available: int) -> int:
        """How many samples are set aside to be held out: others for every stage if they suffice."""
        assert self.settings.held_out is not None
        assert self.settings.stages is not None
        spare = available - self.stage_samples if self.draws else available
        most = min(spare, int(available * HELD_OUT_FRACTION))
        return max(self.settings.held_out, min(self.settings.stages * self.settings.held_out, most))

    def _drawn_samples(self, number: int) -> int:
        """How many samples a stage draws: so many more as will be left out, once that is known."""
        wanted, m = self.stage_samples, self.samples_per_row
        if number == 1:
            return wanted
        needed = m * math.ceil(wanted / m / (1 - self.left_out_share))
        return min(needed, len(self.stream.pool.indices))

    # --- held out -------------------------------------------------------------------------------

    def _hold_out(self, number: int) -> Batch | None:
        """The held-out samples of a stage, as noisy as the others, the same in a resumed run."""
        if self.settings.held_out == 0:
            return None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(step_seed(self.settings.seed, number))
            inputs, targets = self.stream.held_out()
        self._check_labels((inputs, targets), self.stream.held_out_indices)
        batch = formatted(inputs, fastest_format(self.model, inputs)), targets
        generator = torch.Generator().manual_seed(step_seed(self.settings.seed, number))
        # Without rows there is nothing to calibrate noise by.
        batch = self._noisy(batch, generator) if self.draws else batch
        batch, self.held_out_indices = self._screened(batch, self.stream.held_out_indices)
        return batch

    def _check_labels(self, batch: Batch, indices: Tensor) -> None:
        """Raise unless the default loss takes these samples; one of the user's own was tried."""
        if self.given_loss is None:
            check_task(self.model, batch, None, indices)

    def _check_held_out(self) -> None:
        """Raise unless the model has a finite held-out loss; warn, once, unless it has only one."""
        if self.held_out is None:
            return
        whose = self.model, *self.held_out, self.loss, self.held_out_indices
        try:
            losses = [mean_loss(self.model, self.held_out, self.loss) for _ in range(2)]
        except InputError:
            blame_failing_sample(*whose)
            raise
        if not math.isfinite(losses[0]):
            blame_sample(*whose)
        if not self.random and not math.isclose(*losses, rel_tol=1e-4):
            self.random = True
            warn(
                f"the held-out loss was {losses[0]:.4g} and, asked again, {losses[1]:.4g}: the "
                "model is random in eval mode (dropout without training=self.training?), so that "
                "nothing can be chosen or checked by its losses"
            )

    # --- noise that is asked for ----------------------------------------------------------------

    def _calibrate_noise(
        self,
        batch: Batch,
        indices: Tensor,
        generator: torch.Generator,
        rows: Callable[[Batch, Tensor], GradientOperator],
    ) -> None:
        """Fit the noises to the model on the first batch."""
        # From a twin, so that the stage's own draw is the one that was measured.
        generator = torch.Generator().set_state(generator.get_state())
        calibrated: list[Noise] = []
        for noise in self.noises:
            calibrated.append(noise.calibrate(batch, lambda noisy: rows(noisy, indices), generator))
            batch = calibrated[-1].samples(batch, generator, self._classes(batch[0]))
        self.noises = tuple(calibrated)

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

    # --- noise that is found --------------------------------------------------------------------

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
