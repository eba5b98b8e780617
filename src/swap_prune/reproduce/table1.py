"""The paper's Table 1 run anew: `swap-prune reproduce table1`.

A cell is a network, a method (the name of a shipped recipe), a sparsity and a seed:

    OUT/cells/<network>/<method>/<sparsity>/seed-<n>
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
RECIPES = common.RECIPES / "table1"
CONFIDENCE = 0.95


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
class Cell(common.Cell):
    """One run of the table."""

    method: str
    sparsity: float

    def __str__(self) -> str:
        return f"{self.network}, {self.method}, sparsity {self.sparsity:g}, seed {self.seed}"

    @property
    def folders(self) -> tuple[str, ...]:
        """Network, method, sparsity, seed."""
        return self.network, self.method, f"{self.sparsity:g}", f"seed-{self.seed}"

    @property
    def kind(self) -> tuple[str, ...]:
        """A cell takes as long as another of its network and method."""
        return self.network, self.method


class Table1(Table[Cell]):
    """Accuracy on clean data."""

    name = "table1"
    help = "accuracy by network, method and sparsity"
    cell = Cell
    default_out = "table1"
    options = ("networks", "sparsities", "methods", "seeds")

    def add_own_options(self, parser: argparse.ArgumentParser) -> None:
        """Networks, sparsities, methods and seeds."""
        option = parser.add_argument
        option("--networks", nargs="+", help=f"of {', '.join(NETWORKS)} (mlpnet resnet20)")
        option("--sparsities", nargs="+", type=float, help="of the network's published ones (all)")
        option("--methods", nargs="+", help=f"of {', '.join(METHODS)} (all that the network has)")
        option("--seeds", type=int, default=3, help="runs a cell, magnitude's aside (3)")

    def plan(self, options: argparse.Namespace) -> list[Cell]:
        """The cells to run."""
        return plan(options.networks, options.sparsities, options.methods, options.seeds)

    def recipe(self, cell: Cell) -> Recipe:
        """The shipped recipe with the cell's sparsity."""
        shipped = read_recipe(cell.network, cell.method)
        return replace(shipped, settings={**shipped.settings, "sparsity": cell.sparsity})

    def order(self, cell: Cell) -> tuple[int, float, int, int]:
        """As the table is read: sparsities down, methods across."""
        networks, methods = list(NETWORKS), list(METHODS)
        return networks.index(cell.network), cell.sparsity, methods.index(cell.method), cell.seed

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
    common.check_seeds(seeds)
    chosen = common.choose("network", networks, DEFAULT_NETWORKS, NETWORKS, "table 1")
    cells = []
    for network in chosen:
        its_sparsities, its_methods = sparsities_of(network), methods_of(network)
        rows = common.choose("sparsity", sparsities, its_sparsities, its_sparsities, network)
        columns = common.choose("method", methods, its_methods, its_methods, network)
        cells += [
            Cell(network, method, sparsity, seed=seed)
            for seed in range(seeds)
            for sparsity in rows
            for method in columns
            if seed == 0 or len(read_recipe(network, method).seeds) > 1
        ]
    return cells


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
        "EWR are with an epoch of training after every stage, MP, WF and CBS without training."
    ]
    for network in dict.fromkeys(record["network"] for record in records):
        parts.append(_network_table(network, [r for r in records if r["network"] == network]))
    parts.append(common.how_it_was_made(contents))
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
    lines = []
    for sparsity in sorted({record["sparsity"] for record in records}):
        scores = {
            m: [r["top1"] for r in records if (r["method"], r["sparsity"]) == (m, sparsity)]
            for m in methods
        }
        entries = [_entry(scores[m], figures.get((sparsity, METHODS[m]))) for m in methods]
        lines.append([f"{sparsity:g}", *entries])
    return f"## {network}{shown}\n\n{common.rows(headings, lines)}"


def _heading(network: str, method: str) -> str:
    """The method, how long it trains, and the published column beside it."""
    epochs = common.epochs_trained(read_recipe(network, method).settings)
    trained = f", {epochs} epochs" if epochs else ""
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
