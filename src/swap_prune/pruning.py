"""The library's one entry point, `prune`."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from swap_prune import settings as settings_of
from swap_prune import training
from swap_prune.calibration import Samples, to_device
from swap_prune.calling import check_module, ordinary_tensors
from swap_prune.errors import InputError, reason, warn
from swap_prune.evaluation import TRIED_SAMPLES, check_task
from swap_prune.gradients.rows import Loss
from swap_prune.machine import affordable_memory, check_memory, fastest_precision
from swap_prune.masks import is_masked
from swap_prune.noise import resolve as resolve_noise
from swap_prune.prunable import select_weights
from swap_prune.run import PruneResult, Run, load_tensors, tensors_of
from swap_prune.run_directory import RunDirectory
from swap_prune.schedule import round_to_kept, sparsities
from swap_prune.settings import FEW_HELD_OUT, HELD_OUT_FRACTION, REGRESSIONS, Settings, plain
from swap_prune.stages import Pruner, build_method


@ordinary_tensors()
def prune(
    model: nn.Module,
    calibration: Any,
    *,
    sparsity: float,
    method: str = "ewr",
    loss: Loss | None = None,
    fine_tuning: Any = None,
    training_data: Any = None,
    noise: Any = None,
    test_data: Any = None,
    directory: RunDirectory | Path | str | None = None,
    in_place: bool = False,
    progress: bool = False,
    **settings: Any,
) -> PruneResult:
    """Prune a trained model with a little calibration data, with or without training.

    Args:
        model: any module; it is left as it is unless `in_place`.
        calibration: a Dataset or DataLoader of pairs (input, target), or a pair of tensors
            (inputs, targets). Inputs may be tuples or dicts of tensors, which the model is called
            on as `model(*x)` and `model(**x)`.
        sparsity: the fraction of the prunable weights to set to zero, in [0, 1).
        method: "ewr", "lr", "wf" (WoodFisher), "cbs" (combinatorial brain surgeon), "obd" or
            "magnitude".
        loss: `loss(model(x), targets)`, a scalar, the mean over the batch; default: cross-entropy.
        fine_tuning: None for no training; a `FineTuning`, the name of a preset ("default",
            "authors-mlpnet", "authors-resnet20"), or a dict of its fields.
        training_data: what fine-tuning trains on, in the forms of `calibration`; default:
            `calibration` without the held-out samples.
        noise: put on the calibration samples or gradients of every stage, to see what a method
            makes of it: a `Noise`, a dict as {"kind": "labels", "fraction": 0.25}, or a list of
            these (see `swap_prune.noise`). Held-out samples get the noise of samples too.
        test_data: measured right after every stage's cut, before any training, into the history
            (`test_loss`, `test_top1`, `test_top5`); nothing is chosen by it. In the forms of
            `calibration`.
        directory: where every stage is saved as it ends; a run of the same configuration that is
            there already is continued, and ends with the result of one never interrupted.
        in_place: change the given model instead of a copy.
        progress: show a progress bar on standard error.
        **settings: the rest, each with a default that suits most models:

            stages: how many times weights are cut and gradients taken anew (15, or the length of
                one's own schedule).
            schedule: "cubic", "linear", or a list of sparsities, one a stage.
            correcting: how many of the last stages move weights without cutting any (lr and ewr:
                two fifths; others, and with a schedule of one's own, none).
            samples: rows of G a stage (1000, or as many as the data has).
            samples_per_row: samples averaged in a row (up to 16, as the data allows).
            held_out: samples kept back to choose settings by (a fifth of the data, at most 1000);
                others for every stage, as far as a fifth of the data suffices for that and the
                rest of it isn't trained on.
            damping: λ, or "auto": chosen on the held-out samples by "ewr", "lr" and "cbs", 3e-4
                for "wf"; the others have none.
            first_order: weight of the first-order term; 0 leaves it out; or "auto".
            epsilon: entropic regularisation, or "auto".
            relative: epsilon in units of the variance of y (True), or absolute as in the paper.
            mixture: weight of the transport plan against the diagonal (LR), or "auto".
            coupling: "sinkhorn", "gaussian" or "gaussian-printed" (the paper's Algorithm 3).
            derivative: "exact", or "printed" as in the paper.
            selection: "saliency" or "iht".
            alternations: transport and regression in turn, this many times a stage (3).
            memory: rows that stand for those of earlier stages, or "auto": as many as make 1,000
                with the fresh ones, within 2 GiB and what the machine holds, but at least 50 where
                it does ("auto" for "ewr", 0 for "lr"). Where every stage has the same samples,
                nothing is remembered.
            audit: check the gradients of every stage against losses, two forward passes along each
                of four directions, first of 50 rows, and of all where one of these is refuted;
                refuted rows are corrected if the others are exact. Before that, noise that the
                inputs of their layers give away is filtered. And where the model has other outputs
                while gradients are taken, take the loss's derivative at its own (True for "ewr",
                False for "lr").
            screen: leave out samples whose inputs are far noisier than the others', if there is a
                group of them on which the unpruned model fails, and draw others for them (True
                for "ewr" where samples are held out, by which that is found; False for "lr");
                fine-tuning still sees them.
            discount: the power of its norm by which a row's mass falls; 0: all are alike (0).
            metric: how far the damping of a weight follows its own curvature, from 0, the paper's,
                to 1; "layers", its own and its layer's, where layers are of very different scales;
                or "auto": chosen at the first stage on the held-out samples, if there are.
            block_size: how many neighbouring weights of a layer make up for the cut ones among
                them before all weights together do (100 where samples are held out, by which their
                damping is chosen); 0, the paper's, for none.
            reconstruction: the weights of a layer make up for the cut ones by its outputs, which
                are to change as little as possible on the stage's samples, wherever the held-out
                loss says that it is better (True for "ewr" where samples are held out, False for
                "lr"); blocks are tried where it is not.
            contamination: fraction of wrong labels to reckon with: samples count as far as their
                labels are likely to be right; or "auto", estimated on held-out samples with the
                model as given (the default of "ewr"; 0 for the others).
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
        DivergedError: an InputError too: losses, gradients or weights ceased to be finite.
    """
    sparsity, settings = plain(sparsity), {name: plain(v) for name, v in settings.items()}
    unknown = settings.keys() - Settings.__dataclass_fields__.keys()
    if unknown:
        accepted = ", ".join(sorted(Settings.__dataclass_fields__))
        raise InputError(f"setting {min(unknown)!r} is unknown; accepted are {accepted}")
    if directory is not None and not isinstance(directory, (RunDirectory, Path, str)):
        raise InputError(f"directory is of type {type(directory).__name__}; give a path")
    if directory == "":
        raise InputError("directory is empty; give a path, '.' for the current one")
    for name, flag in (("in_place", in_place), ("progress", progress)):
        if not isinstance(flag, bool):
            raise InputError(f"{name}={flag!r} must be True or False")
    if training_data is not None and fine_tuning is None:
        raise InputError("training_data has no effect without fine_tuning; give both, or neither")
    given = Settings(
        sparsity=sparsity,
        method=method,
        fine_tuning=training.resolve(plain(fine_tuning)),
        noise=resolve_noise(plain(noise)),
        **settings,
    )
    check_module(model)
    check_unmasked(model)
    settings_of.check(given)
    if loss is not None:
        if given.contamination:
            raise InputError(
                f"contamination={given.contamination!r} is for the default loss, cross-entropy; "
                "leave it out with a loss of your own"
            )
        given = replace(given, contamination=0.0)
    samples = read_seeded(calibration, given.seed)
    resolved = settings_of.resolve(given, len(samples))
    assert resolved.stages is not None
    assert resolved.correcting is not None
    steps = sparsities(resolved.schedule, sparsity, resolved.stages, resolved.correcting)
    weights = select_weights(model, resolved.include, resolved.exclude)
    if round_to_kept(weights.size, sparsity) == 0:
        raise InputError(
            f"sparsity={sparsity} leaves none of the {weights.size} prunable weights; "
            f"at most {1 - 1 / weights.size:.6g} is possible"
        )
    if resolved.memory == "auto":
        resolved = replace(resolved, memory=affordable_memory(resolved.samples or 1, weights.size))
    if build_method(resolved).needs_gradients:
        check_memory(
            resolved.samples or 1,
            weights.size,
            int(resolved.memory or 0),
            (resolved.samples or 1) * (resolved.samples_per_row or 1) * samples.sample_bytes(),
        )
    if method in REGRESSIONS and resolved.held_out and resolved.held_out < FEW_HELD_OUT:
        warn(
            f"held_out={resolved.held_out} of {len(samples)} calibration samples are too few to "
            "choose settings by, and the model may become worse than method='wf' makes it; give "
            f"{_wanted(len(samples))}",
        )
    # Rows, products and solves run on the CPU, wherever the model lives.
    device = model.get_parameter(weights.names[0]).device
    if resolved.fine_tuning is not None and resolved.fine_tuning.precision == "auto":
        tuned = replace(resolved.fine_tuning, precision=fastest_precision())
        resolved = replace(resolved, fine_tuning=tuned)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(resolved.seed)
        trains_on_calibration = resolved.fine_tuning is not None and training_data is None
        pruner = Pruner(
            own_copy(model), weights, samples, loss, resolved, progress, trains_on_calibration
        )
        run = Run(pruner)
        if training_data is not None:
            run.train_on(_checked(run.model, Samples(training_data, "training_data"), loss))
        if test_data is not None:
            run.test_data = _checked(run.model, Samples(test_data, "test_data"), loss)
        run.rehearse()
        if isinstance(directory, (str, Path)):
            directory = RunDirectory(directory)
        result = run.execute(steps, directory)
    result.model.to(device)
    if in_place:
        load_tensors(model, tensors_of(result.model))
        result.model = model
    return result


def _wanted(available: int) -> str:
    """What it takes to have enough samples held out."""
    enough = math.ceil(FEW_HELD_OUT / HELD_OUT_FRACTION)
    if available < enough:
        return f"at least {enough} samples"
    return f"held_out={FEW_HELD_OUT} or more, with fewer rows (samples=) if need be"


def _checked(model: nn.Module, samples: Samples, loss: Loss | None) -> Samples:
    """The samples, if model and loss take them."""
    some = to_device(samples.spread(TRIED_SAMPLES), torch.device("cpu"))
    try:
        check_task(model, some, loss)
    except InputError as error:
        raise InputError(f"{samples.name} can't be used: {error}") from error
    return samples


def check_unmasked(model: nn.Module) -> None:
    """Raise if masks hide the model's own weights."""
    if is_masked(model):
        raise InputError("the model has masks; call swap_prune.make_permanent on it first")
    if torch_prune.is_pruned(model):
        raise InputError(
            "the model has masks of torch.nn.utils.prune; make them permanent first with "
            "torch.nn.utils.prune.remove"
        )


def own_copy(model: nn.Module) -> nn.Module:
    """A copy on the CPU, contiguous as a model read from a file is."""
    # What modules keep of their last call, as torch's older weight_norm does, can't be copied.
    kept = (value for module in model.modules() for value in vars(module).values())
    detached = {id(t): t.detach().clone() for t in kept if isinstance(t, Tensor) and t.grad_fn}
    try:
        own = copy.deepcopy(model, detached)
    except Exception as error:  # the model is the user's: anything may come out of it
        raise InputError(
            f"the model can't be copied ({reason(error)}); it must not keep "
            "activations, locks or open files"
        ) from error
    own.cpu()
    for tensor in (*own.parameters(), *own.buffers()):
        tensor.data = tensor.data.contiguous()
    return own


def read_seeded(calibration: Any, seed: int) -> Samples:
    """The calibration samples; a sampler of the user's own draws from the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Samples(calibration)
