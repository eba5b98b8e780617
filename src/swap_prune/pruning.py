"""Staged pruning (Algorithm 1) and the library's one entry point, `prune`."""

from __future__ import annotations

import copy
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from swap_prune import batchnorm as batchnorm_statistics
from swap_prune.calibration import Batch, CalibrationStream, Samples
from swap_prune.errors import InputError
from swap_prune.evaluation import check_task, cross_entropy, mean_loss
from swap_prune.gradients import GradientOperator, gradient_rows
from swap_prune.gradients.rows import Loss, blame_sample
from swap_prune.methods import Auto, Magnitude, Method, Stage, WassersteinRegression
from swap_prune.prunable import PrunableWeights, Selector, select_weights
from swap_prune.regression import Budget
from swap_prune.schedule import sparsities

METHODS = ("magnitude", "lr", "ewr")
COUPLINGS = ("sinkhorn", "gaussian", "gaussian-printed")
# At most this many samples are held out, and at most this fraction of the data.
HELD_OUT_SAMPLES = 1000
HELD_OUT_FRACTION = 0.2


@dataclass(frozen=True)
class Settings:
    """Everything that, with the model and the data, fixes a run. See `prune` for the meaning."""

    sparsity: float
    method: str = "ewr"
    stages: int | None = None
    schedule: str | tuple[float, ...] = "cubic"
    correcting: int | None = None
    samples: int | None = None
    samples_per_row: int | None = None
    held_out: int | None = None
    damping: float | Auto = "auto"
    first_order: float | Auto = "auto"
    epsilon: float | Auto = "auto"
    relative: bool = True
    mixture: float | Auto = "auto"
    coupling: str = "sinkhorn"
    derivative: str = "exact"
    selection: str = "saliency"
    alternations: int = 3
    per_layer: bool = False
    batchnorm: str = "auto"
    include: tuple[Selector, ...] | None = None
    exclude: tuple[Selector, ...] = ()
    seed: int = 0


@dataclass
class PruneResult:
    """A pruned model and how it came about.

    Attributes:
        model: the pruned model; pruned weights are exactly zero.
        masks: by parameter name, True where a weight stays.
        sparsity: the fraction of the prunable weights that is zero.
        nonzeros: how many are not.
        layer_sparsity: the fraction of zeros by parameter name.
        history: one dict a stage: sparsity, nonzeros, held-out loss, the settings chosen, seconds.
        seconds: the time spent on `gradients`, `solve` and in `total`.
        settings: the resolved settings of the run.
    """

    model: nn.Module
    masks: dict[str, Tensor]
    sparsity: float
    nonzeros: int
    layer_sparsity: dict[str, float]
    history: list[dict[str, Any]]
    seconds: dict[str, float]
    settings: dict[str, Any]


def prune(
    model: nn.Module,
    calibration: Any,
    *,
    sparsity: float,
    method: str = "ewr",
    loss: Loss | None = None,
    in_place: bool = False,
    progress: bool = False,
    **settings: Any,
) -> PruneResult:
    """Prune a trained model with a little calibration data, without training.

    Args:
        model: any module; it is left as it is unless `in_place`.
        calibration: a Dataset or DataLoader of pairs (input, target), or a pair of tensors
            (inputs, targets). Inputs may be tuples or dicts of tensors.
        sparsity: the fraction of the prunable weights to set to zero, in [0, 1).
        method: "ewr", "lr" or "magnitude".
        loss: `loss(model(x), targets)`, a scalar, the mean over the batch; default: cross-entropy.
        in_place: change the given model instead of a copy.
        progress: show a progress bar on standard error.
        **settings: the rest, each with a default that suits most models:

            stages: how many times weights are cut and gradients taken anew (15, or the length of
                one's own schedule).
            schedule: "cubic", "linear", or a list of sparsities, one a stage.
            correcting: how many of the last stages move weights without cutting any (two fifths).
            samples: rows of G a stage (1000, or as many as the data has).
            samples_per_row: samples averaged in a row (up to 16, as the data allows).
            held_out: samples kept back to choose settings by (a fifth of the data, at most 1000).
            damping: λ, or "auto" to choose it on the held-out samples.
            first_order: weight of the first-order term; 0 leaves it out; or "auto".
            epsilon: entropic regularisation, or "auto".
            relative: epsilon in units of the variance of y (True), or absolute as in the paper.
            mixture: weight of the transport plan against the diagonal (LR), or "auto".
            coupling: "sinkhorn", "gaussian" or "gaussian-printed" (the paper's Algorithm 3).
            derivative: "exact", or "printed" as in the paper.
            selection: "saliency" or "iht".
            alternations: transport and regression in turn, this many times a stage (3).
            per_layer: prune every layer alike instead of all weights together.
            batchnorm: re-estimate BatchNorm's statistics after a stage "always", "never", or
                where that lowers the held-out loss ("auto").
            include, exclude: name patterns or module types of the prunable weights (default:
                Linear and Conv layers); see `select_weights`.
            seed: fixes the samples drawn and torch's random numbers while pruning (random
                transforms of the data), and so the result on one machine.

    Returns:
        The pruned model with masks, history and timings.

    Raises:
        InputError: an argument can't be used; the model is unchanged then.
    """
    unknown = settings.keys() - Settings.__dataclass_fields__.keys()
    if unknown:
        accepted = ", ".join(sorted(Settings.__dataclass_fields__))
        raise InputError(f"setting {min(unknown)!r} is unknown; accepted are {accepted}")
    given = Settings(sparsity=sparsity, method=method, **settings)
    if not isinstance(model, nn.Module):
        raise InputError(f"model is of type {type(model).__name__}; give a torch.nn.Module")
    _check(given)
    samples = Samples(calibration)
    resolved = _resolve(given, len(samples))
    assert resolved.stages is not None
    assert resolved.correcting is not None
    steps = sparsities(resolved.schedule, sparsity, resolved.stages, resolved.correcting)
    weights = select_weights(model, resolved.include, resolved.exclude)
    if round_to_kept(weights.size, sparsity) == 0:
        raise InputError(
            f"sparsity={sparsity} leaves none of the {weights.size} prunable weights; "
            f"at most {1 - 1 / weights.size:.6g} is possible"
        )
    if method != "magnitude":
        _check_memory(resolved.samples or 1, weights.size)
    # Rows, products and solves run on the CPU, wherever the model lives.
    device = model.get_parameter(weights.names[0]).device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(resolved.seed)
        run = _Run(copy.deepcopy(model).cpu(), weights, samples, loss, resolved, progress)
        result = run.execute(steps)
    result.model.to(device)
    if in_place:
        model.load_state_dict(result.model.state_dict())
        result.model = model
    return result


def round_to_kept(p: int, sparsity: float) -> int:
    """k, the number of weights that stay of `p` at a sparsity."""
    return p - round(p * sparsity)


class _Run:
    """The stages of one call of `prune`, on a model of its own."""

    def __init__(
        self,
        model: nn.Module,
        weights: PrunableWeights,
        samples: Samples,
        loss: Loss | None,
        settings: Settings,
        progress: bool,
    ) -> None:
        assert settings.held_out is not None
        generator = torch.Generator().manual_seed(settings.seed)
        self.model, self.weights, self.settings = model, weights, settings
        self.given_loss = loss
        self.loss: Loss = cross_entropy if loss is None else loss
        self.stream = CalibrationStream(samples, settings.held_out, generator)
        self.held_out = self._held_out_batch() if settings.held_out else None
        self.method = build_method(settings)
        self.has_statistics = bool(batchnorm_statistics.layers(model))
        self.buffer: Tensor | None = None
        self.seconds = {"gradients": 0.0, "solve": 0.0}
        self.bar = tqdm(
            total=(settings.stages or 1) * self._stage_samples(),
            disable=not progress,
            unit="sample",
            file=sys.stderr,
        )

    def execute(self, steps: list[float]) -> PruneResult:
        """One stage for each sparsity in `steps`, then the report."""
        start = time.perf_counter()
        history = []
        with self.bar:
            for number, sparsity in enumerate(steps, start=1):
                history.append(self._stage(number, len(steps), sparsity))
        self.seconds["total"] = time.perf_counter() - start
        w = self.weights.read(self.model)
        masks = {name: mask != 0 for name, mask in self.weights.split(w).items()}
        nonzeros = int((w != 0).sum())
        return PruneResult(
            model=self.model,
            masks=masks,
            sparsity=1 - nonzeros / self.weights.size,
            nonzeros=nonzeros,
            layer_sparsity={name: 1 - float(m.float().mean()) for name, m in masks.items()},
            history=history,
            seconds=self.seconds,
            settings=describe(self.settings),
        )

    def _stage(self, number: int, stages: int, sparsity: float) -> dict[str, Any]:
        """Take gradients, prune to `sparsity`, write the weights; a line of the history."""
        where = f"stage {number}/{stages}, sparsity {sparsity:.3f}"
        start = time.perf_counter()
        w_bar = self.weights.read(self.model)
        batch = gradients = None
        if self.method.needs_gradients or self._statistics_wanted():
            batch, indices = self.stream.draw(self._stage_samples())
            check_task(self.model, batch, self.given_loss)
        if self.method.needs_gradients and batch is not None:
            self.bar.set_description(f"{where}: gradients")
            gradients = self._gradients(batch, indices)
        else:
            self.bar.update(self._stage_samples())
        self.seconds["gradients"] += time.perf_counter() - start

        self.bar.set_description(f"{where}: solving")
        start_solve = time.perf_counter()
        stage = Stage(
            gradients=gradients,
            w_bar=w_bar,
            budget=self._budget(sparsity),
            samples_per_row=self.settings.samples_per_row or 1,
            remaining=stages - number,
            layers=tuple(part for _, _, part in self.weights.slices()),
            held_out_loss=None if self.held_out is None else self._held_out_loss,
        )
        w, chosen = self.method.prune(stage)
        if not torch.isfinite(w).all():
            raise InputError(
                f"the weights became infinite at {where}; a larger damping than "
                f"{chosen.get('damping')} is needed"
            )
        self.weights.write(self.model, w)
        if self.held_out is not None and "held_out_loss" not in chosen:
            chosen["held_out_loss"] = self._current_loss()
        if batch is not None and self._statistics_wanted():
            chosen |= self._reestimate(batch[0], chosen.get("held_out_loss"))
        self.seconds["solve"] += time.perf_counter() - start_solve
        line = {
            "stage": number,
            "sparsity": 1 - int((w != 0).sum()) / self.weights.size,
            "nonzeros": int((w != 0).sum()),
            **chosen,
            "seconds": time.perf_counter() - start,
        }
        if "held_out_loss" in chosen:
            self.bar.set_postfix(held_out_loss=f"{chosen['held_out_loss']:.4f}")
        return line

    def _gradients(self, batch: Batch, indices: Tensor) -> GradientOperator:
        if self.buffer is None:
            rows = self._stage_samples() // (self.settings.samples_per_row or 1)
            self.buffer = torch.empty(rows, self.weights.size)
        return gradient_rows(
            self.model,
            self.weights,
            batch[0],
            batch[1],
            self.loss,
            self.settings.samples_per_row or 1,
            out=self.buffer,
            progress=self.bar.update,
            numbers=indices,
        )

    def _budget(self, sparsity: float) -> Budget:
        k = max(1, round_to_kept(self.weights.size, sparsity))
        if self.settings.per_layer:
            return Budget.per_layer([part for _, _, part in self.weights.slices()], k)
        return Budget.over_all(self.weights.size, k)

    def _held_out_loss(self, w: Tensor) -> float:
        assert self.held_out is not None
        self.weights.write(self.model, w)
        return mean_loss(self.model, self.held_out, self.loss)

    def _statistics_wanted(self) -> bool:
        # Without held-out samples "auto" has nothing to decide by, and leaves them alone.
        decidable = self.settings.batchnorm == "auto" and self.held_out is not None
        return self.has_statistics and (decidable or self.settings.batchnorm == "always")

    def _reestimate(self, inputs: Any, loss: float | None) -> dict[str, Any]:
        """Re-estimate BatchNorm's statistics; under "auto" keep them only where that helps.

        Args:
            inputs: calibration inputs, samples first.
            loss: the held-out loss so far; None when nothing is held out.
        """
        before = batchnorm_statistics.statistics(self.model)
        few = tree_map(lambda leaf: leaf[:HELD_OUT_SAMPLES], inputs)
        batchnorm_statistics.reestimate(self.model, few)
        if loss is None:
            return {"batchnorm": "re-estimated"}
        after = self._current_loss()
        if self.settings.batchnorm == "auto" and not after < loss:
            batchnorm_statistics.restore(self.model, before)
            return {"batchnorm": "kept"}
        return {"batchnorm": "re-estimated", "held_out_loss": after}

    def _current_loss(self) -> float:
        assert self.held_out is not None
        return mean_loss(self.model, self.held_out, self.loss)

    def _stage_samples(self) -> int:
        count = (self.settings.samples or 1) * (self.settings.samples_per_row or 1)
        # Without gradients, samples serve BatchNorm's statistics alone.
        return count if self.method.needs_gradients else min(count, HELD_OUT_SAMPLES)

    def _held_out_batch(self) -> Batch:
        """The held-out samples, once the model is known to have a finite loss on them."""
        batch = self.stream.held_out()
        check_task(self.model, batch, self.given_loss)
        if not math.isfinite(mean_loss(self.model, batch, self.loss)):
            blame_sample(self.model, *batch, self.loss, self.stream.held_out_indices)
        return batch


def build_method(settings: Settings) -> Method:
    """The method that the settings name."""
    if settings.method == "magnitude":
        return Magnitude()
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
    )


def describe(settings: Settings) -> dict[str, Any]:
    """The settings as JSON can hold them."""
    described = asdict(settings)
    for name in ("include", "exclude"):
        if described[name] is not None:
            described[name] = [s if isinstance(s, str) else s.__name__ for s in described[name]]
    return described


def _resolve(given: Settings, available: int) -> Settings:
    """Fill in what depends on the amount of data; raise when there is too little of it."""
    asked = (given.samples or 1) * (given.samples_per_row or 1)
    held_out = given.held_out
    if held_out is None:
        fifth = max(1, int(available * HELD_OUT_FRACTION))
        held_out = min(HELD_OUT_SAMPLES, fifth, max(0, available - asked))
    if asked + held_out > available:
        raise InputError(
            f"samples={given.samples or 1} rows of samples_per_row={given.samples_per_row or 1} "
            f"and held_out={held_out} need {asked + held_out} samples; "
            f"calibration holds {available}"
        )
    chosen_by_loss = {"damping": given.damping, "first_order": given.first_order}
    if given.method == "ewr":
        chosen_by_loss |= {"epsilon": given.epsilon, "mixture": given.mixture}
    automatic = [name for name, value in chosen_by_loss.items() if value == "auto"]
    if held_out == 0 and given.method != "magnitude" and automatic:
        raise InputError(
            f"held_out is 0 of {available} calibration samples, but {automatic[0]}='auto' is "
            "chosen on held-out samples; give fewer samples, or a number for "
            f"{', '.join(automatic)}"
        )
    pool = available - held_out
    samples = given.samples or min(1000, pool // (given.samples_per_row or 1))
    schedule = given.schedule
    own = isinstance(schedule, (list, tuple))
    stages = given.stages or (len(schedule) if own else 15)
    correcting = given.correcting
    if correcting is None:
        correcting = 0 if own or given.method == "magnitude" else 2 * stages // 5
    return replace(
        given,
        stages=stages,
        schedule=tuple(schedule) if isinstance(schedule, list) else schedule,
        correcting=correcting,
        samples=samples,
        samples_per_row=given.samples_per_row or min(16, pool // samples),
        held_out=held_out,
        include=None if given.include is None else _selectors("include", given.include),
        exclude=_selectors("exclude", given.exclude),
    )


def _selectors(name: str, given: Any) -> tuple[Selector, ...]:
    """The selectors as a tuple; a single one counts as a list of one."""
    selectors = (given,) if isinstance(given, (str, type)) else given
    if not isinstance(selectors, (list, tuple)) or not all(
        isinstance(selector, (str, type)) for selector in selectors
    ):
        raise InputError(f"{name}={given!r} must be name patterns or module types")
    return tuple(selectors)


def _check_memory(n: int, p: int) -> None:
    """Raise before a gradient matrix is asked for that the machine can't hold."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * n * p > memory:
        raise InputError(
            f"samples={n} rows of gradients for {p:,} weights need {4 * n * p / 2**30:.0f} GiB, "
            f"and this machine has {memory / 2**30:.0f}; give fewer samples, or prune fewer layers "
            "with include or exclude"
        )


def _check(settings: Settings) -> None:
    """Raise an InputError for a value that no run can use."""
    _check_number("sparsity", settings.sparsity, "a number in [0, 1)", lambda v: 0 <= v < 1)
    for name, accepted in (
        ("method", METHODS),
        ("coupling", COUPLINGS),
        ("derivative", ("exact", "printed")),
        ("selection", ("saliency", "iht")),
        ("batchnorm", ("auto", "always", "never")),
    ):
        value = getattr(settings, name)
        if value not in accepted:
            raise InputError(f"{name}={value!r} is unknown; accepted are {', '.join(accepted)}")
    for name, least in (
        ("stages", 1),
        ("correcting", 0),
        ("samples", 1),
        ("samples_per_row", 1),
        ("held_out", 0),
        ("alternations", 1),
        ("seed", 0),
    ):
        value = getattr(settings, name)
        optional = Settings.__dataclass_fields__[name].default is None
        if optional and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise InputError(f"{name}={value!r} must be a whole number of at least {least}")
    for name in ("relative", "per_layer"):
        if not isinstance(getattr(settings, name), bool):
            raise InputError(f"{name}={getattr(settings, name)!r} must be True or False")
    if settings.derivative == "printed" and settings.coupling != "sinkhorn":
        raise InputError(
            f"coupling={settings.coupling!r} has no part in the printed derivative, which smooths "
            "with the entropic plan; leave coupling at 'sinkhorn'"
        )
    for name, described, accepts in (
        ("damping", "a positive number", lambda v: 0 < v < math.inf),
        ("first_order", "a number of at least 0", lambda v: 0 <= v < math.inf),
        ("epsilon", "a number of at least 0", lambda v: v >= 0),
        ("mixture", "a number in [0, 1]", lambda v: 0 <= v <= 1),
    ):
        value = getattr(settings, name)
        if value != "auto":
            _check_number(name, value, f"{described}, or 'auto'", accepts)


def _check_number(name: str, value: Any, described: str, accepts: Any) -> None:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not numeric or not accepts(value):
        raise InputError(f"{name}={value!r} must be {described}")
