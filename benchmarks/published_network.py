"""Magnitude and WoodFisher on ResNet20, made like that of the published columns, as JSON.

    python -m benchmarks.published_network --sparsities 0.7 0.8 --seeds 3 --epochs 0 2

The scripts behind the published columns of ResNet20 (dense 91.36; ours has 91.43) normalise
CIFAR-10 in another way than the network was trained with, and let BatchNorm's statistics adapt
to that on random crops and flips before anything is cut. Here the same: the statistics come from
5,000 training images, changed and drawn by the seed, rows are of such images too, and the test
images are normalised likewise. WoodFisher's own script, as we read it, also trains for two epochs
first: with `--epochs 2` that comes after the statistics.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

from benchmarks import networks
from swap_prune import batchnorm, evaluate, models, prune
from swap_prune.calibration import Samples
from swap_prune.evaluation import cross_entropy
from swap_prune.machine import fastest_precision
from swap_prune.training import PRESETS, Period, crop_flip

NETWORK = "resnet20"
# The usual means and standard deviations of CIFAR-10's channels; the network's own are 0.5.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
METHODS = ("magnitude", "wf")
STATISTICS_IMAGES = 5000
ROWS, HELD_OUT = 1000, 500


def main() -> None:
    """Adapt, cut, test; every seed is written as it ends."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.7, 0.8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", nargs="+", type=int, default=[0])
    parser.add_argument("--checkpoints", type=Path, default=Path("../shared/checkpoints"))
    out = Path("benchmarks/results/published_network.json")
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    runs = [] if not options.out.exists() else json.loads(options.out.read_text())["runs"]
    runs = [run for run in runs if run["epochs"] not in options.epochs]
    for epochs, seed in tqdm([(e, s) for e in options.epochs for s in range(options.seeds)]):
        found = of_seed(seed, epochs, options.sparsities, options.checkpoints)
        runs += [{"epochs": epochs, "seed": seed, **run} for run in found]
        options.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def of_seed(
    seed: int, epochs: int, sparsities: list[float], checkpoints: Path
) -> list[dict[str, Any]]:
    """Top-1 of the adapted network, dense and cut."""
    model, splits = networks.load(NETWORK, checkpoints)
    images, labels = splits.train[:]
    test_images, test_labels = splits.test[:]
    test = TensorDataset(normalised(test_images), test_labels)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        drawn = torch.randperm(len(labels))
        batchnorm.reestimate(model, crop_flip(normalised(images[drawn[:STATISTICS_IMAGES]])))
        train(model, TensorDataset(normalised(images), labels), epochs, seed)
        chosen = drawn[-(ROWS + HELD_OUT) :]
        calibration = TensorDataset(crop_flip(normalised(images[chosen])), labels[chosen])
    found = [{"method": "dense", "sparsity": 0.0, "top1": evaluate(model, test).top1}]
    for sparsity in sparsities:
        for method in METHODS:
            result = prune(
                model, calibration, method=method, sparsity=sparsity, stages=1, samples=ROWS,
                samples_per_row=1, held_out=HELD_OUT, batchnorm="never", seed=seed,
                include=models.PRUNABLE[NETWORK],
            )  # fmt: skip
            top1 = evaluate(result.model, test).top1
            found.append({"method": method, "sparsity": sparsity, "top1": top1})
    return found


def train(model: nn.Module, data: TensorDataset, epochs: int, seed: int) -> None:
    """Train as WoodFisher's script does, with crops and flips, in this machine's best precision."""
    precision = fastest_precision()
    period = Period(
        model, {}, None, cross_entropy, Samples(data), torch.arange(len(data)),
        replace(PRESETS["authors-resnet20"], precision=precision), epochs, seed, period=0,
    )  # fmt: skip
    for epoch in range(epochs):
        period.run_epoch(epoch)


def normalised(images: Tensor) -> Tensor:
    """Images (N, 3, H, W) of the network's own normalisation in the published columns' one."""
    shape = (1, 3, 1, 1)
    return (images * 0.5 + 0.5 - torch.tensor(MEAN).view(shape)) / torch.tensor(DEVIATION).view(
        shape
    )


if __name__ == "__main__":
    main()
