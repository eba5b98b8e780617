"""A run from names to files: load model and data, prune, measure, write the run directory."""

from __future__ import annotations

import platform
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap_prune import data, models, recipe
from swap_prune.errors import InputError
from swap_prune.evaluation import Evaluation, evaluate
from swap_prune.pruning import PruneResult, prune
from swap_prune.recipe import Recipe
from swap_prune.run_directory import RunDirectory


def load_task(
    model: str, data_set: str, weights: str | None, data_directory: str | None
) -> tuple[nn.Module, data.Splits]:
    """The trained model and the data set that the names stand for.

    Raises:
        InputError: there is no such model, data set or file, or a built-in model lacks weights.
    """
    if weights is None and model in models.PRETRAINED:
        return models.pretrained(model), data.load(data_set, data_directory)
    network = models.build(model)
    if weights is not None:
        models.load_weights(network, Path(weights))
    elif model in models.BUILT_IN:
        raise InputError(
            f"--weights is missing: {model} comes without trained weights, give a safetensors file"
        )
    return network, data.load(data_set, data_directory)


def run(described: Recipe, seed: int, out: Path, progress: bool = True) -> dict[str, Any]:
    """Run one seed of a recipe into the directory `out`, or continue the run that is there.

    Returns:
        The contents of `result.json`; at once when the run is finished already.

    Raises:
        InputError: something can't be used, or `out` has a run of another recipe.
    """
    text = recipe.dump(replace(described, seeds=(seed,)))
    directory = RunDirectory(out, text)
    if directory.recipe_path.exists():
        if directory.recipe_path.read_text() != text:
            raise InputError(
                f"out={str(out)!r} has a run of another recipe; "
                "give another directory, or overwrite"
            )
        if directory.finished:
            return directory.result()
    model, splits = load_task(
        described.model, described.data, described.weights, described.data_directory
    )
    settings = dict(described.settings)
    if settings.get("include") is None and described.model in models.PRUNABLE:
        settings["include"] = models.PRUNABLE[described.model]
    dense = evaluate(model, splits.test)
    result = prune(
        model, splits.train, seed=seed, directory=directory, progress=progress, **settings
    )
    task = {
        "model": described.model,
        "data": described.data,
        "data_directory": described.data_directory,
        "weights": described.weights,
    }
    report = _report(result, dense, evaluate(result.model, splits.test), task)
    directory.finish(result.model, report)
    return report


def resume(out: Path, progress: bool = True) -> dict[str, Any]:
    """Continue the run of a directory from its last saved stage."""
    directory = RunDirectory(out)
    if not directory.recipe_path.exists():
        raise InputError(f"directory {str(out)!r} has no run to continue")
    described = recipe.read(directory.recipe_path)
    return run(described, described.seeds[0], out, progress)


def _report(
    result: PruneResult, dense: Evaluation, pruned: Evaluation, task: dict[str, Any]
) -> dict[str, Any]:
    """The contents of `result.json`: what came out, how, and all that is needed to repeat it."""
    return {
        "method": result.settings["method"],
        "sparsity": result.sparsity,
        "nonzeros": result.nonzeros,
        "prunable": sum(mask.numel() for mask in result.masks.values()),
        "top1_dense": dense.top1,
        "top5_dense": dense.top5,
        "loss_dense": dense.loss,
        "top1": pruned.top1,
        "top5": pruned.top5,
        "loss": pruned.loss,
        "seconds": result.seconds["total"],
        "seconds_by_part": result.seconds,
        "peak_memory_mb": _peak_memory_mb(),
        "layer_sparsity": result.layer_sparsity,
        "history": result.history,
        "configuration": {
            **task,
            **result.settings,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "threads": torch.get_num_threads(),
        },
    }


def _peak_memory_mb() -> float:
    # Kilobytes on Linux, bytes on macOS.
    unit = 1024**2 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
