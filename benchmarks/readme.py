"""Fill the tables of the README and of docs/ from the files of results, and draw the picture.

    python -m benchmarks.readme

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A test asks that the files are
what this makes of them, so that no figure in their tables is typed by hand.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import robustness
from benchmarks.small_networks import CALIBRATED_WITH, FEW, FEW_METHODS
from swap_prune.reproduce import common, table1

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILLED = (ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "docs" / "noise.md")
PICTURE = ROOT / "docs" / "accuracy.png"
# By their names in the recipes, and as people know them.
UNTRAINED = {"magnitude": "magnitude", "wf": "WoodFisher", "cbs": "CBS", "lr": "LR", "ewr": "EWR"}
NETWORKS = {"mlpnet": "MLPNet", "resnet20": "ResNet20"}
# From Benbaki et al. 2023: their staged method without training, which table 1 hasn't.
CHITA_PLUS_PLUS = {
    "mlpnet": {0.9: 95.55, 0.95: 94.70, 0.98: 90.73},
    "resnet20": {0.7: 90.38, 0.8: 88.72, 0.9: 79.32},
}
# The stages of table 2's schedule that have figures in docs/noise.md.
NOISY_SPARSITIES = (0.6333333333333333, 0.7388888888888889, 0.8444444444444444, 0.95)
MISSING = "–"


def main() -> None:
    """Write the files and the picture anew."""
    for path in FILLED:
        path.write_text(filled(path.read_text()))
    draw(PICTURE)


def filled(text: str) -> str:
    """The text with every table made anew."""
    return re.sub(
        r"(<!-- table: ([\w-]+) -->\n).*?(?=<!-- end -->)",
        lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n",
        text,
        flags=re.DOTALL,
    )


def untrained() -> str:
    """Both networks without training, what EWR adds to LR, and what was published of CHITA++."""
    headings = ["", "sparsity", *UNTRAINED.values(), "EWR - LR", "CHITA++, published"]
    lines = []
    for network, name in NETWORKS.items():
        for sparsity in table1.sparsities_of(network):
            published = CHITA_PLUS_PLUS[network].get(sparsity)
            lines.append(
                [
                    name,
                    f"{sparsity:g}",
                    *(_scores(network, method, sparsity) for method in UNTRAINED),
                    _difference(network, sparsity),
                    MISSING if published is None else f"{published:.2f}",
                ]
            )
    return common.rows(headings, lines)


def draw(path: Path) -> None:
    """Top-1 against sparsity without training, a panel for each network."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, (network, name) in zip(axes, NETWORKS.items(), strict=True):
        sparsities = table1.sparsities_of(network)
        dense = next(c["top1_dense"] for c in _cells("table1.json") if c["network"] == network)
        axis.axhline(dense, color="0.6", linestyle=":", label="dense")
        for method, marker in zip(UNTRAINED, "ov^sD", strict=True):
            found = {s: _of_seeds(network, method, s) for s in sparsities}
            points = {s: statistics.mean(scores.values()) for s, scores in found.items() if scores}
            left = [1 - s for s in points]
            axis.plot(left, points.values(), marker=marker, label=UNTRAINED[method])
        published = CHITA_PLUS_PLUS[network]
        left = [1 - s for s in published]
        axis.plot(left, published.values(), "kx", label="CHITA++, published", zorder=3)
        axis.set(title=name, xlabel="weights that are zero, %", xscale="log")
        axis.invert_xaxis()
        axis.set_xticks([1 - s for s in sparsities], [f"{s:.0%}"[:-1] for s in sparsities])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("top-1 on test images, %")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def trained() -> str:
    """Both networks with training, beside the paper's EWR."""
    methods = {
        "lr-authors": "LR, authors' training",
        "ewr-authors": "EWR, authors' training",
        "lr-trained": "LR, our training",
        "ewr-trained": "EWR, our training",
    }
    headings = ["", "sparsity", "the paper's EWR", *methods.values()]
    lines = []
    for network, name in NETWORKS.items():
        for figure in table1.published_of(network):
            if figure.method == "EWR" and not figure.noise_fraction:
                ours = [
                    _scores(network, method, figure.sparsity, epochs=True) for method in methods
                ]
                if set(ours) != {MISSING}:
                    lines.append([name, f"{figure.sparsity:g}", f"{figure.top1:.2f}", *ours])
    return common.rows(headings, lines)


def few_images() -> str:
    """Four methods from the same 1,000 images, nothing trained."""
    methods = {name: UNTRAINED[name] for name in ("magnitude", "wf", "lr", "ewr")}
    runs = _read("few_images.json")["runs"]
    lines = []
    for network, name in NETWORKS.items():
        for sparsity in sorted({r["sparsity"] for r in runs if r["network"] == network}):
            wanted = {"network": network, "sparsity": sparsity}
            scores = [_mean(_values(runs, "top1", method=m, **wanted)) for m in methods]
            lines.append([name, f"{sparsity:g}", *scores])
    return common.rows(["", "sparsity", *methods.values()], lines)


def small_networks() -> str:
    """Networks for the digits, calibrated with images that they know and that they don't."""
    methods = {name: UNTRAINED[name] for name in ("magnitude", "wf", "lr", "ewr")}
    runs = [r for r in _read("small_networks.json")["runs"] if r["images"] == CALIBRATED_WITH]
    headings = ["", "calibration", "sparsity", *methods.values(), "EWR - LR", "loss, LR", "EWR"]
    names = ("network", "calibration", "sparsity")
    lines = []
    for kind in sorted({tuple(run[name] for name in names) for run in runs}):
        wanted = dict(zip(names, kind, strict=True))
        tops = {m: _values(runs, "top1", method=m, **wanted) for m in methods}
        losses = [statistics.mean(_values(runs, "loss", method=m, **wanted)) for m in ("lr", "ewr")]
        gains = [ewr - lr for lr, ewr in zip(tops["lr"], tops["ewr"], strict=True)]
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        lines.append(
            [
                *(str(part) for part in kind),
                *(f"{statistics.mean(scores):.1f}" for scores in tops.values()),
                f"{statistics.mean(gains):+.1f} ± {error:.1f}",
                *(f"{loss:.3f}" for loss in losses),
            ]
        )
    return common.rows(headings, lines)


def few_samples() -> str:
    """The same networks and fewer images, seen and unseen alike."""
    runs = [r for r in _read("small_networks.json")["runs"] if r["images"] in FEW]
    lines = []
    for network in sorted({run["network"] for run in runs}):
        for images in FEW:
            line = [network, str(images)]
            for method in FEW_METHODS:
                tops = _values(runs, "top1", network=network, images=images, method=method)
                error = statistics.stdev(tops) / math.sqrt(len(tops))
                line.append(f"{statistics.mean(tops):.1f} ± {error:.1f}")
            lines.append(line)
    return common.rows(["", "images", *(UNTRAINED[m] for m in FEW_METHODS)], lines)


def efficientnet() -> str:
    """EfficientNet-Lite0, nothing trained."""
    methods = {name: UNTRAINED[name] for name in ("magnitude", "wf", "lr", "ewr")}
    run = {c["sparsity"] for c in _cells("table1.json") if c["network"] == "efficientnet-lite0"}
    lines = [
        [f"{sparsity:g}", *(_scores("efficientnet-lite0", m, sparsity) for m in methods)]
        for sparsity in sorted(run)
    ]
    return common.rows(["sparsity", *methods.values()], lines)


def chita() -> str:
    """LR and EWR with CHITA's rows, and CHITA's own code on the same machine."""
    headings = ["sparsity", "correcting", "LR", "EWR", "CHITA", "without its FLOP counter"]
    runs = _read("chita_rows.json")["runs"]
    theirs = _read("chita_code.json")["runs"]
    lines = []
    for sparsity, correcting in sorted({(run["sparsity"], run["correcting"]) for run in runs}):
        entries = []
        for method in ("lr", "ewr"):
            kind = (sparsity, correcting, method)
            those = [r for r in runs if (r["sparsity"], r["correcting"], r["method"]) == kind]
            seconds = [r["seconds"]["total"] for r in those]
            entries.append(_timed([r["top1"] for r in those], seconds))
        for counted in (True, False):
            those = [r for r in theirs if (r["sparsity"], r["flop_counter"]) == (sparsity, counted)]
            entries.append(_timed([r["top1"] for r in those], [r["seconds"] for r in those]))
        lines.append([f"{sparsity:g}", str(correcting), *entries])
    return common.rows(headings, lines)


def closed_form() -> str:
    """Sinkhorn's algorithm, and by how much the closed forms differ from it, at some epsilons."""
    with (RESULTS / "closed_form.csv").open() as file:
        runs = list(csv.DictReader(file))
    compared = {"cost": ("corrected", "printed"), "objective": ("corrected",)}
    headings = ["clouds", "ε"]
    for what, forms in compared.items():
        headings += [f"{what}, Sinkhorn", *forms]
    lines = []
    for clouds in dict.fromkeys(run["clouds"] for run in runs):
        for epsilon in ("1", "10", "50", "100"):
            those = [r for r in runs if (r["clouds"], r["epsilon"]) == (clouds, epsilon)]
            line = [NETWORKS.get(clouds, clouds), epsilon]
            for what, forms in compared.items():
                exact = [float(run[f"sinkhorn_{what}"]) for run in those]
                line.append(f"{statistics.mean(exact):.3g}")
                for form in forms:
                    found = statistics.mean(float(run[f"{form}_{what}"]) for run in those)
                    line.append(f"{found:.3g} ({found / statistics.mean(exact) - 1:+.1%})")
            lines.append(line)
    return common.rows(headings, lines)


def robust(network: str) -> str:
    """What a quarter of noisy data costs, over the seeds of both files."""
    files = ("robustness.json", "robustness_earlier_draws.json")
    return robustness.table(network, *(_read(file)["runs"] for file in files))


def noisy_loss(network: str) -> str:
    """Table 2 without training: EWR's loss against LR's in %, where there is LR with its screen."""
    lines = []
    for fraction, level in _noises(network, "untrained"):
        line = [f"{fraction:.0%}", f"{level:g}"]
        for sparsity in NOISY_SPARSITIES:
            methods = _row("table2.json", network, "untrained", fraction, level, sparsity)
            entry = _percent(methods["ewr"]["difference"])
            if "lr-screen" in methods:
                entry += f" ({methods['lr-screen']['difference']['percent']:+.1f})"
            line.append(entry)
        lines.append(line)
    return common.rows(["noisy", "level", *map(_short, NOISY_SPARSITIES)], lines)


def noisy_beside_published() -> str:
    """Tables 2 and 6 of ResNet20 without training, and the published loss, which is with it."""
    headings = ["noisy", "level", "sparsity", "LR", "EWR", "LR, top-1", "EWR, top-1"]
    lines = []
    for fraction, level in _noises("resnet20", "untrained"):
        for sparsity in NOISY_SPARSITIES:
            cell = ("resnet20", "untrained", fraction, level, sparsity)
            losses, tops = _row("table2.json", *cell), _row("table6.json", *cell)
            lowest = losses["ewr"]["published"]["value"]
            ours = [losses[method]["mean"] for method in ("lr", "ewr")]
            published = [f"{losses[method]['published']['value']:.2f}" for method in ("lr", "ewr")]
            lines.append(
                [
                    *(f"{fraction:.0%}", f"{level:g}", _short(sparsity)),
                    *(f"**{loss:.3f}**" if loss < lowest else f"{loss:.3f}" for loss in ours),
                    *(f"{tops[method]['mean']:.1f}" for method in ("lr", "ewr")),
                    " / ".join(published),
                ]
            )
    return common.rows([*headings, "published LR / EWR"], lines)


def noisy_authors() -> str:
    """Tables 2 and 6 of ResNet20 by the authors' protocol, EWR, and the published."""
    last = NOISY_SPARSITIES[1:]
    headings = ["noisy", "level", *map(_short, last), "published", "top-1", "published"]
    lines = []
    for fraction, level in _noises("resnet20", "authors"):
        cells = [("resnet20", "authors", fraction, level, sparsity) for sparsity in last]
        losses = [_row("table2.json", *cell)["ewr"] for cell in cells]
        tops = [_row("table6.json", *cell)["ewr"] for cell in cells]
        lines.append(
            [
                *(f"{fraction:.0%}", f"{level:g}"),
                *(f"{loss['mean']:.3f}" for loss in losses),
                " / ".join(f"{loss['published']['value']:.2f}" for loss in losses),
                " / ".join(f"{top['mean']:.1f}" for top in tops),
                " / ".join(f"{top['published']['value']:.1f}" for top in tops),
            ]
        )
    return common.rows(headings, lines)


TABLES: dict[str, Callable[[], str]] = {
    "untrained": untrained,
    "trained": trained,
    "few-images": few_images,
    "small-networks": small_networks,
    "few-samples": few_samples,
    "efficientnet": efficientnet,
    "chita": chita,
    "closed-form": closed_form,
    "noisy-authors": noisy_authors,
    "noisy-beside-published": noisy_beside_published,
    "noisy-mlpnet": partial(noisy_loss, "mlpnet"),
    "noisy-resnet20": partial(noisy_loss, "resnet20"),
    "robustness-mlpnet": partial(robust, "mlpnet"),
    "robustness-resnet20": partial(robust, "resnet20"),
}


def _noises(network: str, protocol: str) -> list[tuple[float, float]]:
    """Fractions and levels of the noises that table 2 has."""
    wanted = {"network": network, "protocol": protocol}
    those = [row for row in _read("table2.json")["rows"] if wanted.items() <= row.items()]
    return sorted({(row["fraction"], row["level"]) for row in those})


def _row(table: str, *cell: Any) -> dict[str, Any]:
    """The methods of a row: by network, protocol, fraction, level and sparsity."""
    names = ("network", "protocol", "fraction", "level", "sparsity")
    wanted = dict(zip(names, cell, strict=True))
    rows = [row for row in _read(table)["rows"] if wanted.items() <= row.items()]
    (row,) = rows
    return row["methods"]


def _percent(difference: dict[str, Any]) -> str:
    """A paired difference in %, bold if it is better beyond chance."""
    shown = f"{difference['percent']:+.1f} ± {difference['percent_ci90']:.1f}"
    return f"**{shown}**" if difference["better"] else shown


def _short(sparsity: float) -> str:
    """As the paper has it."""
    return f"{sparsity:.2f}"


def _scores(network: str, method: str, sparsity: float, epochs: bool = False) -> str:
    """Top-1 over the seeds of table 1's cell without noise."""
    cells = _of_cell(network, method, sparsity)
    shown = _mean([cell["top1"] for cell in cells])
    return f"{shown}, {cells[0]['epochs']} epochs" if cells and epochs else shown


def _difference(network: str, sparsity: float) -> str:
    """By how much EWR is above LR where both have the same seed, and for how many seeds it is."""
    lr, ewr = (_of_seeds(network, method, sparsity) for method in ("lr", "ewr"))
    gains = [ewr[seed] - lr[seed] for seed in lr.keys() & ewr.keys()]
    if not gains:
        return MISSING
    above = sum(gain > 0 for gain in gains)
    return f"{statistics.mean(gains):+.2f}, {above} of {len(gains)}"


def _of_seeds(network: str, method: str, sparsity: float) -> dict[int, float]:
    """Top-1 by seed."""
    return {cell["seed"]: cell["top1"] for cell in _of_cell(network, method, sparsity)}


def _of_cell(network: str, method: str, sparsity: float) -> list[dict[str, Any]]:
    """The finished runs of a cell of table 1 without noise."""
    wanted = (network, method, sparsity, 0.0)
    names = ("network", "method", "sparsity", "noise_fraction")
    return [
        cell
        for cell in _cells("table1.json")
        if tuple(cell[name] for name in names) == wanted and cell["top1"] is not None
    ]


def _values(runs: Iterable[dict[str, Any]], name: str, **wanted: Any) -> list[float]:
    """A figure of those runs that have all of `wanted`, by seed."""
    those = [run for run in runs if wanted.items() <= run.items()]
    return [run[name] for run in sorted(those, key=lambda run: run["seed"])]


def _timed(scores: list[float], seconds: list[float]) -> str:
    """Top-1 and the mean of the seconds."""
    return f"{_mean(scores)} in {statistics.mean(seconds):.1f} s" if scores else MISSING


def _mean(scores: list[float]) -> str:
    """The mean, with the standard deviation and the number of seeds where there are several."""
    if not scores:
        return MISSING
    if len(scores) == 1:
        return f"{scores[0]:.2f}"
    return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f} [{len(scores)}]"


def _cells(name: str) -> Iterable[dict[str, Any]]:
    return _read(name)["cells"]


@cache
def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


if __name__ == "__main__":
    main()
