"""Accuracy after pruning MLPNet and ResNet20 without training, as JSON and as a table.

    python -m benchmarks.accuracy --networks mlpnet resnet20 --out benchmarks/results/accuracy.json

Needs the two data sets (`swap-prune data fetch mnist`, `... cifar10`) and the paper's checkpoints
(`--checkpoints`). Every finished run is written at once and never run again.
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

from swap_prune import data as data_sets
from swap_prune import evaluate, prune
from swap_prune import models as networks_of

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
METHODS = ("magnitude", "lr", "ewr")
NETWORKS: dict[str, dict[str, Any]] = {
    "mlpnet": {
        "data": "mnist",
        "weights": "mlpnet_mnist.safetensors",
        "settings": {"stages": 15, "samples": 1000, "samples_per_row": 16},
    },
    # The rows of CHITA's published code: one sample each.
    "mlpnet-rows-of-1": {
        "data": "mnist",
        "weights": "mlpnet_mnist.safetensors",
        "settings": {"stages": 15, "samples": 1000, "samples_per_row": 1},
    },
    "resnet20": {
        "data": "cifar10",
        "weights": "resnet20_cifar10.safetensors",
        "settings": {"stages": 15, "samples": 1000, "samples_per_row": 8, "held_out": 500},
    },
}


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["mlpnet", "resnet20"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--sparsities", nargs="+", type=float, default=SPARSITIES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--checkpoints", type=Path, default=Path("../shared/checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/accuracy.json"))
    options = parser.parse_args()
    runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    done = {(r["network"], r["method"], r["sparsity"], r["seed"]) for r in runs}
    wanted = [
        (network, method, sparsity, seed)
        for network in options.networks
        for seed in range(options.seeds)
        for sparsity in options.sparsities
        for method in options.methods
        if method != "magnitude" or seed == 0
    ]
    with tqdm([cell for cell in wanted if cell not in done], unit="run") as bar:
        for cell in bar:
            bar.set_description(" ".join(map(str, cell)))
            runs.append(run(*cell, checkpoints=options.checkpoints))
            save(options.out, runs)
    print(markdown(runs))


def run(network: str, method: str, sparsity: float, seed: int, checkpoints: Path) -> dict[str, Any]:
    """Prune once and measure on the test set."""
    task = NETWORKS[network]
    name = network.split("-")[0]
    splits = data_sets.load(task["data"])
    model = networks_of.build(name)
    networks_of.load_weights(model, checkpoints / task["weights"])
    result = prune(
        model,
        splits.train,
        sparsity=sparsity,
        method=method,
        seed=seed,
        include=networks_of.PRUNABLE.get(name),
        **task["settings"],
    )
    score = evaluate(result.model, splits.test)
    return {
        "network": network,
        "method": method,
        "sparsity": sparsity,
        "seed": seed,
        "nonzeros": result.nonzeros,
        "top1": score.top1,
        "loss": score.loss,
        "seconds": result.seconds,
        "settings": result.settings,
        "history": result.history,
    }


def save(path: Path, runs: list[dict[str, Any]]) -> None:
    """Write all runs, whole or not at all."""
    machine = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")
    os.replace(temporary, path)


def markdown(runs: list[dict[str, Any]]) -> str:
    """Mean top-1 over the seeds, and the sample standard deviation where there are several."""
    lines = ["| network | sparsity | seeds | magnitude | LR | EWR | EWR - LR |", "|" + "---|" * 7]
    for network, sparsity in sorted({(r["network"], r["sparsity"]) for r in runs}):
        cells, scores = [], {}
        for method in METHODS:
            scores[method] = {
                r["seed"]: r["top1"]
                for r in runs
                if (r["network"], r["sparsity"], r["method"]) == (network, sparsity, method)
            }
            cells.append(_spread(list(scores[method].values())))
        both = scores["lr"].keys() & scores["ewr"].keys()
        paired = [scores["ewr"][seed] - scores["lr"][seed] for seed in sorted(both)]
        difference = f"{statistics.mean(paired):+.2f}" if paired else ""
        seeds = max(len(scores["lr"]), len(scores["ewr"]), 1)
        lines.append(f"| {network} | {sparsity} | {seeds} | {' | '.join(cells)} | {difference} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else ""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


if __name__ == "__main__":
    main()
