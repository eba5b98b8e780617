"""The paper's tables of noisy gradients run anew: `swap-prune reproduce table2`, and 3, 5, 6, 7.

A cell is a network, a protocol (the name of a shipped recipe), a noise, a method and a seed. It is
measured after every stage's cut, before any training, and so serves every sparsity of loss and
accuracy alike: the tables share their cells.

    OUT/cells/<network>/<protocol>/<noise>/<method>/seed-<n>

Methods are compared in pairs: of one seed, they have the same samples and the same noise.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from typing import Any

from swap_prune import noise as noises
from swap_prune import recipe as recipes
from swap_prune.errors import InputError
from swap_prune.recipe import Recipe
from swap_prune.reproduce import common
from swap_prune.reproduce.common import MISSING, Table, check_seeds, choose, with_interval
from swap_prune.settings import METHODS

NETWORKS = ("resnet20", "mlpnet", "efficientnet-lite0")
PROTOCOLS = {
    "untrained": "nothing is trained",
    "authors": "an epoch of training after every stage, figures from before it",
}
RECIPES = common.RECIPES / "noise"
CONFIDENCE = 0.9
# Methods by name: those of `prune`, and LR with one of the parts of EWR, to see what it is worth.
NAMED: dict[str, dict[str, Any]] = {
    **{name: {"method": name} for name in ("lr", "ewr")},
    "lr-memory": {"method": "lr", "memory": "auto"},
    "lr-discount": {"method": "lr", "discount": 0.5},
    "lr-contamination": {"method": "lr", "contamination": "auto"},
    "lr-audit": {"method": "lr", "audit": True},
    "lr-screen": {"method": "lr", "screen": True},
    "lr-reconstruction": {"method": "lr", "reconstruction": True},
    **{name: {"method": name} for name in METHODS if name not in ("lr", "ewr")},
}
# A variant of EWR is one of these and its epsilon, as in "gaussian-10": a fixed transport plan
# without LR in the mixture, masses or memory, as the paper has it.
VARIANTS: dict[str, dict[str, Any]] = {
    "sinkhorn": {"coupling": "sinkhorn", "relative": False},
    "relative": {"coupling": "sinkhorn", "relative": True},
    "gaussian": {"coupling": "gaussian", "relative": False},
    "gaussian-printed": {"coupling": "gaussian-printed", "relative": False},
}
METHODS_ACCEPTED = (
    f"{', '.join(NAMED)}, or one of {', '.join(VARIANTS)} with an epsilon as in sinkhorn-10"
)
# The closed form has no part in the limits 0 and infinity, where the plan is known.
ABLATION = (
    *("lr", "ewr", "sinkhorn-0", "sinkhorn-1", "sinkhorn-2", "sinkhorn-10", "sinkhorn-100"),
    *("sinkhorn-inf", "relative-0.01", "relative-0.1", "relative-1"),
    *("gaussian-1", "gaussian-10", "gaussian-100"),
    *("gaussian-printed-1", "gaussian-printed-10", "gaussian-printed-100"),
)
LEVELS = {"sigma": 1.0, "2sigma": 2.0}


@dataclass(frozen=True)
class Noise:
    """The noise of a cell; a fraction or a level is None where its kind takes none.

    Attributes:
        noise: a kind of `swap_prune.noise`, or "none".
        fraction: of the samples, rows or entries.
        level: how strong.
    """

    noise: str
    fraction: float | None = None
    level: float | None = None

    def __str__(self) -> str:
        if self == CLEAN:
            return "clean"
        part = "" if self.fraction is None else f" {self.fraction:.4g} of the data"
        level = "" if self.level is None else f" level {self.level:g}"
        return f"{self.noise} noise,{','.join(filter(None, (part, level)))}"

    @property
    def folder(self) -> str:
        """As "input-0.25-2"."""
        numbers = (f"{v:g}" for v in (self.fraction, self.level) if v is not None)
        return "clean" if self == CLEAN else "-".join((self.noise, *numbers))

    @property
    def setting(self) -> list[dict[str, Any]] | None:
        """As a recipe has it."""
        if self == CLEAN:
            return None
        given = {"kind": self.noise, "fraction": self.fraction, "level": self.level}
        return [{name: value for name, value in given.items() if value is not None}]


CLEAN = Noise("none")


@dataclass(frozen=True)
class Cell(common.Cell):
    """One run, which gives a figure for every stage."""

    protocol: str
    noise: str
    fraction: float | None
    level: float | None
    method: str

    def __str__(self) -> str:
        what = f"{self.network}, {self.protocol}, {self.its_noise}"
        return f"{what}, {self.method}, seed {self.seed}"

    @property
    def its_noise(self) -> Noise:
        """The noise as one."""
        return Noise(self.noise, self.fraction, self.level)

    @property
    def folders(self) -> tuple[str, ...]:
        """Network, protocol, noise, method, seed."""
        noise = self.its_noise.folder
        return self.network, self.protocol, noise, self.method, f"seed-{self.seed}"

    @property
    def kind(self) -> tuple[str, ...]:
        """Training takes most of the time, then the method's solve."""
        return self.network, self.protocol, self.method


@dataclass(frozen=True)
class Published:
    """A published figure, and half the width of its 90% confidence interval where there is one."""

    value: float
    ci90: float | None


# By fraction, level, method as we name it, and sparsity to two decimals.
Figures = dict[tuple[float, float, str, float], Published]


# --- methods and noises -------------------------------------------------------------------------


def settings_of(method: str) -> dict[str, Any]:
    """The settings that a method's name stands for.

    Raises:
        InputError: there is no such method.
    """
    if method in NAMED:
        return NAMED[method]
    name, _, number = method.rpartition("-")
    try:
        epsilon = float(number)
    except ValueError:
        epsilon = math.nan
    if name not in VARIANTS or not epsilon >= 0:
        raise InputError(f"method {method!r} is unknown; accepted are {METHODS_ACCEPTED}")
    plain = {
        "memory": 0, "contamination": 0.0, "audit": False, "screen": False, "reconstruction": False,
    }  # fmt: skip
    return {"method": "ewr", **VARIANTS[name], "epsilon": epsilon, "mixture": 1.0, **plain}


def _method_order(method: str) -> tuple[int, float]:
    if method in NAMED:
        return list(NAMED).index(method), 0.0
    settings_of(method)
    name, _, number = method.rpartition("-")
    return len(NAMED) + list(VARIANTS).index(name), float(number)


def plan_noises(
    kind: str,
    fractions: Sequence[float] | None,
    levels: Sequence[float] | None,
    default_fractions: Sequence[float],
    default_levels: Sequence[float],
) -> list[Noise]:
    """Every fraction at every level; nothing noisy is the clean run, which comes once.

    Raises:
        InputError: the kind is unknown, does not take what is given, or not such a value.
    """
    if kind not in noises.NOISES:
        accepted = ", ".join(noises.NOISES)
        raise InputError(f"--noise-kind {kind!r} is unknown; accepted are {accepted}")
    taken = {field.name for field in fields(noises.NOISES[kind])}
    parts: list[Sequence[float | None]] = []
    for name, given, default in (
        ("fraction", fractions, default_fractions),
        ("level", levels, default_levels),
    ):
        if name in taken:
            parts.append(default if given is None else given)
        elif given is None or (name == "fraction" and not any(given)):
            parts.append([None] if given is None else [0.0])
        else:
            shown = " ".join(f"{value:g}" for value in given)
            raise InputError(
                f"--noise-{name}s {shown} has no part in --noise-kind {kind}, which takes no "
                f"{name}; leave it out"
            )
    planned = []
    for fraction in parts[0]:
        for level in parts[1]:
            if fraction == 0:
                planned.append(CLEAN)
            else:
                noises.build(kind, fraction, level)  # raises for a value that can't be used
                planned.append(Noise(kind, fraction, level))
    return list(dict.fromkeys(planned))


# --- the tables ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """What a table shows.

    Attributes:
        name: in a stage's record.
        title: in a sentence.
        decimals: of a figure.
        better: 1 if more is better, -1 if less is.
    """

    name: str
    title: str
    decimals: int
    better: int


LOSS = Metric("loss", "Loss", 4, -1)
TOP1 = Metric("top1", "Top-1 in %", 2, 1)


class NoiseTable(Table[Cell]):
    """LR against EWR, or against variants of it, on noisy gradients."""

    cell = Cell
    default_out = "noise-tables"
    options = (
        *("networks", "protocols", "methods", "noise_kind", "noise_fractions", "noise_levels"),
        "seeds",
    )
    networks: tuple[str, ...] = ("resnet20", "mlpnet")
    methods: tuple[str, ...] = ("lr", "ewr")
    fractions: tuple[float, ...] = (0.1, 0.25)
    levels: tuple[float, ...] = (1.0, 2.0)
    # The published network, and the one of ours that its figures stand beside.
    published_network, stands_beside = "ResNet20", "resnet20"
    # Those of the published tables; the JSON file has all.
    sparsities: tuple[float, ...] = (0.63, 0.74, 0.84, 0.95)

    def __init__(self, number: int, metric: Metric) -> None:
        self.number, self.metric = number, metric
        self.name = f"table{number}"
        what = {"loss": "loss", "top1": "accuracy"}[metric.name]
        self.help = f"{what} on noisy gradients, {self.published_network}'s"

    def add_own_options(self, parser: argparse.ArgumentParser) -> None:
        """What the table has down, across, and how often."""
        option = parser.add_argument
        option("--networks", nargs="+", help=f"of {', '.join(self.networks)} ({self.networks[0]})")
        option("--protocols", nargs="+", help=f"of {', '.join(PROTOCOLS)} (untrained)")
        option("--methods", nargs="+", help=f"{METHODS_ACCEPTED} ({' '.join(self.methods)})")
        option("--noise-kind", default="input", help=f"of {', '.join(noises.NOISES)} (input)")
        shown = " ".join(map(str, self.fractions))
        option("--noise-fractions", nargs="+", type=float, help=f"0 for the clean run ({shown})")
        shown = " ".join(f"{level:g}" for level in self.levels)
        option("--noise-levels", nargs="+", type=float, help=f"as the kind has them ({shown})")
        option("--seeds", type=int, default=5, help="runs a cell (5)")

    def plan(self, options: argparse.Namespace) -> list[Cell]:
        """The cells to run, those of one seed before the next, methods next to each other."""
        check_seeds(options.seeds)
        methods = list(dict.fromkeys(options.methods or self.methods))
        for method in methods:
            settings_of(method)
        planned = plan_noises(
            options.noise_kind,
            options.noise_fractions,
            options.noise_levels,
            self.fractions,
            self.levels,
        )
        networks = choose(
            "network", options.networks, self.networks[:1], self.networks, f"table {self.number}"
        )
        protocols = {
            network: choose(
                "protocol", options.protocols, ["untrained"], protocols_of(network), network
            )
            for network in networks
        }
        return [
            Cell(network, protocol, noise.noise, noise.fraction, noise.level, method, seed=seed)
            for seed in range(options.seeds)
            for network in networks
            for protocol in protocols[network]
            for noise in planned
            for method in methods
        ]

    def recipe(self, cell: Cell) -> Recipe:
        """The protocol's shipped recipe with the cell's method and noise."""
        shipped = read_recipe(cell.network, cell.protocol)
        noise = cell.its_noise.setting
        own = settings_of(cell.method) | ({} if noise is None else {"noise": noise})
        return replace(shipped, settings={**shipped.settings, **own})

    def order(self, cell: Cell) -> tuple[Any, ...]:
        """As the tables are read."""
        return (*_group_order(asdict(cell)), _method_order(cell.method), cell.seed)

    def measured(self, result: Mapping[str, Any] | None) -> dict[str, Any]:
        """Every stage right after its cut, the dense network, and what the run took."""
        if result is None:
            names = ("top1_dense", "loss_dense", "seconds", "epochs", "noise_reached", "stages")
            return dict.fromkeys(names)
        configuration, history = result["configuration"], result["history"]
        return {
            **{name: result[name] for name in ("top1_dense", "loss_dense", "seconds")},
            "epochs": common.epochs_trained(configuration),
            "noise_reached": history[0].get("noise"),
            "stages": [
                {
                    "sparsity": sparsity,
                    # A loss that is not finite is a word in JSON.
                    **{name: _number(line[f"test_{name}"]) for name in ("loss", "top1", "top5")},
                    "mixture": line.get("mixture"),
                }
                for sparsity, line in zip(configuration["schedule"], history, strict=True)
            ],
        }

    def summary(self, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The rows of the table, every stage one."""
        return {"confidence": CONFIDENCE, "rows": compare(records, self)}

    def published(self) -> Figures:
        """The figures of the paper's table."""
        return {
            (
                float(row["noisy_data"].rstrip("%")) / 100,
                LEVELS[row["noise_level"]],
                row["method"].lower(),
                float(row["sparsity"]),
            ): Published(float(row[self.metric.name]), float(row["ci90"]))
            for row in read_published(self.name)
        }

    def more_files(self, contents: Mapping[str, Any]) -> dict[str, str]:
        """What the paper's figure of loss differences is drawn from."""
        if self.metric != LOSS:
            return {}
        return {f"{self.name}_figure.csv": figure(contents["rows"])}

    def markdown(self, contents: Mapping[str, Any]) -> str:
        """A part for each network, protocol and noise: sparsities down, methods across."""
        favour = "higher" if self.metric.better > 0 else "lower"
        parts = [
            f"# Table {self.number}\n\n"
            f"{self.metric.title} on the test images right after a stage's cut, before any "
            "training: mean over seeds ± 90% confidence interval (Student's t), [number of seeds]. "
            "Differences are paired: same seed, samples and noise; in % of LR's. **Bold**: the "
            f"interval of the difference excludes zero, and the method is the {favour} one. "
            f"{MISSING}: not run.\n"
            "The authors' code, from which the published figures are, trains an epoch after every "
            "stage: compare them with protocol authors.",
            *(self._group(rows) for rows in _groups(contents["rows"])),
            *_transport_used(contents["cells"]),
            common.how_it_was_made(contents),
        ]
        return "\n\n".join(parts)

    def _group(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """One part, as a heading and a table."""
        methods = list(rows[0]["methods"])
        compared = [m for m in methods if "difference" in rows[0]["methods"][m]]
        beside = [m for m in methods if any("published" in row["methods"][m] for row in rows)]
        headings = [
            "sparsity",
            *methods,
            *(f"{method} - lr" for method in compared),
            *(f"{self.published_network} {method.upper()}, published" for method in beside),
        ]
        lines = []
        for row in self._shown(rows):
            entries = row["methods"]
            lines.append(
                [
                    f"{row['sparsity']:.2f}",
                    *(self._mean(entries[method]) for method in methods),
                    *(self._difference(entries[method]["difference"]) for method in compared),
                    *(_published(entries[method].get("published")) for method in beside),
                ]
            )
        return f"{_heading(rows[0])}\n\n{common.rows(headings, lines)}"

    def _shown(self, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The rows of the published sparsities; all if there are none of these."""
        shown = [row for row in rows if round(row["sparsity"], 2) in self.sparsities]
        return shown or list(rows)

    def _mean(self, entry: Mapping[str, Any]) -> str:
        if not entry["seeds"]:
            return MISSING
        shown = with_interval(entry["mean"], entry["ci90"], self.metric.decimals)
        asked, done = entry["seeds_asked"], entry["seeds"]
        return f"{shown} [{done}]" if done == asked else f"{shown} [{done} of {asked}]"

    def _difference(self, entry: Mapping[str, Any]) -> str:
        if not entry["seeds"]:
            return MISSING
        shown = with_interval(entry["mean"], entry["ci90"], self.metric.decimals)
        if entry["percent"] is not None:
            shown += f" ({with_interval(entry['percent'], entry['percent_ci90'], 1)}%)"
        return f"**{shown}**" if entry["better"] else shown


class MobileNetTable(NoiseTable):
    """The tables of MobileNetV1, whose place EfficientNet-Lite0 takes: its weights can be had."""

    networks = ("efficientnet-lite0",)
    published_network, stands_beside = "MobileNetV1", "efficientnet-lite0"
    sparsities = (0.42, 0.53, 0.63, 0.75)


class AblationTable(NoiseTable):
    """Epsilon, and Sinkhorn's algorithm against the closed form as printed and corrected."""

    methods = ABLATION
    fractions, levels = (0.25,), (2.0,)
    sparsities = (0.11, 0.21, 0.32, 0.42, 0.53, 0.63, 0.74, 0.84, 0.95)

    def __init__(self, number: int, metric: Metric) -> None:
        super().__init__(number, metric)
        self.help = "loss on noisy gradients by epsilon, and Sinkhorn against the closed form"

    def published(self) -> Figures:
        """The figures of the paper's table, which are of the noise 25%, 2σ."""
        return {
            (0.25, 2.0, column.lower().replace("eps_", "sinkhorn-"), float(row["sparsity"])): (
                Published(float(value), None)
            )
            for row in read_published(self.name)
            for column, value in row.items()
            if column != "sparsity"
        }

    def more_files(self, contents: Mapping[str, Any]) -> dict[str, str]:
        """Nothing: the paper draws no figure of it."""
        return {}

    def _group(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Epsilons across; then, at the last sparsities, the ways to couple across."""
        methods = rows[0]["methods"]
        columns = [m for m in methods if not m.startswith("gaussian")]
        lines = [
            [f"{row['sparsity']:.2f}", *(self._entry(row["methods"][m]) for m in columns)]
            for row in self._shown(rows)
        ]
        parts = [_heading(rows[0]), common.rows(["sparsity", *columns], lines)]
        couplings = [name for name in VARIANTS if name != "relative"]
        # By the words of the names, which may write a number in more than one way.
        closed = [m.rpartition("-")[2] for m in methods if m.startswith("gaussian")]
        if closed:
            lines = [
                [
                    f"{row['sparsity']:.2f}",
                    epsilon,
                    *(self._entry(row["methods"].get(f"{c}-{epsilon}")) for c in couplings),
                ]
                for row in self._shown(rows)[-2:]
                for epsilon in dict.fromkeys(closed)
            ]
            parts.append("Sinkhorn against the closed form, corrected and as printed:")
            parts.append(common.rows(["sparsity", "epsilon", *couplings], lines))
        return "\n\n".join(parts)

    def _entry(self, entry: Mapping[str, Any] | None) -> str:
        """The mean, bold where it is below LR's, and the published figure."""
        if entry is None:
            return MISSING
        shown = self._mean(entry)
        if entry.get("difference", {}).get("better"):
            shown = f"**{shown}**"
        return f"{shown} ({entry['published']['value']:.2f})" if "published" in entry else shown


TABLES: tuple[NoiseTable, ...] = (
    NoiseTable(2, LOSS),
    MobileNetTable(3, LOSS),
    AblationTable(5, LOSS),
    NoiseTable(6, TOP1),
    MobileNetTable(7, TOP1),
)


# --- what is shipped ----------------------------------------------------------------------------


def protocols_of(network: str) -> tuple[str, ...]:
    """The protocols that have a recipe for a network."""
    return tuple(name for name in PROTOCOLS if (RECIPES / network / f"{name}.yaml").is_file())


def read_recipe(network: str, protocol: str) -> Recipe:
    """A shipped recipe: without weights, noise and method."""
    return recipes.read(RECIPES / network / f"{protocol}.yaml")


def read_published(table: str) -> list[dict[str, str]]:
    """The rows of a published table."""
    with resources.files("swap_prune").joinpath(f"published/{table}.csv").open() as file:
        return list(csv.DictReader(file))


# --- comparing ----------------------------------------------------------------------------------


GROUP = ("network", "protocol", "noise", "fraction", "level")


def compare(records: Sequence[Mapping[str, Any]], table: NoiseTable) -> list[dict[str, Any]]:
    """A row for each network, protocol, noise and stage, with every method's figures.

    Args:
        records: the cells, in their order.
        table: knows what is compared, and what is published.
    """
    published = table.published()
    rows = []
    for cells in _groups(records):
        group = {name: cells[0][name] for name in GROUP}
        # Published figures are of input noise.
        beside = group["network"] == table.stands_beside and group["noise"] == "input"
        for sparsity in read_recipe(group["network"], group["protocol"]).settings["schedule"]:
            scores: dict[str, dict[int, float | None]] = {}
            for cell in cells:
                value = _score(cell, sparsity, table.metric)
                scores.setdefault(cell["method"], {})[cell["seed"]] = value
            methods = {}
            for method, by_seed in scores.items():
                methods[method] = _entry(by_seed)
                if method != "lr" and "lr" in scores:
                    difference = paired_difference(by_seed, scores["lr"], table.metric.better)
                    methods[method]["difference"] = difference
                key = (group["fraction"], group["level"], method, round(sparsity, 2))
                if beside and key in published:
                    methods[method]["published"] = asdict(published[key])
            rows.append({**group, "sparsity": sparsity, "methods": methods})
    return rows


def _score(cell: Mapping[str, Any], sparsity: float, metric: Metric) -> float | None:
    """A cell's figure right after the cut to a sparsity; None while it is not finished."""
    stages = cell["stages"] or ()
    return next((stage[metric.name] for stage in stages if stage["sparsity"] == sparsity), None)


def _entry(by_seed: Mapping[int, float | None]) -> dict[str, Any]:
    """Mean and interval of one method."""
    values = [value for value in by_seed.values() if value is not None]
    return {
        "mean": statistics.mean(values) if values else None,
        "ci90": common.confidence_interval(values, CONFIDENCE),
        "seeds": len(values),
        "seeds_asked": len(by_seed),
    }


def paired_difference(
    ours: Mapping[int, float | None], theirs: Mapping[int, float | None], better: int
) -> dict[str, Any]:
    """The mean of ours - theirs over the seeds that both have, absolute and in % of theirs.

    Args:
        ours: the figure of each seed; None where it is not finished.
        theirs: likewise.
        better: 1 if more is better, -1 if less is.
    """
    pairs = [
        (value, other)
        for seed, value in ours.items()
        if value is not None and (other := theirs.get(seed)) is not None
    ]
    differences = [a - b for a, b in pairs]
    mean = statistics.mean(differences) if pairs else None
    interval = common.confidence_interval(differences, CONFIDENCE)
    base = statistics.mean(b for _, b in pairs) if pairs else 0.0

    def percent(value: float | None) -> float | None:
        return None if value is None or base == 0 else 100 * value / base

    return {
        "mean": mean,
        "ci90": interval,
        "percent": percent(mean),
        "percent_ci90": percent(interval),
        "seeds": len(pairs),
        "better": mean is not None and interval is not None and better * mean > interval,
    }


def _groups(records: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Those of one network, protocol and noise together."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in GROUP), []).append(record)
    return list(groups.values())


def _group_order(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The clean runs of a network before the noisy ones."""
    kinds = ("none", *noises.NOISES)
    return (
        NETWORKS.index(record["network"]),
        list(PROTOCOLS).index(record["protocol"]),
        kinds.index(record["noise"]),
        -1.0 if record["fraction"] is None else record["fraction"],
        -1.0 if record["level"] is None else record["level"],
    )


def _number(value: float | str | None) -> float | None:
    return None if value is None else float(value)


# --- writing ------------------------------------------------------------------------------------


def _transport_used(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """How often EWR, whose default leaves it to held-out samples, took transport into its plan."""
    mixtures: dict[str, list[float]] = {}
    for record in records:
        if record["method"] == "ewr":
            # No stage without a cut has one, nor had any before they were recorded.
            chosen = [stage.get("mixture") for stage in record["stages"] or ()]
            mixtures.setdefault(record["network"], []).extend(m for m in chosen if m is not None)
    used = [
        f"{sum(m > 0 for m in chosen)} of {len(chosen)} on {network}"
        for network, chosen in mixtures.items()
        if chosen
    ]
    heading = "## How often transport was used"
    return [f"{heading}\n\nBy EWR, of its stages that cut: in {', '.join(used)}."] if used else []


def figure(rows: Iterable[Mapping[str, Any]]) -> str:
    """What LR loses against EWR at every stage, as a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*GROUP, "sparsity", "lr_minus_ewr", "ci90", "seeds"])
    for row in rows:
        difference = row["methods"].get("ewr", {}).get("difference")
        if difference and difference["seeds"]:
            place = [row[name] for name in (*GROUP, "sparsity")]
            # 0 - d: no difference is 0, not -0.
            figures = [0 - difference["mean"], difference["ci90"], difference["seeds"]]
            writer.writerow([*place, *figures])
    return text.getvalue()


def _heading(row: Mapping[str, Any]) -> str:
    noise = Noise(row["noise"], row["fraction"], row["level"])
    protocol = row["protocol"]
    return f"## {row['network']}, {noise}\n\nProtocol {protocol}: {PROTOCOLS[protocol]}."


def _published(figure: Mapping[str, Any] | None) -> str:
    return MISSING if figure is None else with_interval(figure["value"], figure["ci90"])
