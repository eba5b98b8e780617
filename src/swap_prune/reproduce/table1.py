"""The paper's Table 1 run anew: `swap-prune reproduce table1`.

A cell is a network, a method (the name of a shipped recipe), a sparsity, the fraction of the
calibration samples with noise, and a seed:

    OUT/cells/<network>/<method>/<sparsity>[-noisy-<fraction>]/seed-<n>
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from swap_prune import recipe as recipes
from swap_prune.errors import InputError
from swap_prune.recipe import Recipe
from swap_prune.reproduce import common
from swap_prune.reproduce.common import MISSING, Table, with_interval

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
# Those that have published figures with noisy data.
NOISY_COLUMNS = ("LR", "EWR")
# The paper's noise on the data: the standard deviation of the gradients becomes (1 + level) times
# itself.
NOISE = {"kind": "input", "level": 1.0}
RECIPES = common.RECIPES / "table1"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Figure:
    """A published figure.

    Attributes:
        network: the paper's name of it.
        sparsity: the fraction of zeros.
        noise_fraction: of the data with noise.
        method: "MP", "WF", "CBS", "LR" or "EWR".
        top1: in %.
        ci95: half the width of its 95% confidence interval, where published.
    """

    network: str
    sparsity: float
    noise_fraction: float
    method: str
    top1: float
    ci95: float | None


@dataclass(frozen=True)
class Cell(common.Cell):
    """One run of the table."""

    method: str
    sparsity: float
    noise_fraction: float = 0.0

    def __str__(self) -> str:
        row = _row(self.sparsity, self.noise_fraction)
        return f"{self.network}, {self.method}, sparsity {row}, seed {self.seed}"

    @property
    def folders(self) -> tuple[str, ...]:
        """Network, method, sparsity and noise, seed."""
        noisy = f"-noisy-{self.noise_fraction:g}" if self.noise_fraction else ""
        return self.network, self.method, f"{self.sparsity:g}{noisy}", f"seed-{self.seed}"

    @property
    def kind(self) -> tuple[str, ...]:
        """A cell takes as long as another of its network and method."""
        return self.network, self.method


class Table1(Table[Cell]):
    """Accuracy on clean data and, where the paper has it, on noisy data."""

    name = "table1"
    help = "accuracy by network, method and sparsity"
    cell = Cell
    default_out = "table1"
    options = ("networks", "sparsities", "methods", "noise_fractions", "seeds")

    def add_own_options(self, parser: argparse.ArgumentParser) -> None:
        """Networks, sparsities, methods, noise and seeds."""
        option = parser.add_argument
        option("--networks", nargs="+", help=f"of {', '.join(NETWORKS)} (mlpnet resnet20)")
        option("--sparsities", nargs="+", type=float, help="of the network's published ones (all)")
        option("--methods", nargs="+", help=f"of {', '.join(METHODS)} (all that the network has)")
        option(
            "--noise-fractions", nargs="+", type=float,
            help="of the calibration samples, 0.0 for none (where the paper has them: 0.2)",
        )  # fmt: skip
        option("--seeds", type=int, default=3, help="runs a cell, magnitude's aside (3)")

    def plan(self, options: argparse.Namespace) -> list[Cell]:
        """The cells to run."""
        return plan(
            options.networks,
            options.sparsities,
            options.methods,
            options.noise_fractions,
            options.seeds,
        )

    def recipe(self, cell: Cell) -> Recipe:
        """The shipped recipe with the cell's sparsity and noise."""
        shipped = read_recipe(cell.network, cell.method)
        settings = {**shipped.settings, "sparsity": cell.sparsity}
        if cell.noise_fraction:
            settings["noise"] = [{**NOISE, "fraction": cell.noise_fraction}]
        return replace(shipped, settings=settings)

    def order(self, cell: Cell) -> tuple[float, ...]:
        """As the table is read: sparsities down, methods across."""
        network, method = list(NETWORKS).index(cell.network), list(METHODS).index(cell.method)
        return network, cell.sparsity, cell.noise_fraction, method, cell.seed

    def measured(self, result: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the pruned network reaches, and what that took."""
        names = ("top1", "loss", "top1_dense", "seconds")
        figures = {name: None if result is None else result.get(name) for name in names}
        epochs = None if result is None else common.epochs_trained(result["configuration"])
        return {**figures, "epochs": epochs}

    def markdown(self, contents: Mapping[str, Any]) -> str:
        """The table with the published figures, one part for each network."""
        return markdown(contents)


TABLE = Table1()


def plan(
    networks: Sequence[str] | None,
    sparsities: Sequence[float] | None,
    methods: Sequence[str] | None,
    noise_fractions: Sequence[float] | None,
    seeds: int,
) -> list[Cell]:
    """The cells to run, a whole table of one seed before the next seed.

    A recipe with a single seed has no randomness and is run once.

    Args:
        networks: None for `DEFAULT_NETWORKS`.
        sparsities: None for all of each network.
        methods: None for all of each network.
        noise_fractions: None for all that the paper has at a network's sparsity.
        seeds: how many; they are counted from 0.

    Raises:
        InputError: the table has no such network, sparsity, method or fraction, or nothing of what
            was asked for together.
    """
    common.check_seeds(seeds)
    chosen = common.choose("network", networks, DEFAULT_NETWORKS, NETWORKS, "table 1")
    cells = []
    for network in chosen:
        its_sparsities, its_methods = sparsities_of(network), methods_of(network)
        rows = common.choose("sparsity", sparsities, its_sparsities, its_sparsities, network)
        columns = common.choose("method", methods, its_methods, its_methods, network)
        fractions = common.choose(
            "noise fraction", noise_fractions, NOISE_FRACTIONS, NOISE_FRACTIONS, "table 1"
        )
        in_paper = {(f.sparsity, f.noise_fraction) for f in published_of(network)}
        asked = noise_fractions is not None
        cells += [
            Cell(network, method, sparsity, fraction, seed=seed)
            for seed in range(seeds)
            for sparsity in rows
            for fraction in fractions
            if asked or fraction == 0 or (sparsity, fraction) in in_paper
            for method in columns
            if fraction == 0 or METHODS[method] in NOISY_COLUMNS
            if seed == 0 or len(read_recipe(network, method).seeds) > 1
        ]
    if not cells:
        raise InputError(
            f"methods {', '.join(methods or ())} have no figures with noisy data, give noise "
            f"fraction 0.0 or methods of the columns {' and '.join(NOISY_COLUMNS)}"
        )
    return cells


# --- what is shipped ----------------------------------------------------------------------------


def published() -> tuple[Figure, ...]:
    """The figures of the paper's Table 1, those with noisy data among them."""
    with resources.files("swap_prune").joinpath("published/table1.csv").open() as file:
        return tuple(
            Figure(
                row["network"],
                float(row["sparsity"]),
                0.0 if row["noisy_data"] == "none" else float(row["noisy_data"].rstrip("%")) / 100,
                row["method"],
                float(row["top1"]),
                float(row["ci95"]) if row["ci95"] else None,
            )
            for row in csv.DictReader(file)
        )


NOISE_FRACTIONS = tuple(sorted({figure.noise_fraction for figure in published()}))


def published_of(network: str) -> tuple[Figure, ...]:
    """The figures of one network; none where the paper has no such network."""
    return tuple(figure for figure in published() if figure.network == NETWORKS[network])


def sparsities_of(network: str) -> tuple[float, ...]:
    """The table's sparsities of a network."""
    if NETWORKS[network] is None:
        return UNPUBLISHED_SPARSITIES
    return tuple(sorted({figure.sparsity for figure in published_of(network)}))


def methods_of(network: str) -> tuple[str, ...]:
    """The methods that have a recipe for a network."""
    return tuple(name for name in METHODS if _recipe_path(network, name).is_file())


def read_recipe(network: str, method: str) -> Recipe:
    """A shipped recipe: with a sparsity and seeds to be replaced, and without weights."""
    return recipes.read(_recipe_path(network, method))


def _recipe_path(network: str, method: str) -> Path:
    return RECIPES / network / f"{method}.yaml"


# --- the table for people ----------------------------------------------------------------------


def markdown(contents: Mapping[str, Any]) -> str:
    """The table with the published figures, one part for each network."""
    records = contents["cells"]
    parts = [
        "# Table 1\n\n"
        "Top-1 in % on the test images: mean over seeds ± 95% confidence interval (Student's t), "
        "[number of seeds], (published). **Bold**: at least the published figure. "
        f"{MISSING}: not run.\n"
        "Nothing is trained unless the column's heading says for how long; the published LR and "
        "EWR are with an epoch of training after every stage, MP, WF and CBS without training.\n"
        "Noisy: so much of the calibration samples has noise that makes the standard deviation of "
        "the gradients twice what it was."
    ]
    for network in dict.fromkeys(record["network"] for record in records):
        parts.append(_network_table(network, [r for r in records if r["network"] == network]))
    parts.append(common.how_it_was_made(contents))
    return "\n\n".join(parts)


def _network_table(network: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Sparsities down, methods across."""
    figures = {
        (figure.sparsity, figure.noise_fraction, figure.method): figure
        for figure in published_of(network)
    }
    used = {record["method"] for record in records}
    methods = [method for method in METHODS if method in used]
    dense = next((r["top1_dense"] for r in records if r["top1_dense"] is not None), None)
    shown = "" if dense is None else f", dense top-1 {dense:.2f}"
    headings = ["sparsity", *(_heading(network, method, records) for method in methods)]
    lines = []
    for row in sorted({(record["sparsity"], record["noise_fraction"]) for record in records}):
        those = [r for r in records if (r["sparsity"], r["noise_fraction"]) == row]
        scores = {m: [r["top1"] for r in those if r["method"] == m] for m in methods}
        entries = [_entry(scores[m], figures.get((*row, METHODS[m]))) for m in methods]
        lines.append([_row(*row), *entries])
    return f"## {network}{shown}\n\n{common.rows(headings, lines)}"


def _row(sparsity: float, noise_fraction: float) -> str:
    """What a row is called."""
    return f"{sparsity:g}" + (f", {noise_fraction:.0%} noisy" if noise_fraction else "")


def _heading(network: str, method: str, records: Sequence[Mapping[str, Any]]) -> str:
    """The method, how long it trained, or would, and the published column beside it."""
    # Of the cells, which may be of an earlier recipe.
    trained_for = {r["epochs"] for r in records if r["method"] == method} - {None}
    epochs = trained_for or {common.epochs_trained(read_recipe(network, method).settings)}
    trained = f", {' or '.join(map(str, sorted(epochs)))} epochs" if any(epochs) else ""
    return f"{method}{trained}" + (f" ({METHODS[method]})" if NETWORKS[network] else "")


def _entry(scores: Sequence[float | None], figure: Figure | None) -> str:
    """Our mean, its interval and seeds, then the published figure.

    Args:
        scores: one a seed; None where the seed is not finished.
        figure: None where nothing was published.
    """
    finished = [score for score in scores if score is not None]
    beside = "" if figure is None else f" ({with_interval(figure.top1, figure.ci95)})"
    if not finished:
        return f"{MISSING}{beside}"
    mean, interval = statistics.mean(finished), common.confidence_interval(finished, CONFIDENCE)
    ours = with_interval(mean, interval)
    # As shown: a mean a thousandth below the published figure's two decimals equals it.
    if figure is not None and round(mean, 2) >= figure.top1:
        ours = f"**{ours}**"
    seeds = str(len(finished))
    if len(finished) < len(scores):
        seeds += f" of {len(scores)}"
    return f"{ours} [{seeds}]{beside}"
