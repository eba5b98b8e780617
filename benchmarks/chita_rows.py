"""LR and EWR with the rows of CHITA's published code, one sample each, as JSON and as a table.

    python -m benchmarks.chita_rows --out benchmarks/results/chita_rows.json

MLPNet, 15 stages of 1,000 rows, no training, test images. Rows of several samples, ResNet20 and the
other methods are `swap-prune reproduce table1`. Needs MNIST (`swap-prune data fetch mnist`) and the
paper's checkpoint. Nothing else should run on the machine meanwhile: seconds are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import networks
from swap_prune import evaluate, prune

METHODS = ("lr", "ewr")


def main() -> None:
    """Run, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.9, 0.98])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--correcting", nargs="+", type=int, default=[6, 8, 10],
        help="how many of the 15 stages cut nothing; prune's default is 6",
    )  # fmt: skip
    parser.add_argument("--checkpoints", type=Path, default=Path("../shared/checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/chita_rows.json"))
    options = parser.parse_args()
    model, splits = networks.load("mlpnet", options.checkpoints)
    runs = []
    cells = [
        {"sparsity": sparsity, "correcting": correcting, "seed": seed, "method": method}
        for seed in range(options.seeds)
        for sparsity in options.sparsities
        for correcting in options.correcting
        for method in options.methods
    ]
    for cell in tqdm(cells, unit="run"):
        result = prune(model, splits.train, stages=15, samples=1000, samples_per_row=1, **cell)
        score = evaluate(result.model, splits.test)
        runs.append(
            {
                **cell,
                "nonzeros": result.nonzeros,
                "top1": score.top1,
                "loss": score.loss,
                "seconds": result.seconds,
                "settings": result.settings,
            }
        )
    machine = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    print(markdown(runs))


def markdown(runs: list[dict[str, Any]]) -> str:
    """Top-1 and seconds, means over the seeds, and the sample standard deviation of the former."""
    lines = ["| sparsity | correcting | method | top-1 % | seconds | seeds |", "|" + "---|" * 6]
    names = ("sparsity", "correcting", "method")
    for kind in sorted({tuple(run[name] for name in names) for run in runs}):
        those = [run for run in runs if tuple(run[name] for name in names) == kind]
        scores = [run["top1"] for run in those]
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        seconds = statistics.mean(run["seconds"]["total"] for run in those)
        cells = [*kind, f"{statistics.mean(scores):.2f}{spread}", f"{seconds:.1f}", len(those)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
