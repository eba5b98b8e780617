"""The paper's Table 1 run anew: `swap-prune reproduce table1`.

A cell of the table is one run: a network, a method (the name of a shipped recipe), a sparsity and
a seed. Its directory below OUT/cells is the only memory, so that an interrupted table goes on with
the cells, and within a cell with the stages, that are missing.

    OUT/cells/<network>/<method>/<sparsity>/seed-<n>   run directories
    OUT/table1.json                                    every cell asked for
    OUT/table1.md                                      the table, published figures beside ours
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from swap_prune import experiment, models, training
from swap_prune import recipe as recipes
from swap_prune.errors import InputError
from swap_prune.recipe import Recipe
from swap_prune.run_directory import RunDirectory, plain, write_whole

# The paper's name of each network; None where the paper has no such network.
NETWORKS: dict[str, str | None] = {
    "mlpnet": "MLPNet",
    "resnet20": "ResNet20",
    "resnet50-cifar": "ResNet50",
    "mobilenetv1": "MobileNetV1",
    "efficientnet-lite0": None,
}
DEFAULT_NETWORKS = ("mlpnet", "resnet20")
# MobileNetV1's, whose place EfficientNet-Lite0 takes where its weights can't be had.
UNPUBLISHED_SPARSITIES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
# The published column that stands beside each of ours.
METHODS = {
    "magnitude": "MP",
    "wf": "WF",
    "cbs": "CBS",
    "lr": "LR",
    "ewr": "EWR",
    "lr-authors": "LR",
    "ewr-authors": "EWR",
    "lr-trained": "LR",
    "ewr-trained": "EWR",
}
RECIPES = Path(__file__).with_name("recipes") / "table1"
CELLS, TABLE_JSON, TABLE_MARKDOWN = "cells", "table1.json", "table1.md"
MISSING = "–"

# Student's t: the 97.5% quantiles for 1 to 30 degrees of freedom.
T_QUANTILES = (
    12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814,
    2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596,
    2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227,
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A published figure.

    Attributes:
        network: the paper's name of it.
        sparsity: the fraction of zeros.
        noisy_data: the part of the data with noise, "none" or as "20%".
        method: "MP", "WF", "CBS", "LR" or "EWR".
        top1: in %.
        ci95: half the width of its 95% confidence interval, where published.
    """

    network: str
    sparsity: float
    noisy_data: str
    method: str
    top1: float
    ci95: float | None


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    network: str
    method: str
    sparsity: float
    seed: int

    def __str__(self) -> str:
        return f"{self.network}, {self.method}, sparsity {self.sparsity:g}, seed {self.seed}"

    def directory(self, out: Path) -> RunDirectory:
        """Where the cell is run."""
        parts = (self.network, self.method, f"{self.sparsity:g}", f"seed-{self.seed}")
        return RunDirectory(out.joinpath(CELLS, *parts))


# --- the command --------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the command `reproduce` its tables and their options."""
    tables = parser.add_subparsers(required=True, metavar="TABLE")
    table1 = tables.add_parser("table1", help="accuracy by network, method and sparsity")
    option = table1.add_argument
    option("--networks", nargs="+", help=f"of {', '.join(NETWORKS)} (mlpnet resnet20)")
    option("--sparsities", nargs="+", type=float, help="of the network's published ones (all)")
    option("--methods", nargs="+", help=f"of {', '.join(METHODS)} (all that the network has)")
    option("--seeds", type=int, default=3, help="runs a cell, magnitude's aside (3)")
    option("--weights-directory", type=Path, help="has mlpnet_*.safetensors and the like")
    option("--data-directory", type=Path, help="ImageNet's images, for networks that need them")
    option("--out", type=Path, default=Path("table1"), help="directory to write to (table1)")
    table1.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Run the cells that are missing and write the table.

    Raises:
        InputError: an option can't be used, or weights or data are missing; nothing was run then.
            Or a cell could not be run; those before it are in the table.
    """
    cells = plan(options.networks, options.sparsities, options.methods, options.seeds)
    prepared = _prepare(cells, options.weights_directory, options.data_directory)
    out, command = options.out, command_line(options)
    done = [cell for cell in cells if cell.directory(out).finished]
    for cell in done:
        _run_cell(cell, prepared, out)  # runs nothing, but knows another recipe's run
    contents = write_table(out, cells, command)
    waiting = [cell for cell in cells if cell not in done]
    for index, cell in enumerate(waiting):
        left = seconds_left(contents["cells"], waiting[index:])
        estimate = "" if left is None else f"; about {duration(left)} left"
        where = f"cell {len(done) + index + 1} of {len(cells)}"
        print(f"{where}: {cell}{estimate}", file=sys.stderr, flush=True)
        _run_cell(cell, prepared, out)
        contents = write_table(out, cells, command)
    print(markdown(contents))
    print(f"written: {out / TABLE_MARKDOWN}, {out / TABLE_JSON}")


def plan(
    networks: Sequence[str] | None,
    sparsities: Sequence[float] | None,
    methods: Sequence[str] | None,
    seeds: int,
) -> list[Cell]:
    """The cells to run, a whole table of one seed before the next seed.

    A recipe with a single seed has no randomness and is run once.

    Args:
        networks: None for `DEFAULT_NETWORKS`.
        sparsities: None for all of each network.
        methods: None for all of each network.
        seeds: how many; they are counted from 0.

    Raises:
        InputError: the table has no such network, sparsity or method.
    """
    if seeds < 1:
        raise InputError(f"seeds={seeds} must be at least 1")
    chosen = _choose("network", networks, DEFAULT_NETWORKS, NETWORKS, "table 1")
    cells = []
    for network in chosen:
        its_sparsities, its_methods = sparsities_of(network), methods_of(network)
        rows = _choose("sparsity", sparsities, its_sparsities, its_sparsities, network)
        columns = _choose("method", methods, its_methods, its_methods, network)
        cells += [
            Cell(network, method, sparsity, seed)
            for seed in range(seeds)
            for sparsity in rows
            for method in columns
            if seed == 0 or len(read_recipe(network, method).seeds) > 1
        ]
    return cells


def _choose(
    what: str, given: Iterable[Any] | None, default: Iterable[Any], known: Collection[Any], of: str
) -> list[Any]:
    """What is given, each once, or the default; raise when it isn't known."""
    chosen = list(dict.fromkeys(default if given is None else given))
    for name in chosen:
        if name not in known:
            raise InputError(
                f"{what} {name!r} is not among those of {of}: {', '.join(map(str, known))}"
            )
    return chosen


def command_line(options: argparse.Namespace) -> str:
    """The command that `options` came from."""
    words = ["swap-prune", "reproduce", "table1"]
    names = ("networks", "sparsities", "methods", "seeds")
    for name in (*names, "weights_directory", "data_directory", "out"):
        value = getattr(options, name)
        if value is not None:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


# --- what is shipped ----------------------------------------------------------------------------


def published() -> tuple[Figure, ...]:
    """The figures of the paper's Table 1, those with noisy data among them."""
    with resources.files("swap_prune").joinpath("published/table1.csv").open() as file:
        return tuple(
            Figure(
                row["network"],
                float(row["sparsity"]),
                row["noisy_data"],
                row["method"],
                float(row["top1"]),
                float(row["ci95"]) if row["ci95"] else None,
            )
            for row in csv.DictReader(file)
        )


def sparsities_of(network: str) -> tuple[float, ...]:
    """The table's sparsities of a network, on clean data."""
    name = NETWORKS[network]
    if name is None:
        return UNPUBLISHED_SPARSITIES
    clean = (f for f in published() if f.network == name and f.noisy_data == "none")
    return tuple(sorted({figure.sparsity for figure in clean}))


def methods_of(network: str) -> tuple[str, ...]:
    """The methods that have a recipe for a network."""
    return tuple(name for name in METHODS if _recipe_path(network, name).is_file())


def read_recipe(network: str, method: str) -> Recipe:
    """A shipped recipe: with a sparsity and seeds to be replaced, and without weights."""
    return recipes.read(_recipe_path(network, method))


def _recipe_path(network: str, method: str) -> Path:
    return RECIPES / network / f"{method}.yaml"


# --- running ------------------------------------------------------------------------------------


def _prepare(
    cells: Iterable[Cell], weights_directory: Path | None, data_directory: Path | None
) -> dict[tuple[str, str], Recipe]:
    """The recipe of each network and method, once weights and data are known to load."""
    prepared: dict[tuple[str, str], Recipe] = {}
    checked = set()
    for cell in cells:
        if (cell.network, cell.method) in prepared:
            continue
        shipped = read_recipe(cell.network, cell.method)
        weights = find_weights(cell.network, weights_directory)
        directory = data_directory if shipped.data == "imagenet" else None
        # Absolute, so that the table can be continued from another working directory.
        ready = replace(
            shipped,
            weights=None if weights is None else str(weights.resolve()),
            data_directory=None if directory is None else str(directory.resolve()),
        )
        if cell.network not in checked:
            try:
                experiment.load_task(ready.model, ready.data, ready.weights, ready.data_directory)
            except InputError as error:
                raise InputError(f"{cell.network} can't be run: {error}") from error
            checked.add(cell.network)
        prepared[cell.network, cell.method] = ready
    return prepared


def find_weights(network: str, directory: Path | None) -> Path | None:
    """The file of a network's trained weights; None for a network that comes with them.

    Raises:
        InputError: there is no such file, or more than one.
    """
    if network in models.PRETRAINED:
        return None
    pattern = f"{network}[._]*safetensors"
    if directory is None:
        raise InputError(
            f"--weights-directory is missing: {network} comes without trained weights, give a "
            f"directory with a file {pattern}"
        )
    found = sorted(path for path in directory.glob(pattern) if path.suffix == ".safetensors")
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise InputError(
            f"--weights-directory {str(directory)!r} must have one file {pattern} with the "
            f"weights of {network}; it has {names}"
        )
    return found[0]


def _run_cell(cell: Cell, prepared: Mapping[tuple[str, str], Recipe], out: Path) -> None:
    described = prepared[cell.network, cell.method]
    described = replace(described, settings={**described.settings, "sparsity": cell.sparsity})
    try:
        experiment.run(described, cell.seed, cell.directory(out).path)
    except InputError as error:
        raise InputError(f"cell {cell}: {error}") from error


def seconds_left(records: Iterable[Mapping[str, Any]], waiting: Sequence[Cell]) -> float | None:
    """The time that cells will take, judged by finished ones; None while there are none.

    A cell counts as the mean of its network and method, or of its network, or of all.
    """
    known: dict[tuple[str, ...], list[float]] = {}
    for record in records:
        if record["seconds"] is not None:
            for kind in ((), (record["network"],), (record["network"], record["method"])):
                known.setdefault(kind, []).append(record["seconds"])
    if not known:
        return None
    kinds = (((c.network, c.method), (c.network,), ()) for c in waiting)
    return sum(statistics.mean(next(known[k] for k in kind if k in known)) for kind in kinds)


def epochs_trained(settings: Mapping[str, Any]) -> int:
    """The epochs of training that a run's settings ask for."""
    fine_tuning = training.resolve(settings.get("fine_tuning"))
    if fine_tuning is None:
        return 0
    return settings["stages"] * fine_tuning.epochs_per_stage + fine_tuning.epochs_after


# --- writing ------------------------------------------------------------------------------------


def write_table(out: Path, asked: Sequence[Cell], command: str) -> dict[str, Any]:
    """Write the table of the cells asked for, now and by earlier commands; return the JSON's."""
    commands, cells = _read_table(out / TABLE_JSON)
    records = [_record(cell, out) for cell in sorted({*cells, *asked}, key=_table_order)]
    for network in {cell.network for cell in cells} | {cell.network for cell in asked}:
        dense = {r["top1_dense"] for r in records if r["network"] == network} - {None}
        if len(dense) > 1:
            raise InputError(
                f"--out {str(out)!r} has cells of {network} from different weights, with dense "
                f"top-1 {' and '.join(f'{value:.2f}' for value in sorted(dense))}; give another"
            )
    contents = {
        "commands": list(dict.fromkeys([*commands, command])),
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "seconds": sum(record["seconds"] or 0.0 for record in records),
        "cells": records,
    }
    try:
        write_whole(out / TABLE_JSON, (json.dumps(plain(contents), indent=1) + "\n").encode())
        write_whole(out / TABLE_MARKDOWN, (markdown(contents) + "\n").encode())
    except OSError as error:
        raise InputError(f"--out {str(out)!r} can't be written to: {error}") from error
    return contents


def _read_table(path: Path) -> tuple[list[str], list[Cell]]:
    """The commands that wrote to a table so far, and the cells that they asked for."""
    if not path.exists():
        return [], []
    try:
        contents = json.loads(path.read_text())
        names = [field.name for field in fields(Cell)]
        cells = [Cell(**{name: record[name] for name in names}) for record in contents["cells"]]
        return list(contents["commands"]), sorted(cells, key=_table_order)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"file {str(path)!r} is not a table that this command wrote; delete it (the cells "
            "that are finished stay), or give another --out"
        ) from error


def _table_order(cell: Cell) -> tuple[int, float, int, int]:
    networks, methods = list(NETWORKS), list(METHODS)
    return networks.index(cell.network), cell.sparsity, methods.index(cell.method), cell.seed


def _record(cell: Cell, out: Path) -> dict[str, Any]:
    """A cell's line of the JSON file; without figures while it is not finished."""
    directory = cell.directory(out)
    measured = dict.fromkeys(("top1", "loss", "top1_dense", "seconds", "epochs"))
    if directory.finished:
        result = directory.result()
        measured = {name: result.get(name) for name in measured}
        measured["epochs"] = epochs_trained(result["configuration"])
    return {**asdict(cell), **measured}


def markdown(contents: Mapping[str, Any]) -> str:
    """The table with the published figures, one part for each network."""
    records = contents["cells"]
    parts = [
        "# Table 1\n\n"
        "Top-1 in % on the test images: mean over seeds ± 95% confidence interval (Student's t), "
        "[number of seeds], (published). **Bold**: at least the published figure. "
        f"{MISSING}: not run.\n"
        "Nothing is trained unless the column's heading says for how long; the published LR and "
        "EWR are with an epoch of training after every stage, MP, WF and CBS without training."
    ]
    for network in dict.fromkeys(record["network"] for record in records):
        parts.append(_network_table(network, [r for r in records if r["network"] == network]))
    machine = contents["machine"]
    finished = sum(record["top1"] is not None for record in records)
    parts.append(
        "## How it was made\n\n```\n" + "\n".join(contents["commands"]) + "\n```\n\n"
        f"{finished} of {len(records)} cells are finished; they took "
        f"{duration(contents['seconds'])} in all ({machine['cores']} cores, "
        f"{machine['threads']} used, torch {machine['torch']}, Python {machine['python']})."
    )
    return "\n\n".join(parts)


def _network_table(network: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Sparsities down, methods across."""
    figures = {
        (figure.sparsity, figure.method): figure
        for figure in published()
        if figure.network == NETWORKS[network] and figure.noisy_data == "none"
    }
    used = {record["method"] for record in records}
    methods = [method for method in METHODS if method in used]
    dense = next((r["top1_dense"] for r in records if r["top1_dense"] is not None), None)
    shown = "" if dense is None else f", dense top-1 {dense:.2f}"
    headings = ["sparsity", *(_heading(network, method) for method in methods)]
    lines = [f"## {network}{shown}", "", _line(headings), "|" + "---|" * len(headings)]
    for sparsity in sorted({record["sparsity"] for record in records}):
        scores = {
            m: [r["top1"] for r in records if (r["method"], r["sparsity"]) == (m, sparsity)]
            for m in methods
        }
        entries = [_entry(scores[m], figures.get((sparsity, METHODS[m]))) for m in methods]
        lines.append(_line([f"{sparsity:g}", *entries]))
    return "\n".join(lines)


def _line(entries: Iterable[str]) -> str:
    return f"| {' | '.join(entries)} |"


def _heading(network: str, method: str) -> str:
    """The method, how long it trains, and the published column beside it."""
    epochs = epochs_trained(read_recipe(network, method).settings)
    trained = f", {epochs} epochs" if epochs else ""
    return f"{method}{trained}" + (f" ({METHODS[method]})" if NETWORKS[network] else "")


def _entry(scores: Sequence[float | None], figure: Figure | None) -> str:
    """Our mean, its interval and seeds, then the published figure.

    Args:
        scores: one a seed; None where the seed is not finished.
        figure: None where nothing was published.
    """
    finished = [score for score in scores if score is not None]
    beside = "" if figure is None else f" ({_with_interval(figure.top1, figure.ci95)})"
    if not finished:
        return f"{MISSING}{beside}"
    mean, interval = statistics.mean(finished), confidence_interval(finished)
    ours = _with_interval(mean, interval)
    # As shown: a mean a thousandth below the published figure's two decimals equals it.
    if figure is not None and round(mean, 2) >= figure.top1:
        ours = f"**{ours}**"
    seeds = str(len(finished))
    if len(finished) < len(scores):
        seeds += f" of {len(scores)}"
    return f"{ours} [{seeds}]{beside}"


def _with_interval(value: float, interval: float | None) -> str:
    return f"{value:.2f}" if interval is None else f"{value:.2f} ± {interval:.2f}"


def confidence_interval(values: Sequence[float]) -> float | None:
    """Half the width of the mean's 95% confidence interval; None for a single value."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def t_quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's t."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    # Fisher's expansion about the normal quantile, good to four decimals from here on.
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


def duration(seconds: float) -> str:
    """A time as a person would say it."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
