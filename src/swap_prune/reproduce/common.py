"""What the tables have in common: cells that are run where they are missing, and files that tell.

A cell of a table is one run. Its directory below OUT/cells is the only memory, so that an
interrupted table goes on with the cells, and within a cell with the stages, that are missing.

    OUT/cells/...      run directories
    OUT/<table>.json   every cell asked for
    OUT/<table>.md     the table, published figures beside ours
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING as REQUIRED
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from swap_prune import experiment, models, training
from swap_prune.errors import DivergedError, InputError
from swap_prune.recipe import Recipe
from swap_prune.run_directory import RunDirectory, jsonable, write_whole

RECIPES = Path(__file__).parents[1] / "recipes"
CELLS = "cells"
# In a cell's directory when its run can't be brought to an end: why.
DIVERGED_FILE = "diverged.txt"
MISSING = "–"


@dataclass(frozen=True)
class Cell(ABC):
    """One run of a table."""

    network: str
    seed: int = field(kw_only=True)

    @property
    @abstractmethod
    def folders(self) -> tuple[str, ...]:
        """Where the cell is run, below OUT/cells."""

    @property
    @abstractmethod
    def kind(self) -> tuple[str, ...]:
        """What its time depends on, first what matters most."""

    def directory(self, out: Path) -> RunDirectory:
        """Where the cell is run."""
        return RunDirectory(out.joinpath(CELLS, *self.folders))

    def diverged(self, out: Path) -> str | None:
        """Why the cell's run has no end, if it has none."""
        directory = self.directory(out)
        path = directory.path / DIVERGED_FILE
        return path.read_text().strip() if path.exists() and not directory.finished else None


C = TypeVar("C", bound=Cell)


class Table(ABC, Generic[C]):
    """A table: which cells it has, how each is run, and what is written of them.

    Attributes:
        name: of the command and of the files.
        help: what the table is, in a few words.
        cell: the class of its cells.
        default_out: the directory that is written to unless --out is given.
        options: the names of its own options, as the command that is written down has them.
    """

    name: str
    help: str
    cell: type[C]
    default_out: str
    options: tuple[str, ...]

    @abstractmethod
    def add_own_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that choose cells."""

    @abstractmethod
    def plan(self, options: argparse.Namespace) -> list[C]:
        """The cells to run, in their order; raise an InputError for what the table has not."""

    @abstractmethod
    def recipe(self, cell: C) -> Recipe:
        """What a cell runs, without weights."""

    @abstractmethod
    def order(self, cell: C) -> tuple[Any, ...]:
        """The place of a cell in the files; raise a ValueError for one that can't be there."""

    @abstractmethod
    def measured(self, result: Mapping[str, Any] | None) -> dict[str, Any]:
        """The figures of a cell's result, each None while there is no result.

        "top1_dense" and "seconds" have to be among them.
        """

    @abstractmethod
    def markdown(self, contents: Mapping[str, Any]) -> str:
        """The table for people, from the contents of the JSON file."""

    def summary(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the JSON file has besides the cells."""
        return {}

    def more_files(self, contents: Mapping[str, Any]) -> dict[str, str]:
        """Name and text of what is written besides the JSON and the Markdown file."""
        return {}

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the table's own options and those that all tables have."""
        self.add_own_options(parser)
        option = parser.add_argument
        option("--weights-directory", type=Path, help="has mlpnet_*.safetensors and the like")
        option("--data-directory", type=Path, help="ImageNet's images, for networks that need them")
        out = self.default_out
        option("--out", type=Path, default=Path(out), help=f"directory to write to ({out})")

    def run(self, options: argparse.Namespace) -> None:
        """Run the cells that are missing and write the table.

        Raises:
            InputError: an option can't be used, or weights or data are missing; nothing was run
                then. Or a cell could not be run; those before it are in the table.
        """
        cells = self.plan(options)
        prepared = self._prepare(cells, options.weights_directory, options.data_directory)
        out, command = options.out, self.command_line(options)
        done = [cell for cell in cells if cell.directory(out).finished]
        for cell in done:
            _run_cell(cell, prepared[cell], out)  # runs nothing, but knows another recipe's run
        contents = self.write(out, cells, command)
        waiting = [cell for cell in cells if cell not in done and cell.diverged(out) is None]
        for index, cell in enumerate(waiting):
            left = seconds_left(self._times(contents), [c.kind for c in waiting[index:]])
            estimate = "" if left is None else f"; about {duration(left)} left"
            where = f"cell {len(cells) - len(waiting) + index + 1} of {len(cells)}"
            print(f"{where}: {cell}{estimate}", file=sys.stderr, flush=True)
            try:
                _run_cell(cell, prepared[cell], out)
            except DivergedError as error:
                path = cell.directory(out).path / DIVERGED_FILE
                write_whole(path, f"{error}\n".encode())
                print(f"{error}; to try again, delete {path}", file=sys.stderr, flush=True)
            contents = self.write(out, cells, command)
        print(self.markdown(contents))
        print(f"written: {', '.join(str(out / name) for name in self.files(contents))}")

    def command_line(self, options: argparse.Namespace) -> str:
        """The command that `options` came from."""
        words = ["swap-prune", "reproduce", self.name]
        for name in (*self.options, "weights_directory", "data_directory", "out"):
            value = getattr(options, name)
            if value is not None:
                values = value if isinstance(value, list) else [value]
                words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return shlex.join(words)

    def write(self, out: Path, asked: Iterable[C], command: str) -> dict[str, Any]:
        """Write the table of the cells asked for, now and by earlier commands.

        Returns:
            The contents of the JSON file.
        """
        commands, cells = self._read(out / f"{self.name}.json")
        records = [self._record(cell, out) for cell in sorted({*cells, *asked}, key=self.order)]
        contents = self.contents(records, [*commands, command])
        try:
            for name, text in self.files(contents).items():
                write_whole(out / name, text.encode())
        except OSError as error:
            raise InputError(f"--out {str(out)!r} can't be written to: {error}") from error
        return contents

    def contents(
        self, records: Sequence[Mapping[str, Any]], commands: Iterable[str]
    ) -> dict[str, Any]:
        """What the JSON file of these cells has; commands that are there twice count once.

        Raises:
            InputError: the cells of a network are from different weights.
        """
        for network in dict.fromkeys(record["network"] for record in records):
            dense = {r["top1_dense"] for r in records if r["network"] == network} - {None}
            if len(dense) > 1:
                raise InputError(
                    f"the cells of {network} are from different weights, with dense top-1 "
                    f"{' and '.join(f'{value:.2f}' for value in sorted(dense))}; give each an "
                    "--out of its own"
                )
        return {
            "commands": list(dict.fromkeys(commands)),
            "machine": {
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "code": experiment.code_version(),
            "seconds": sum(record["seconds"] or 0.0 for record in records),
            **self.summary(records),
            "cells": records,
        }

    def files(self, contents: Mapping[str, Any]) -> dict[str, str]:
        """Name and text of every file."""
        return {
            f"{self.name}.md": self.markdown(contents) + "\n",
            f"{self.name}.json": json.dumps(jsonable(contents), indent=1) + "\n",
            **self.more_files(contents),
        }

    def _read(self, path: Path) -> tuple[list[str], list[C]]:
        """The commands that wrote to a table so far, and the cells that they asked for."""
        if not path.exists():
            return [], []
        try:
            contents = json.loads(path.read_text())
            cells = [self.cell_of(record) for record in contents["cells"]]
            return list(contents["commands"]), sorted(cells, key=self.order)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"file {str(path)!r} is not a table that this command wrote; delete it (the cells "
                "that are finished stay), or give another --out"
            ) from error

    def cell_of(self, record: Mapping[str, Any]) -> C:
        """The cell that a line of the JSON file is of."""
        # What a table of an earlier version does not have is as it was before there was a choice.
        known = (f for f in fields(self.cell) if f.name in record or f.default is REQUIRED)
        return self.cell(**{f.name: record[f.name] for f in known})

    def _record(self, cell: C, out: Path) -> dict[str, Any]:
        """A cell's line of the JSON file; without figures while it is not finished."""
        directory = cell.directory(out)
        result = directory.result() if directory.finished else None
        versions = {} if result is None else result["configuration"]["versions"]
        return {
            **asdict(cell),
            **self.measured(result),
            "code": versions.get("swap_prune"),
            "diverged": cell.diverged(out),
        }

    def _times(self, contents: Mapping[str, Any]) -> list[tuple[tuple[str, ...], float]]:
        """Kind and seconds of the finished cells."""
        finished = (r for r in contents["cells"] if r["seconds"] is not None)
        return [(self.cell_of(record).kind, record["seconds"]) for record in finished]

    def _prepare(
        self, cells: Iterable[C], weights_directory: Path | None, data_directory: Path | None
    ) -> dict[C, Recipe]:
        """The recipe of each cell, once weights and data are known to load."""
        prepared: dict[C, Recipe] = {}
        files: dict[str, dict[str, str | None]] = {}
        for cell in cells:
            described = self.recipe(cell)
            if cell.network not in files:
                weights = find_weights(cell.network, weights_directory)
                directory = data_directory if described.data == "imagenet" else None
                # Absolute, so that the table can be continued from another working directory.
                found = {
                    "weights": None if weights is None else str(weights.resolve()),
                    "data_directory": None if directory is None else str(directory.resolve()),
                }
                try:
                    experiment.load_task(described.model, described.data, *found.values())
                except InputError as error:
                    raise InputError(f"{cell.network} can't be run: {error}") from error
                files[cell.network] = found
            prepared[cell] = replace(described, **files[cell.network])  # type: ignore[arg-type]
        return prepared


# --- running ------------------------------------------------------------------------------------


def choose(
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


def check_seeds(seeds: int) -> None:
    """Raise unless there is a seed to run."""
    if seeds < 1:
        raise InputError(f"seeds={seeds} must be at least 1")


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


def _run_cell(cell: Cell, described: Recipe, out: Path) -> None:
    try:
        experiment.run(described, cell.seed, cell.directory(out).path)
    except InputError as error:
        raise type(error)(f"cell {cell}: {error}") from error


def seconds_left(
    finished: Iterable[tuple[tuple[str, ...], float]], waiting: Iterable[tuple[str, ...]]
) -> float | None:
    """The time that cells will take, judged by finished ones; None while there are none.

    A cell counts as the mean of those that have the most of its kind in common with it.

    Args:
        finished: kind and seconds.
        waiting: kinds.
    """
    known: dict[tuple[str, ...], list[float]] = {}
    for kind, seconds in finished:
        for length in range(len(kind) + 1):
            known.setdefault(kind[:length], []).append(seconds)
    if not known:
        return None
    nearest = (
        next(known[kind[:length]] for length in range(len(kind), -1, -1) if kind[:length] in known)
        for kind in waiting
    )
    return sum(map(statistics.mean, nearest))


def epochs_trained(settings: Mapping[str, Any]) -> int:
    """The epochs of training that a run's settings ask for."""
    fine_tuning = training.resolve(settings.get("fine_tuning"))
    if fine_tuning is None:
        return 0
    return settings["stages"] * fine_tuning.epochs_per_stage + fine_tuning.epochs_after


# --- writing ------------------------------------------------------------------------------------


def how_it_was_made(contents: Mapping[str, Any]) -> str:
    """The last part of every Markdown file: commands, time and machine."""
    machine, records = contents["machine"], contents["cells"]
    finished = [record for record in records if record["seconds"] is not None]
    others = sum(record.get("code") != contents.get("code") for record in finished)
    of_others = f" {others} of them are of other code than wrote this file." if others else ""
    diverged = [f"- {record['diverged']}" for record in records if record.get("diverged")]
    ending = "\n\nDiverged, and so in no mean:\n\n" + "\n".join(diverged) if diverged else ""
    return (
        "## How it was made\n\n```\n" + "\n".join(contents["commands"]) + "\n```\n\n"
        f"{len(finished)} of {len(records)} cells are finished; they took "
        f"{duration(contents['seconds'])} in all ({machine['cores']} cores, "
        f"{machine['threads']} used, torch {machine['torch']}, Python {machine['python']})."
        f"{of_others}{ending}"
    )


def rows(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    first, *others = (f"| {' | '.join(line)} |" for line in (headings, *lines))
    return "\n".join([first, "|" + "---|" * len(headings), *others])


def with_interval(value: float, interval: float | None, decimals: int = 2) -> str:
    """A figure and, where there is one, half the width of its interval."""
    beside = "" if interval is None else f" ± {interval:.{decimals}f}"
    return f"{value:.{decimals}f}{beside}"


def confidence_interval(values: Sequence[float], confidence: float) -> float | None:
    """Half the width of the mean's confidence interval; None for a single value, or infinite ones.

    Args:
        values: one a seed.
        confidence: as 0.95.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    quantile = t_quantile(len(values) - 1, confidence)
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def t_quantile(freedom: int, confidence: float) -> float:
    """What the absolute value of Student's t stays below with probability `confidence`."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(freedom, middle) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _t_within(freedom: int, angle: float) -> float:
    """P(|t| < sqrt(freedom) tan(angle)), by the finite series for whole degrees of freedom.

    Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def duration(seconds: float) -> str:
    """A time as a person would say it."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
