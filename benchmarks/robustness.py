"""The accuracy that noise costs, by kind of noise and method, as JSON and as a table.

    python -m benchmarks.robustness --networks mlpnet resnet20 --seeds 3

A quarter of the calibration is noisy; 15 stages to sparsity 0.9 with 1,000 rows of one sample, no
training, test images. Clean and noisy runs of a seed see the same samples. Needs the data
sets and checkpoints. Every finished run is written at once and never run again. With
`--earlier FILE` the table is over that file's runs too, whose seeds drew other samples.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks import networks
from benchmarks.cells import Runs, arguments

SETTINGS: dict[str, Any] = {
    "sparsity": 0.9, "stages": 15, "samples": 1000, "samples_per_row": 1, "held_out": 500,
}  # fmt: skip
NOISES: dict[str, dict[str, Any] | None] = {
    "clean": None,
    "input": {"kind": "input", "fraction": 0.25, "level": 1.0},
    # Level 1 leaves ResNet20's images nearly as they are, and costs LR nothing there.
    "input, level 2": {"kind": "input", "fraction": 0.25, "level": 2.0},
    "input, level 4": {"kind": "input", "fraction": 0.25, "level": 4.0},
    "gradient-entries": {"kind": "gradient-entries", "fraction": 0.25, "level": 1.0},
    "gradient-rows": {"kind": "gradient-rows", "fraction": 0.25, "level": 1.0},
    "labels": {"kind": "labels", "fraction": 0.25},
    "analog": {"kind": "analog", "level": 0.25},
    "adversarial": {"kind": "adversarial", "fraction": 0.25, "level": 5.0},
}
METHODS = ("lr", "ewr")


def main() -> None:
    """Run what is missing, then print the table."""
    parser = arguments(__doc__, "robustness.json")
    parser.add_argument("--noises", nargs="+", choices=NOISES, default=list(NOISES))
    parser.add_argument("--earlier", type=Path, help="more runs for the table, of other draws")
    options = parser.parse_args()
    runs = Runs(options.out, networks.loader(options.checkpoints))
    cells: list[dict[str, Any]] = [
        {"network": network, "noise": noise, "method": method, "seed": seed}
        for network in options.networks
        for seed in range(options.seeds)
        for noise in options.noises
        for method in METHODS
    ]
    for cell in runs.missing(cells):
        train = runs.data(cell).train
        runs.add(cell, train, noise=NOISES[cell["noise"]], **SETTINGS)
    earlier = json.loads(options.earlier.read_text())["runs"] if options.earlier else []
    for network in options.networks:
        print(table(network, runs.runs, earlier))


def table(network: str, *files: list[dict[str, Any]]) -> str:
    """Top-1 by noise and method, and the points that the noise cost, means over paired seeds.

    The last column but one is how far EWR's loss of points is below half of LR's.

    Args:
        network: whose runs are taken.
        files: the runs of each file; the same seed of another is another draw.
    """
    by_cell = {
        (run["noise"], run["method"], (number, run["seed"])): run
        for number, runs in enumerate(files)
        for run in runs
        if run["network"] == network
    }
    titles = ["LR", "EWR", "LR lost", "EWR lost", "LR loss", "EWR loss", "below half", "seeds"]
    lines = [f"| {network} | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    for noise in NOISES:
        draws = [
            draw
            for draw in sorted({draw for _, _, draw in by_cell})
            if all((n, m, draw) in by_cell for n in (noise, "clean") for m in METHODS)
        ]
        if not draws:
            continue
        top1, losses, lost = [], [], []
        for method in METHODS:
            scores = [by_cell[noise, method, draw] for draw in draws]
            clean = [by_cell["clean", method, draw] for draw in draws]
            top1.append(f"{statistics.mean(run['top1'] for run in scores):.2f}")
            losses.append(f"{statistics.mean(run['loss'] for run in scores):.3f}")
            lost.append([a["top1"] - b["top1"] for a, b in zip(clean, scores, strict=True)])
        margin = _mean([lr / 2 - ewr for lr, ewr in zip(*lost, strict=True)])
        entries = [*top1, *map(_mean, lost), *losses, margin]
        lines.append(f"| {noise} | {' | '.join(entries)} | {len(draws)} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    """The mean and, of several values that differ, its standard error."""
    if len(set(values)) < 2:
        return f"{statistics.mean(values):.2f}"
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {error:.2f}"


if __name__ == "__main__":
    main()
