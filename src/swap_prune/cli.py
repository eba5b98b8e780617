"""The command line: `swap-prune prune | evaluate | data fetch | demo`."""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swap_prune import data, models
from swap_prune.errors import InputError
from swap_prune.evaluation import Evaluation, evaluate
from swap_prune.pruning import COUPLINGS, METHODS, PruneResult, prune
from swap_prune.run_directory import check_output, plain, write_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it succeeded, 2 when an argument can't be used."""
    options = parser().parse_args(arguments)
    try:
        options.command(options)
    except InputError as error:
        print(f"swap-prune: error: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The commands and their options; those of `prune` are named as in Python."""
    top = argparse.ArgumentParser(
        prog="swap-prune", description="Prune trained PyTorch models, without training."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_prune(commands.add_parser("prune", help="prune a model and write it to a directory"))
    _add_evaluate(commands.add_parser("evaluate", help="print top-1, top-5 and loss of a model"))
    _add_data(commands.add_parser("data", help="fetch a data set"))
    _add_demo(commands.add_parser("demo", help="prune an embedded network with every method"))
    return top


# --- prune --------------------------------------------------------------------------------------


def _add_prune(command: argparse.ArgumentParser) -> None:
    _add_task(command)
    option = command.add_argument
    option("--sparsity", type=float, required=True, help="fraction of zeros, in [0, 1)")
    option("--out", type=Path, required=True, help="directory for the model and the result")
    option("--overwrite", action="store_true", help="replace the run that --out already has")
    option("--method", help=f"{', '.join(METHODS)} (default: ewr)")
    option("--stages", type=int, help="times that weights are cut and gradients taken (15)")
    option("--schedule", type=_schedule, help="cubic, linear, or sparsities as 0.5,0.8,0.9")
    option("--correcting", type=int, help="last stages that cut nothing (two fifths)")
    option("--samples", type=int, help="rows of gradients a stage (1000)")
    option("--samples-per-row", type=int, help="samples averaged in a row (up to 16)")
    option("--held-out", type=int, help="samples kept back to choose settings by (up to 1000)")
    option("--damping", type=_number_or_auto, help="ridge parameter, or auto")
    option("--first-order", type=_number_or_auto, help="weight of the first-order term, or auto")
    option("--epsilon", type=_number_or_auto, help="entropic regularisation, or auto")
    option(
        "--relative",
        action=argparse.BooleanOptionalAction,
        help="epsilon in units of the variance of y, or absolute (default: relative)",
    )
    option("--mixture", type=_number_or_auto, help="weight of the transport plan, or auto")
    option("--coupling", help=f"{', '.join(COUPLINGS)} (default: sinkhorn)")
    option("--derivative", help="exact or printed (default: exact)")
    option("--selection", help="saliency or iht (default: saliency)")
    option("--alternations", type=int, help="transport and regression in turn, a stage (3)")
    option(
        "--per-layer",
        action=argparse.BooleanOptionalAction,
        help="prune every layer alike (default: all weights together)",
    )
    option("--batchnorm", help="re-estimate statistics: auto, always or never (default: auto)")
    option("--include", action="append", help="pattern of weights to prune; may be repeated")
    option("--exclude", action="append", help="pattern of weights to leave; may be repeated")
    option("--seed", type=int, help="fixes the result (0)")
    command.set_defaults(command=_prune)


def _prune(options: argparse.Namespace) -> None:
    check_output(options.out, options.overwrite)
    model, splits = _load_task(options)
    task = ("model", "data", "data_directory", "weights", "out", "overwrite", "command")
    # What was not given is left to the defaults of `prune`.
    given = {k: v for k, v in vars(options).items() if k not in task and v is not None}
    if "include" not in given and options.model in models.PRUNABLE:
        given["include"] = models.PRUNABLE[options.model]
    for name in ("include", "exclude"):
        if name in given:
            given[name] = tuple(given[name])
    dense = evaluate(model, splits.test)
    result = prune(model, splits.train, progress=True, **given)
    pruned = evaluate(result.model, splits.test)
    weights = None if options.weights is None else str(options.weights)
    directory = None if options.data_directory is None else str(options.data_directory)
    configuration = {
        "model": options.model,
        "data": options.data,
        "data_directory": directory,
        "weights": weights,
    }
    write_run(options.out, result.model, report(result, dense, pruned, configuration))
    print(f"{'':8}{'nonzeros':>12}{'top-1 %':>10}{'top-5 %':>10}{'loss':>10}")
    total = sum(mask.numel() for mask in result.masks.values())
    for label, nonzeros, value in (("dense", total, dense), ("pruned", result.nonzeros, pruned)):
        scores = "".join(f"{_shown(score):>10}" for score in (value.top1, value.top5))
        print(f"{label:8}{nonzeros:>12,}{scores}{value.loss:>10.4f}")
    print(f"written: {options.out}/model.safetensors, {options.out}/result.json")


def report(
    result: PruneResult, dense: Evaluation, pruned: Evaluation, configuration: dict[str, Any]
) -> dict[str, Any]:
    """The contents of `result.json`: what came out, how, and all that is needed to repeat it."""
    return {
        "method": result.settings["method"],
        "sparsity": result.sparsity,
        "nonzeros": result.nonzeros,
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
            **configuration,
            **result.settings,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "threads": torch.get_num_threads(),
        },
    }


def _peak_memory_mb() -> float:
    # Kilobytes on Linux, bytes on macOS.
    unit = 1024**2 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _number_or_auto(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _schedule(text: str) -> str | tuple[float, ...]:
    return tuple(float(part) for part in text.split(",")) if "." in text else text


# --- evaluate, data, demo -----------------------------------------------------------------------


def _add_evaluate(command: argparse.ArgumentParser) -> None:
    _add_task(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(command=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    model, splits = _load_task(options)
    result = evaluate(model, splits.test)
    if options.json:
        print(json.dumps(plain(asdict(result))))
    else:
        print(
            f"top-1 {_shown(result.top1)} %, top-5 {_shown(result.top5)} %, "
            f"loss {result.loss:.4f} on {result.samples} samples"
        )


def _add_data(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(required=True, metavar="ACTION")
    fetch = actions.add_parser("fetch", help="download, verify and cache a data set")
    fetch.add_argument("name", help="mnist or cifar10")
    fetch.set_defaults(command=lambda options: print(data.fetch(options.name)))


def _add_demo(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=Path, default=Path("demo-output"), help="directory")
    command.add_argument("--overwrite", action="store_true", help="replace what --out has")
    command.set_defaults(command=_demo)


def _demo(options: argparse.Namespace) -> None:
    from swap_prune.demo import run_demo  # needs the extra packages of swap-prune[demo]

    run_demo(options.out, options.overwrite)


# --- what several commands share ----------------------------------------------------------------


def _add_task(command: argparse.ArgumentParser) -> None:
    names = ", ".join(models.BUILT_IN)
    command.add_argument("--model", required=True, help=f"{names}, or package.module:factory")
    sets = ", ".join(data.BUILT_IN)
    command.add_argument("--data", required=True, help=f"{sets}, or package.module:factory")
    command.add_argument("--data-directory", type=Path, help="where the data set's files are")
    command.add_argument("--weights", type=Path, help="safetensors file of trained weights")


def _load_task(options: argparse.Namespace) -> tuple[nn.Module, data.Splits]:
    if options.weights is None and options.model in models.PRETRAINED:
        model = models.pretrained(options.model)
    else:
        model = models.build(options.model)
        if options.weights is not None:
            models.load_weights(model, options.weights)
        elif options.model in models.BUILT_IN:
            raise InputError(
                f"--weights is missing: {options.model} comes without trained weights, "
                "give a safetensors file"
            )
    return model, data.load(options.data, options.data_directory)


def _shown(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"
