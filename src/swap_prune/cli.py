"""The command line: prune, resume, run, reproduce, evaluate, noise-report, data fetch, demo."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from tqdm import tqdm

from swap_prune import data, experiment, models, recipe, reproduce
from swap_prune.errors import InputError, PruningWarning
from swap_prune.evaluation import evaluate
from swap_prune.noise import NOISES
from swap_prune.noise_report import noise_report
from swap_prune.recipe import Recipe
from swap_prune.run_directory import MODEL_FILE, RESULT_FILE, RunDirectory, jsonable
from swap_prune.settings import COUPLINGS, METHODS, Settings
from swap_prune.training import PRESETS, FineTuning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when it succeeded, 2 when an argument can't be used."""
    options, unknown = parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _as_sentences(warnings.showwarning)
            options.command(options)
    except (InputError, OSError) as error:
        print(f"swap-prune: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nswap-prune: interrupted{_continuation(options)}", file=sys.stderr)
        return 130
    return 0


def _as_sentences(otherwise: Callable[..., None]) -> Callable[..., None]:
    """What shows our own warnings as sentences, without a line of our source."""

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if issubclass(category, PruningWarning):
            # Above the progress bar, which it would else be glued to.
            tqdm.write(f"swap-prune: warning: {message}", file=sys.stderr)
        else:
            otherwise(message, category, *place)

    return show


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence; the usage of fifty options would hide it."""

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message}; {self.prog} --help lists what there is\n")


def _continuation(options: argparse.Namespace) -> str:
    """How an interrupted command goes on, if it saved anything."""
    out: Path | None = getattr(options, "out", None) or getattr(options, "directory", None)
    if out is None or not out.exists():
        return ""
    how = f"'swap-prune resume {out}'" if RunDirectory(out).begun else "the same command"
    return f"; {how} continues what is saved in {out}"


def parser() -> argparse.ArgumentParser:
    """The commands and their options; those of `prune` are named as in Python."""
    top = Parser(
        prog="swap-prune", description="Prune trained PyTorch models, with or without training."
    )
    top.add_argument(
        "--version", action="version", version=f"swap-prune {metadata.version('swap-prune')}"
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_prune(commands.add_parser("prune", help="prune a model and write it to a directory"))
    _add_resume(commands.add_parser("resume", help="continue an interrupted run"))
    _add_run(commands.add_parser("run", help="run the recipe of a YAML file; resumes"))
    reproduce.add_arguments(commands.add_parser("reproduce", help="run a table of the paper anew"))
    _add_evaluate(commands.add_parser("evaluate", help="print top-1, top-5 and loss of a model"))
    _add_noise_report(
        commands.add_parser("noise-report", help="how noisy gradients are, and what suits them")
    )
    _add_data(commands.add_parser("data", help="fetch a data set"))
    _add_demo(commands.add_parser("demo", help="prune an embedded network in three ways"))
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return top


# --- prune --------------------------------------------------------------------------------------


def _add_prune(command: argparse.ArgumentParser) -> None:
    _add_task(command)
    option = command.add_argument
    option("--sparsity", type=float, required=True, help="fraction of zeros, in [0, 1)")
    option("--out", type=_directory, required=True, help="directory for the model and the result")
    option("--overwrite", action="store_true", help="replace the run that --out already has")
    option("--method", help=f"{', '.join(METHODS)} (default: ewr)")
    option("--stages", type=int, help="times that weights are cut and gradients taken (15)")
    option("--schedule", type=_schedule, help="cubic, linear, or sparsities as 0.5,0.8,0.9")
    option("--correcting", type=int, help="last stages that cut nothing (lr, ewr: two fifths)")
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
    option(
        "--memory",
        type=_count_or_auto,
        help="rows remembered of earlier stages, or auto (ewr: auto)",
    )
    option(
        "--audit",
        action=argparse.BooleanOptionalAction,
        help="mend gradients that losses, layers' inputs or the model's outputs refute (ewr: yes)",
    )
    option(
        "--screen",
        action=argparse.BooleanOptionalAction,
        help="leave out samples whose inputs are outliers that the model fails on (ewr: yes)",
    )
    option("--discount", type=float, help="power of its norm by which a row's mass falls (0)")
    option(
        "--block-size",
        type=int,
        help="weights of a block, which make up for those cut in it (100); 0: none",
    )
    option(
        "--reconstruction",
        action=argparse.BooleanOptionalAction,
        help="weights make up for those cut by their layer's outputs (ewr: yes)",
    )
    option(
        "--metric",
        type=_metric,
        help="curvature's part in the damping, 0 to 1, layers, or auto (auto)",
    )
    option(
        "--contamination",
        type=_number_or_auto,
        help="fraction of wrong labels to reckon with, or auto (auto for ewr, else 0)",
    )
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
    option("--measure-stages", action="store_true", help="measure every stage on the test data")
    option("--noise", help=f"to study robustness: {', '.join(NOISES)} (default: none)")
    option("--noise-fraction", type=float, help="of the samples, rows or entries, in [0, 1]")
    option("--noise-level", type=float, help="how strong, as the kind has it")
    option("--fine-tuning", help=f"train with held masks: {', '.join(PRESETS)} (default: none)")
    _add_fine_tuning(command)
    command.set_defaults(command=_prune)


def _add_fine_tuning(command: argparse.ArgumentParser) -> None:
    """An option for each field of `FineTuning`, to change the preset that --fine-tuning names."""
    for field in fields(FineTuning):
        kind = {"int": int, "float": float, "str": str}[str(field.type)]
        default = getattr(PRESETS["default"], field.name)
        command.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            help=f"of fine-tuning, instead of the preset's (default preset: {default})",
        )


def _prune(options: argparse.Namespace) -> None:
    RunDirectory(options.out, overwrite=options.overwrite).check_free()
    described = Recipe(
        model=options.model,
        data=options.data,
        weights=_absolute(options.weights),
        data_directory=_absolute(options.data_directory),
        settings=_settings(options),
        measure_stages=options.measure_stages,
    )
    seed = 0 if options.seed is None else options.seed
    _print_result(experiment.run(described, seed, options.out, options.overwrite), options.out)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was given; the rest is left to the defaults of `prune`."""
    names = {field.name for field in fields(Settings)} - {"seed", "fine_tuning", "noise"}
    given = {k: v for k, v in vars(options).items() if k in names and v is not None}
    fine_tuning = {
        field.name: getattr(options, field.name)
        for field in fields(FineTuning)
        if getattr(options, field.name) is not None
    }
    noise = {"kind": options.noise, "fraction": options.noise_fraction}
    noise = {k: v for k, v in {**noise, "level": options.noise_level}.items() if v is not None}
    if noise:
        if options.noise is None:
            raise InputError(f"--noise is missing; give one of {', '.join(NOISES)}")
        given["noise"] = [noise]
    if options.fine_tuning is not None:
        given["fine_tuning"] = {"preset": options.fine_tuning, **fine_tuning}
    elif fine_tuning:
        raise InputError(
            f"--{min(fine_tuning).replace('_', '-')} has no effect without --fine-tuning; "
            f"give it a preset: {', '.join(PRESETS)}"
        )
    return given


def _absolute(path: Path | None) -> str | None:
    """A path that a resumed run finds from any directory."""
    return None if path is None else str(path.absolute())


def _print_result(result: dict[str, Any], out: Path) -> None:
    print(f"{'':8}{'nonzeros':>12}{'top-1 %':>10}{'top-5 %':>10}{'loss':>10}")
    for label, suffix in (("dense", "_dense"), ("pruned", "")):
        scores = "".join(f"{_shown(result[name + suffix]):>10}" for name in ("top1", "top5"))
        counts = f"{label:8}{result['nonzeros' + suffix]:>12,}"
        print(f"{counts}{scores}{float(result['loss' + suffix]):>10.4f}")
    print(f"written: {out}/{MODEL_FILE}, {out}/{RESULT_FILE}")


def _number_or_auto(text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number or auto") from error


def _directory(text: str) -> Path:
    # A variable of the shell that is not set, which Path would take for the current directory.
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a path, '.' for the current directory")
    return Path(text)


def _metric(text: str) -> float | str:
    try:
        return text if text in ("auto", "layers") else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, layers or auto") from error


def _count_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number or auto") from error


def _schedule(text: str) -> str | tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if "." in text else text
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be cubic, linear, or sparsities as 0.5,0.8,0.9"
        ) from error


# --- resume, run ----------------------------------------------------------------------------


def _add_resume(command: argparse.ArgumentParser) -> None:
    command.add_argument("directory", type=Path, help="the --out of an interrupted run")
    command.set_defaults(
        command=lambda options: _print_result(
            experiment.resume(options.directory), options.directory
        )
    )


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", type=Path, help="a YAML file")
    command.add_argument(
        "--out", type=_directory, required=True, help="directory, one folder a seed"
    )
    command.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> None:
    described = recipe.read(options.recipe)
    for seed in described.seeds:
        out = options.out / f"seed-{seed}"
        _print_result(experiment.run(described, seed, out), out)


# --- evaluate, noise-report, data, demo ---------------------------------------------------------


def _add_evaluate(command: argparse.ArgumentParser) -> None:
    _add_task(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(command=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    model, splits = _load_task(options)
    result = evaluate(model, splits.test)
    if options.json:
        print(json.dumps(jsonable(asdict(result))))
    else:
        print(
            f"top-1 {_shown(result.top1)} %, top-5 {_shown(result.top5)} %, "
            f"loss {result.loss:.4f} on {result.samples} samples"
        )


def _add_noise_report(command: argparse.ArgumentParser) -> None:
    _add_task(command)
    option = command.add_argument
    option("--samples", type=int, help="rows of gradients (500, or as many as the data has)")
    option("--samples-per-row", type=int, default=1, help="samples averaged in a row (1)")
    option("--include", action="append", help="pattern of weights to look at; may be repeated")
    option("--exclude", action="append", default=[], help="pattern of weights to leave out")
    option("--seed", type=int, default=0, help="fixes the samples drawn (0)")
    option("--json", action="store_true", help="print JSON")
    command.set_defaults(command=_noise_report)


def _noise_report(options: argparse.Namespace) -> None:
    model, splits = _load_task(options)
    report = noise_report(
        model,
        splits.train,
        samples=options.samples,
        samples_per_row=options.samples_per_row,
        include=options.include or models.PRUNABLE.get(options.model),
        exclude=options.exclude,
        seed=options.seed,
    )
    print(json.dumps(report.describe()) if options.json else report)


def _add_data(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(required=True, metavar="ACTION")
    fetch = actions.add_parser("fetch", help="download, verify and cache a data set")
    fetch.add_argument("name", help="mnist or cifar10")
    fetch.set_defaults(command=lambda options: print(data.fetch(options.name)))


def _add_demo(command: argparse.ArgumentParser) -> None:
    command.add_argument("--out", type=_directory, default=Path("demo-output"), help="directory")
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
    return experiment.load_task(
        options.model, options.data, _absolute(options.weights), _absolute(options.data_directory)
    )


def _shown(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"
