"""A run from names to files: load model and data, prune, measure, write the run directory."""

from __future__ import annotations

import hashlib
import platform
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from swap_prune import data, models, recipe
from swap_prune.errors import InputError
from swap_prune.evaluation import Evaluation, evaluate
from swap_prune.pruning import prune
from swap_prune.recipe import Recipe
from swap_prune.run import PruneResult
from swap_prune.run_directory import RunDirectory


def _digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


_CODE = _digest(Path(__file__).parent)


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
            f"weights is missing: {model} comes without trained weights, give a safetensors file"
        )
    return network, data.load(data_set, data_directory)


def run(
    described: Recipe, seed: int, out: Path, overwrite: bool = False, progress: bool = True
) -> dict[str, Any]:
    """Run one seed of a recipe into the directory `out`, or continue the run that is there.

    Args:
        described: what to run.
        seed: which of its seeds.
        out: the run directory.
        overwrite: replace the run that is there, once the new one is known to be possible.
        progress: show a progress bar on standard error.

    Returns:
        The contents of `result.json`; at once when the run is finished already.

    Raises:
        InputError: something can't be used, or `out` has a run of another recipe.
    """
    described = replace(described, seeds=(seed,))
    directory = RunDirectory(out, recipe.dump(described), overwrite)
    inside = described.weights and out.resolve() in Path(described.weights).resolve().parents
    if overwrite and inside:
        raise InputError(
            f"weights {described.weights!r} are in out={str(out)!r}, whose run is to be replaced; "
            "give another directory"
        )
    if directory.recipe_path.exists() and not overwrite:
        _check_same(recipe.read(directory.recipe_path), described, out)
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
        model,
        splits.train,
        seed=seed,
        test_data=splits.test if described.measure_stages else None,
        directory=directory,
        progress=progress,
        **settings,
    )
    task = {
        "model": described.model,
        "data": described.data,
        "data_directory": described.data_directory,
        "weights": described.weights,
    }
    nonzeros_dense = sum(int(model.get_parameter(name).count_nonzero()) for name in result.masks)
    report = _report(result, nonzeros_dense, dense, evaluate(result.model, splits.test), task)
    directory.write_result(report)
    return report


def resume(out: Path, progress: bool = True) -> dict[str, Any]:
    """Continue the run of a directory from its last saved stage."""
    directory = RunDirectory(out)
    if not out.exists():
        raise InputError(f"directory {str(out)!r} doesn't exist; give the --out of a run")
    if not directory.recipe_path.exists():
        below = sorted(path.parent.name for path in out.glob(f"*/{directory.recipe_path.name}"))
        where = f"; its folders {', '.join(below)} have" if below else ""
        if directory.begun:
            where = ": it was begun from Python, call prune again with the same arguments"
        raise InputError(f"directory {str(out)!r} has no run of the command line{where}")
    described = recipe.read(directory.recipe_path)
    step = directory.last_step()
    done = "finished already" if directory.finished else f"{step.number if step else 0} steps saved"
    print(f"swap-prune: {out}: {done}", file=sys.stderr)
    return run(described, described.seeds[0], out, progress=progress)


def _check_same(present: Recipe, described: Recipe, out: Path) -> None:
    """Raise unless both recipes make the same run; files may have moved, checksums tell."""
    # As YAML has it: a list and a tuple are one.
    there, here = (
        yaml.safe_load(recipe.dump(replace(one, weights=None, data_directory=None)))
        for one in (present, described)
    )
    for field in sorted(there.keys() | here.keys()):
        if there.get(field) != here.get(field):
            raise InputError(
                f"out={str(out)!r} has a run of another recipe: {field} is {there.get(field)!r} "
                f"there and {here.get(field)!r} here; give another directory"
            )


def _report(
    result: PruneResult,
    nonzeros_dense: int,
    dense: Evaluation,
    pruned: Evaluation,
    task: dict[str, Any],
) -> dict[str, Any]:
    """The contents of `result.json`: what came out, how, and all that is needed to repeat it."""
    return {
        "method": result.settings["method"],
        "sparsity": result.sparsity,
        "nonzeros_dense": nonzeros_dense,
        "nonzeros": result.nonzeros,
        "prunable": sum(mask.numel() for mask in result.masks.values()),
        "parameters": result.parameters,
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
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "swap_prune": code_version(),
            },
            "threads": torch.get_num_threads(),
        },
    }


def code_version() -> str:
    """A digest of the package's modules, for a version's number stays while they are worked on.

    As they were when this one was imported; of a run that was resumed, those that ended it.
    """
    return _CODE


def _peak_memory_mb() -> float:
    # Kilobytes on Linux, bytes on macOS.
    unit = 1024**2 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
