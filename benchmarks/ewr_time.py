"""The time of a stage of EWR against one of LR, in one process, as JSON.

    python -m benchmarks.ewr_time --out benchmarks/results/ewr_time.json

ResNet20, 1,000 rows of G a stage, one and eight samples a row; LR and EWR in turn, so that both
see the same machine. A stage is everything: gradients, choice of the support, regression,
transport, and the search for settings on held-out samples. The first stage is left out: it has no
rows to remember yet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import torch

from benchmarks import networks
from swap_prune import models, prune


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples-per-row", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--checkpoints", type=Path, default=Path("../shared/checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ewr_time.json"))
    options = parser.parse_args()
    model, splits = networks.load("resnet20", options.checkpoints)
    measured = []
    for samples_per_row in options.samples_per_row:
        seconds: dict[str, list[float]] = {"lr": [], "ewr": []}
        for repeat in range(options.repeats):
            for method, times in seconds.items():
                result = prune(
                    model, splits.train, sparsity=0.8, method=method, stages=options.stages,
                    samples=1000, samples_per_row=samples_per_row, held_out=500, seed=repeat,
                    include=models.PRUNABLE["resnet20"],
                )  # fmt: skip
                times += [line["seconds"] for line in result.history[1:]]
        ratio = statistics.mean(seconds["ewr"]) / statistics.mean(seconds["lr"])
        measured.append({"samples_per_row": samples_per_row, "ratio": ratio, "seconds": seconds})
        print(f"rows of {samples_per_row}: a stage of EWR takes {ratio:.2f} times as long as LR's")
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine, "stages": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
