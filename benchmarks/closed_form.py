"""Sinkhorn's algorithm against the closed forms for epsilon 1 to 100, as CSV.

    python -m benchmarks.closed_form

`benchmarks.readme` has the table.

What the paper's figure of both compares: the transport cost between `x = G w` and `y = G w_bar`,
here for 100 rows of one training image, `w` being `w_bar` cut by magnitude; and, where the closed
form is exact but for chance, between normal samples. The objective of eq. (5), cost + epsilon KL,
is there too but for the printed closed form: its covariance is more than any plan can have, so
that its divergence is infinite. No test image has a part in it.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import networks
from swap_prune import models, prune, select_weights
from swap_prune.evaluation import cross_entropy
from swap_prune.gradients import gradient_rows
from swap_prune.transport import couple

NORMAL = "normal"
# Standard deviations of the normal x and y, those of ../shared/design.md's check.
DEVIATIONS = (1.5, 2.5)
EPSILONS = range(1, 101)
SAMPLES = 100
SPARSITY = 0.84
COUPLINGS = {"sinkhorn": "sinkhorn", "corrected": "gaussian", "printed": "gaussian-printed"}

Row = dict[str, Any]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--checkpoints", type=Path, default=Path("../shared/checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/closed_form.csv"))
    options = parser.parse_args()
    rows: list[Row] = []
    for clouds in (*networks.NETWORKS, NORMAL):
        for seed in range(options.seeds):
            rows += curves(clouds, seed, *draw(clouds, seed, options.checkpoints))
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            # Six digits, as many as a curve can show.
            shown = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(shown)


def draw(clouds: str, seed: int, checkpoints: Path) -> tuple[Tensor, Tensor]:
    """The clouds (SAMPLES,) of x and y: of a network's rows, or normal."""
    generator = torch.Generator().manual_seed(seed)
    if clouds == NORMAL:
        x, y = torch.randn(2, SAMPLES, generator=generator, dtype=torch.float64)
        return DEVIATIONS[0] * x, DEVIATIONS[1] * y
    model, splits = networks.load(clouds, checkpoints)
    images, labels = splits.train[:]
    drawn = torch.randperm(len(labels), generator=generator)[:SAMPLES]
    batch = images[drawn], labels[drawn]
    include = models.PRUNABLE.get(clouds)
    weights = select_weights(model, include)
    w_bar = weights.read(model)
    G = gradient_rows(model, weights, *batch, cross_entropy)
    cut = prune(
        model, batch, sparsity=SPARSITY, method="magnitude", stages=1, include=include,
        held_out=0, batchnorm="never",
    ).model  # fmt: skip
    return (G @ weights.read(cut)).double(), (G @ w_bar).double()


def curves(clouds: str, seed: int, x: Tensor, y: Tensor) -> list[Row]:
    """Costs and objectives by epsilon."""
    rows: list[Row] = []
    for epsilon in EPSILONS:
        row: Row = {"clouds": clouds, "seed": seed, "epsilon": epsilon}
        for name, coupling in COUPLINGS.items():
            found = couple(x, y, epsilon, coupling=coupling, relative=False)
            assert found.converged
            row[f"{name}_cost"] = found.cost
            if name != "printed":
                row[f"{name}_objective"] = found.objective
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
