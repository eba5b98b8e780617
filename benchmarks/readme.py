"""Fill the README's tables of results from the JSON files beside this module.

    python -m benchmarks.readme

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. A test asks that the README is
what this makes of it, so that no figure in them is typed by hand.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from swap_prune.reproduce import common, table1

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# From Benbaki et al. 2023: their staged method without training, which table 1 hasn't.
CHITA_PLUS_PLUS = {
    "mlpnet": {0.9: 95.55, 0.95: 94.70, 0.98: 90.73},
    "resnet20": {0.7: 90.38, 0.8: 88.72, 0.9: 79.32},
}
MISSING = "–"


def main() -> None:
    """Write the README anew."""
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text()))


def filled(text: str) -> str:
    """The text with every table made anew."""
    return re.sub(
        r"(<!-- table: ([\w-]+) -->\n).*?(?=<!-- end -->)",
        lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n",
        text,
        flags=re.DOTALL,
    )


def untrained(network: str) -> str:
    """Our methods without training, and what was published of others."""
    methods = ("magnitude", "wf", "cbs", "lr", "ewr")
    headings = ["sparsity", "magnitude", "WoodFisher", "CBS", "LR", "EWR", "CHITA++, published"]
    lines = []
    for sparsity in table1.sparsities_of(network):
        published = CHITA_PLUS_PLUS[network].get(sparsity)
        lines.append(
            [
                f"{sparsity:g}",
                *(_scores(network, method, sparsity) for method in methods),
                MISSING if published is None else f"{published:.2f}",
            ]
        )
    return common.rows(headings, lines)


def trained() -> str:
    """Both networks with training, beside the paper's EWR."""
    headings = ["", "sparsity", "the paper's EWR", "EWR, authors' training", "EWR, our training"]
    lines = []
    for network in ("mlpnet", "resnet20"):
        for figure in table1.published_of(network):
            if figure.method == "EWR" and not figure.noise_fraction:
                ours = [
                    _scores(network, method, figure.sparsity, epochs=True)
                    for method in ("ewr-authors", "ewr-trained")
                ]
                if set(ours) != {MISSING}:
                    lines.append([network, f"{figure.sparsity:g}", f"{figure.top1:.2f}", *ours])
    return common.rows(headings, lines)


def efficientnet() -> str:
    """EfficientNet-Lite0, nothing trained."""
    methods = {"magnitude": "magnitude", "wf": "WoodFisher", "lr": "LR", "ewr": "EWR"}
    run = {c["sparsity"] for c in _cells("table1.json") if c["network"] == "efficientnet-lite0"}
    lines = [
        [f"{sparsity:g}", *(_scores("efficientnet-lite0", m, sparsity) for m in methods)]
        for sparsity in sorted(run)
    ]
    return common.rows(["sparsity", *methods.values()], lines)


def chita() -> str:
    """LR and EWR with CHITA's rows, and CHITA's own code on the same machine."""
    headings = ["sparsity", "LR", "EWR", "CHITA as published", "without its FLOP counter"]
    runs = _read("chita_rows.json")["runs"]
    theirs = _read("chita_code.json")["runs"]
    lines = []
    for sparsity in sorted({run["sparsity"] for run in runs}):
        ours = [
            [r for r in runs if (r["sparsity"], r["method"]) == (sparsity, method)]
            for method in ("lr", "ewr")
        ]
        others = [
            [r for r in theirs if (r["sparsity"], r["flop_counter"]) == (sparsity, counted)]
            for counted in (True, False)
        ]
        entries = [
            _timed([r["top1"] for r in those], [r["seconds"]["total"] for r in those])
            for those in ours
        ]
        entries += [
            _timed([r["top1"] for r in those], [r["seconds"] for r in those]) for those in others
        ]
        lines.append([f"{sparsity:g}", *entries])
    return common.rows(headings, lines)


TABLES: dict[str, Callable[[], str]] = {
    "untrained-mlpnet": lambda: untrained("mlpnet"),
    "untrained-resnet20": lambda: untrained("resnet20"),
    "trained": trained,
    "efficientnet": efficientnet,
    "chita": chita,
}


def _scores(network: str, method: str, sparsity: float, epochs: bool = False) -> str:
    """Top-1 over the seeds of table 1's cell without noise."""
    cells = [
        cell
        for cell in _cells("table1.json")
        if (cell["network"], cell["method"], cell["sparsity"], cell["noise_fraction"])
        == (network, method, sparsity, 0.0)
        and cell["top1"] is not None
    ]
    shown = _mean([cell["top1"] for cell in cells])
    return f"{shown}, {cells[0]['epochs']} epochs" if cells and epochs else shown


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


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


if __name__ == "__main__":
    main()
