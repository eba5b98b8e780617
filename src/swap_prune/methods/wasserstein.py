"""LR and EWR: sparse ridge regression onto transport-smoothed targets (the paper's method)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swap_prune import transport
from swap_prune.evaluation import beyond_chance
from swap_prune.gradients import Buffers, DenseGradients
from swap_prune.methods.base import Auto, Method, Stage
from swap_prune.methods.blocks import compensated
from swap_prune.methods.cloud import Cloud, RowMemory
from swap_prune.metric import Metric, mean_squares, scales
from swap_prune.reconstruction import VECTORS, Moments, reconstructed
from swap_prune.regression import Budget, SupportRidge, hard_threshold_descent

# Where the search for a setting begins at the first stage; later stages begin at the last choice,
# unless nothing moved with that.
FIRST_DAMPING = 0.01
FIRST_STEP_DAMPING = 0.3
# Mean curvatures of a weight between which these, and the range of the search, are as they are;
# beyond them all are in proportion, for losses in other units (sums over pixels, say). Our networks
# have 6e-5 to 6e-3.
USUAL_CURVATURES = (1e-6, 0.02)
# Damping of the saliency, relative to the mean curvature of a weight.
SELECTION_DAMPING = 1e-3
DAMPING_FACTOR = 3.0
DAMPING_RANGE = (1e-8, 1e3)
# A step has to lower the held-out loss by this fraction to be worth searching from.
WORTHWHILE = 1e-3
STEP_RANGE = (1 / 16, 16.0)
# A coupling off the diagonal has to lower the held-out loss by this fraction: matching clouds asks
# less than matching pairs, so small gains now are paid for in later stages
# (docs/noise_experiments.md).
TRANSPORT_GAIN = 0.05
# While weights are cut, steps are damped this much less than the held-out loss would have it: the
# noise that a bold step brings is averaged away by the stages that follow (docs/choices.md).
BOLDNESS = 3.0
# With fewer rows than this, the mean gradient after a cut is that of the fresh rows alone. That is
# better with 100 rows, and no better on the whole with 1,000 (docs/noise_experiments.md).
OWN_MEAN_BELOW = 500
# What epsilon="auto" and mixture="auto" try, relative to the variance of y.
EPSILONS = (0.1, 0.01, 1.0)
MIXTURES = (0.5, 0.25, 1.0)
# What metric="auto" tries, and on how many rows at most: more chose the same (docs/choices.md).
METRICS = (0.0, 0.9)
REHEARSAL_ROWS = 250
# By layers it has to be better by this fraction; where their scales differ by 32 and more it is by
# 30% and more, and where they are alike it was never better (docs/choices.md).
LAYERS_GAIN = 0.1
# The dampings of blocks that are tried, relative to the mean curvature of a weight.
BLOCK_DAMPINGS = (1e-3, 1e-2, 1e-1, 1.0)
# Those of a layer's outputs, relative to the mean square of an input; a third one, 1e-4, was of no
# use (docs/choices.md).
RECONSTRUCTION_DAMPINGS = (3e-3, 1e-1)


@dataclass
class WassersteinRegression(Method):
    """LR and EWR: sparse ridge regression onto `y` or onto its transport-smoothed targets.

    A stage (1) chooses the support, (2) lets weights of layers or blocks make up for their cut
    ones, (3) solves the regression around that with damping λ, (4) for EWR replaces the targets by
    `(1 - θ) y + θ (barycentric projection)`, alternating with the solve, and (5) adds the
    first-order term's step with a damping of its own. Settings that are "auto" are chosen by the
    loss on held-out samples, starting from the last stage's choice.

    Attributes:
        damping: λ of the regression, and of the first-order step unless that is searched.
        first_order: α times m; 1 is the natural-gradient step, 0 leaves the term out.
        coupling: "identity" (LR), "sinkhorn", "gaussian" or "gaussian-printed".
        epsilon: the entropic regularisation.
        relative: whether epsilon is in units of the variance of y, or absolute as in the paper.
        mixture: θ; 0 is LR, 1 the transport plan alone.
        derivative: "exact", or "printed" for the paper's `Gᵀ S (x - y)`.
        selection: "saliency" or "iht".
        alternations: how often transport and regression follow each other.
        memory: how many rows stand for those of earlier stages; 0 for none.
        discount: how fast a row's mass falls with its norm; 0 gives all the same.
        metric: κ, how far the damping of a weight follows its own curvature, 0 is the paper's;
            or "layers", where it follows its own and its layer's.
        block_size: how many weights a block has; 0, the paper's, for no blocks.
        reconstruction: whether weights make up for cut ones by their layer's outputs.
    """

    damping: float | Auto = "auto"
    first_order: float | Auto = "auto"
    coupling: str = "identity"
    epsilon: float | Auto = "auto"
    relative: bool = True
    mixture: float | Auto = "auto"
    derivative: str = "exact"
    selection: str = "saliency"
    alternations: int = 3
    memory: int = 0
    discount: float = 0.0
    metric: Metric | Auto = "auto"
    block_size: int = 0
    reconstruction: bool = False

    def __post_init__(self) -> None:
        """Where the searches begin; each stage's choice is the next one's beginning."""
        self._unit: float | None = None  # of dampings, once the first stage's rows are known
        self._begin(1.0)
        self._memory = RowMemory(self.memory, self.discount)
        # For one copy of G's columns, the regression's of the moment.
        self._buffers = Buffers()
        self._metric: Metric | None = None if self.metric == "auto" else self.metric
        self._moments: dict[int, Moments] = {}  # by the number of the layer

    def _begin(self, unit: float) -> None:
        """Where the searches of dampings begin, in this unit."""
        given = self.damping
        self._first_damping = unit * FIRST_DAMPING if given == "auto" else given
        self._damping = self._first_damping
        self._first_step_damping = unit * FIRST_STEP_DAMPING if given == "auto" else given
        self._step_damping = self._first_step_damping
        self._range = (unit * DAMPING_RANGE[0], unit * DAMPING_RANGE[1])

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The rows remembered, and where the next stage's searches begin."""
        seen = self._moments.items()
        values = {
            "unit": self._unit,
            "damping": self._damping,
            "step_damping": self._step_damping,
            "metric": self._metric,
            "inputs": {str(layer): [found.inputs, found.vectors] for layer, found in seen},
        }
        kept = {f"inputs.{layer}": found.mean for layer, found in seen}
        return self._memory.tensors() | kept, values

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take up what `state` gave."""
        self._memory.restore(tensors)
        self._unit = values["unit"]
        if self._unit is not None:
            self._begin(self._unit)
        self._damping, self._step_damping = values["damping"], values["step_damping"]
        self._metric = values["metric"]
        self._moments = {
            int(layer): Moments(tensors[f"inputs.{layer}"], *described)
            for layer, described in values["inputs"].items()
        }

    def prune(self, stage: Stage) -> tuple[Tensor, dict[str, Any]]:
        """New weights (p,) within the budget, and the settings chosen."""
        assert stage.gradients is not None
        if self._unit is None:
            self._unit = _unit_of_dampings(stage)
            self._begin(self._unit)
        if self._metric is None:
            self._metric = self._rehearsed_metric(stage)
        scale = scales(stage.gradients.rows(), stage.w_bar != 0, self._metric, stage.layers)
        self._memory.rescale(scale)
        u, chosen = self._regress(_in_coordinates(stage, scale), scale)
        self._memory.rescale(1 / scale)
        return u * scale, chosen | {"metric": self._metric}

    def _rehearsed_metric(self, stage: Stage) -> Metric:
        """The κ of the lowest held-out loss when half of the weights are cut; or "layers".

        Whether a layer is lost to its units shows when more of them are cut.
        """
        losses = [float(self._rehearsed_losses(stage, share, 1 / 2).mean()) for share in METRICS]
        best = METRICS[_lowest(losses)]
        over_all, by_layers = (self._rehearsed_losses(stage, m, 1 / 4) for m in (best, "layers"))
        better = by_layers.mean() < (1 - LAYERS_GAIN) * over_all.mean()
        return "layers" if better and beyond_chance(by_layers, over_all) else best

    def _rehearsed_losses(self, stage: Stage, metric: Metric, kept: float) -> Tensor:
        """The held-out losses when this part of the weights is kept; G is rounded anew.

        At the first stage, so there is no row remembered that would have to be rescaled.
        """
        assert stage.gradients is not None
        present, groups = stage.w_bar != 0, stage.budget.groups
        budget = Budget(groups, tuple(math.ceil(kept * int(present[g].sum())) for g in groups))
        rows = DenseGradients(stage.gradients.rows()[:REHEARSAL_ROWS])
        scale = scales(rows.matrix, present, metric, stage.layers)
        trial = _in_coordinates(replace(stage, budget=budget, gradients=rows), scale)
        cloud = self._memory.cloud(rows)
        y = (cloud.gradients @ trial.w_bar).double()
        ridge = self._on_support(trial, cloud, y)
        solution = Candidate(ridge.dual(y, self._damping), {})
        losses = _Trial(ridge, trial.held_out_losses).losses(solution)
        rows.matrix.div_(scale)
        return losses

    def _regress(self, stage: Stage, scale: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The same for weights `w / scale` (p,), which the damping holds all alike."""
        assert stage.gradients is not None
        cloud = self._memory.cloud(stage.gradients, stage.drawn)
        y = (cloud.gradients @ stage.w_bar).double()
        ridge = self._on_support(stage, cloud, y)
        # Without a cut x = y already: there is nothing to make up for, nor to transport.
        cut = len(ridge.support) < int((stage.w_bar != 0).sum())
        settings: dict[str, Any] = {"damping": self._damping}
        solution = Candidate(ridge.dual(y, self._damping), settings)
        if cut:
            ridge, solution = self._centred(stage, scale, cloud, y, ridge, solution)
            settings = solution.settings
        trial = _Trial(ridge, stage.held_out_losses)
        if self.damping == "auto" and cut:
            solution = trial.line(
                self._damping,
                lambda damping: Candidate(ridge.dual(y, damping), settings | {"damping": damping}),
                DAMPING_FACTOR,
                self._range,
                solution,
            )
            found = solution.settings["damping"]
            # It grew until nothing moves, which is no place to begin the next search.
            grown = found * DAMPING_FACTOR > self._range[1]
            self._damping = self._first_damping if grown else found
        if self.coupling != "identity" and cut:
            solution = self._transport(_Problem(ridge, cloud, y, solution), trial)
        if self.first_order != 0:
            bold = cut and stage.remaining > 0
            ones = cloud.fresh_ones if cut and cloud.fresh < OWN_MEAN_BELOW else cloud.ones
            shift = ones / stage.samples_per_row
            solution = self._first_order(ridge, trial, solution, shift, bold)
        if stage.remaining and stage.drawn < 1:
            self._memory.keep(cloud, ridge)
        if solution.losses is not None:
            solution.settings["held_out_loss"] = float(solution.losses.mean())
        return ridge.weights(solution.v), solution.settings

    def _on_support(self, stage: Stage, cloud: Cloud, y: Tensor) -> SupportRidge:
        """The regression on the weights that stay."""
        regression = partial(SupportRidge, cloud.gradients, stage.w_bar, buffers=self._buffers)
        if stage.budget.allows(stage.w_bar):
            # Nothing is to be chosen, yet thresholding may cut a weight that a step makes zero.
            return regression(stage.w_bar.nonzero().flatten())
        if self.selection == "iht":
            alpha = 1.0 if self.first_order == "auto" else self.first_order
            targets = (y - alpha / stage.samples_per_row * cloud.ones).to(stage.w_bar.dtype)
            w = hard_threshold_descent(
                cloud.gradients, targets, stage.w_bar, stage.budget, self._damping
            )
            return regression(w.nonzero().flatten())
        everything = regression(stage.w_bar.nonzero().flatten())
        # w_bar is the minimum here, so only the curvature counts; a damping that is small against
        # it keeps the ranking from falling back to magnitudes (docs/choices.md).
        damping = SELECTION_DAMPING * everything.mean_curvature()
        support = stage.budget.select(everything.saliency(y, damping or FIRST_DAMPING))
        gram = everything.gram_of(support)
        return regression(support, gram)

    def _centred(
        self,
        stage: Stage,
        scale: Tensor,
        cloud: Cloud,
        y: Tensor,
        ridge: SupportRidge,
        solution: Candidate,
    ) -> tuple[SupportRidge, Candidate]:
        """The regression around what layers or blocks make up for where that is better than w_bar.

        Blocks are tried only where layers are no help beyond chance: together they take longer than
        they are worth (docs/choices.md).
        """
        tried = [(ridge, solution)]

        def around(name: str, dampings: tuple[float, ...], centres: Tensor) -> None:
            for centre, damping in zip(centres, dampings, strict=True):
                moved = ridge.around(centre)
                settings = solution.settings | {name: damping}
                tried.append((moved, Candidate(moved.dual(y, self._damping), settings)))

        def best() -> tuple[SupportRidge, Candidate]:
            losses = [_Trial(moved, stage.held_out_losses).loss(found) for moved, found in tried]
            return tried[_lowest(losses)]

        if self.reconstruction:
            solution.settings["reconstruction_damping"] = None
            around(
                "reconstruction_damping",
                RECONSTRUCTION_DAMPINGS,
                reconstructed(
                    stage.w_bar * scale,
                    ridge.support,
                    stage.layers,
                    self._input_moments(stage),
                    RECONSTRUCTION_DAMPINGS,
                ).div_(scale),
            )
        trial = _Trial(ridge, stage.held_out_losses)
        if self.block_size and not trial.improves(best()[1], solution, 0.0):
            solution.settings["block_damping"] = None
            curvature = ridge.mean_curvature()
            around(
                "block_damping",
                BLOCK_DAMPINGS,
                compensated(
                    cloud.gradients,
                    stage.w_bar,
                    ridge.support,
                    stage.layers,
                    self.block_size,
                    [damping * curvature for damping in BLOCK_DAMPINGS],
                ),
            )
        if len(tried) == 1:
            return ridge, solution
        chosen, found = best()
        # A copy: the centres that were not chosen need not stay in memory.
        chosen.w_bar = chosen.w_bar.clone()
        return chosen, found

    def _input_moments(self, stage: Stage) -> list[Moments | None]:
        """Those of the stage, with what earlier stages saw where it saw few inputs."""
        assert stage.input_moments is not None
        found = stage.input_moments()
        for layer, moments in enumerate(found):
            if moments is not None and moments.vectors < VECTORS:
                if layer in self._moments:
                    moments = moments.joined(self._moments[layer])
                found[layer] = self._moments[layer] = moments
        return found

    def _transport(self, problem: _Problem, trial: _Trial) -> Candidate:
        """The best of the couplings asked for; LR is one of them while the mixture is free."""
        method = self._solve_exact if self.derivative == "exact" else self._solve_printed
        solve, lr = partial(method, problem), problem.lr
        epsilons = EPSILONS if self.epsilon == "auto" else (self.epsilon,)
        mixtures = MIXTURES if self.mixture == "auto" else (self.mixture,)
        best = solve(epsilons[0], mixtures[0])
        if self.mixture == "auto":
            unmixed = {"epsilon": None, "mixture": 0.0}
            untouched = Candidate(lr.v, lr.settings | unmixed, lr.losses)
            # One look a stage: only where transport pays at all are the others worth their time.
            if not trial.improves(best, untouched, TRANSPORT_GAIN):
                return untouched
        best = trial.best([best, *(solve(epsilon, mixtures[0]) for epsilon in epsilons[1:])])
        epsilon = best.settings["epsilon"]
        return trial.best([best, *(solve(epsilon, mixture) for mixture in mixtures[1:])])

    def _solve_exact(self, problem: _Problem, epsilon: float, mixture: float) -> Candidate:
        """Alternate transport and regression; neither raises the objective.

        Fresh rows are transported; remembered ones, no samples any more, stay coupled in pairs.
        """
        ridge, cloud, y, lr = problem.ridge, problem.cloud, problem.y, problem.lr
        v, potentials, fresh = lr.v, None, cloud.unscaled(y)
        for _ in range(self.alternations):
            plan = transport.couple(
                cloud.unscaled(ridge.predictions(v)),
                fresh,
                epsilon,
                coupling=self.coupling,
                mu=cloud.masses,
                nu=cloud.masses,
                relative=self.relative,
                start=potentials,
            )
            potentials = plan.potentials
            mixed = (1 - mixture) * fresh + mixture * plan.targets
            v = ridge.dual(cloud.rescaled(mixed, y), lr.settings["damping"])
        settings = {
            "epsilon": epsilon,
            "mixture": mixture,
            "transport_converged": plan.converged,
            "transport_marginal_error": plan.marginal_error,
        }
        return Candidate(v, lr.settings | settings)

    def _solve_printed(self, problem: _Problem, epsilon: float, mixture: float) -> Candidate:
        """The stationary point of the printed gradient: LR on neighbour-averaged rows."""
        ridge, cloud, y, lr = problem.ridge, problem.cloud, problem.y, problem.lr
        smoother = torch.eye(len(y), dtype=y.dtype)
        smoother[: cloud.fresh, : cloud.fresh] *= 1 - mixture
        smoother[: cloud.fresh, : cloud.fresh] += mixture * transport.smoothing(
            cloud.unscaled(y), epsilon, masses=cloud.masses, relative=self.relative
        )
        v = ridge.smoothed_dual(y, lr.settings["damping"], smoother)
        return Candidate(v, lr.settings | {"epsilon": epsilon, "mixture": mixture})

    def _first_order(
        self,
        ridge: SupportRidge,
        trial: _Trial,
        solution: Candidate,
        shift: Tensor,
        bold: bool,
    ) -> Candidate:
        """Add the step of the first-order term, `t - α`; `shift` (N,) is α = 1 / m a row."""

        def step(damping: float, first_order: float) -> Candidate:
            settings = {"step_damping": damping, "first_order": first_order}
            v = solution.v - ridge.solve(first_order * shift, damping)
            return Candidate(v, solution.settings | settings)

        size = 1.0 if self.first_order == "auto" else self.first_order
        taken = step(self._step_damping, size)
        if self.damping == "auto":
            taken = trial.line(
                self._step_damping, lambda d: step(d, size), DAMPING_FACTOR, self._range, taken
            )
        if self.first_order == "auto":
            none = Candidate(solution.v, solution.settings | {"first_order": 0.0}, solution.losses)
            if not trial.improves(taken, none):
                # The damping grew until nothing moved: no place to begin the next search.
                self._step_damping = self._first_step_damping
                return trial.best([none, taken])
            damping = taken.settings["step_damping"]
            taken = trial.line(size, lambda a: step(damping, a), 2.0, STEP_RANGE, taken)
        self._step_damping = taken.settings["step_damping"]
        if bold and self.damping == "auto":
            bolder = step(self._step_damping / BOLDNESS, taken.settings["first_order"])
            if trial.improves(bolder, solution):
                return bolder
        return taken


def _unit_of_dampings(stage: Stage) -> float:
    """1 for usual curvatures, otherwise in proportion to them."""
    assert stage.gradients is not None
    mean = float(mean_squares(stage.gradients.rows())[stage.w_bar != 0].mean())
    if not 0 < mean < math.inf:
        return 1.0
    least, most = USUAL_CURVATURES
    return mean / min(max(mean, least), most)


def _lowest(losses: list[float]) -> int:
    """Where the lowest loss is, the first among equals; one that isn't a number is the highest."""
    return min(range(len(losses)), key=lambda i: math.inf if math.isnan(losses[i]) else losses[i])


def _in_coordinates(stage: Stage, scale: Tensor) -> Stage:
    """The stage for weights `w / scale` (p,); G is changed in place, for a second has no room."""
    assert stage.gradients is not None
    stage.gradients.rows().mul_(scale)
    losses = stage.held_out_losses
    return replace(
        stage,
        w_bar=stage.w_bar / scale,
        held_out_losses=None if losses is None else lambda u: losses(u * scale),
    )


@dataclass
class Candidate:
    """A solution `v` (n,) of the regression, the settings behind it, its losses once measured."""

    v: Tensor
    settings: dict[str, Any]
    losses: Tensor | None = None


@dataclass(frozen=True)
class _Problem:
    """Where transport starts: the regression, its rows, `y = G w_bar` (N,), LR's solution."""

    ridge: SupportRidge
    cloud: Cloud
    y: Tensor
    lr: Candidate


@dataclass
class _Trial:
    """Choice among solutions by the loss on held-out samples."""

    ridge: SupportRidge
    held_out_losses: Callable[[Tensor], Tensor] | None

    def best(self, candidates: list[Candidate]) -> Candidate:
        """The candidate of the lowest loss, the first one among equals."""
        return candidates[0] if len(candidates) == 1 else min(candidates, key=self.loss)

    def improves(
        self, candidate: Candidate, other: Candidate, fraction: float = WORTHWHILE
    ) -> bool:
        """Whether the loss is lower by more than chance, and than this fraction of the other's."""
        limit = self.loss(other)
        if math.isfinite(limit):
            limit -= fraction * abs(limit)
        better = self.loss(candidate) < limit
        return better and beyond_chance(self.losses(candidate), self.losses(other))

    def line(
        self,
        start: float,
        make: Callable[[float], Candidate],
        factor: float,
        bounds: tuple[float, float],
        first: Candidate,
    ) -> Candidate:
        """From the candidate `first` at `start`, multiply or divide while the loss falls."""
        best = first
        for ratio in (factor, 1 / factor):
            value = start * ratio
            while bounds[0] <= value <= bounds[1]:
                candidate = make(value)
                if not self.loss(candidate) < self.loss(best):
                    break
                best, value = candidate, value * ratio
            if best is not first:
                break
        return best

    def loss(self, candidate: Candidate) -> float:
        """The mean loss."""
        return float(self.losses(candidate).mean())

    def losses(self, candidate: Candidate) -> Tensor:
        """The losses by group of held-out samples, measured once."""
        if candidate.losses is None:
            assert self.held_out_losses is not None
            candidate.losses = self.held_out_losses(self.ridge.weights(candidate.v))
        return candidate.losses
