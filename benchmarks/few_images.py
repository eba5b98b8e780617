"""Four methods from the same few calibration images, as JSON; `benchmarks.readme` has the table.

    python -m benchmarks.few_images --networks mlpnet --seeds 3 --out few_images.json

A run has 1,000 training images, drawn by its seed, and no others: those held out are among them,
and every stage sees the same ones. 15 stages, defaults otherwise, no training, test images. Needs
the data sets and checkpoints. Every finished run is written at once and never run again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Subset

from benchmarks import networks
from benchmarks.cells import Runs, arguments

METHODS = ("magnitude", "wf", "lr", "ewr")
IMAGES = 1000


def main() -> None:
    """Run what is missing."""
    parser = arguments(__doc__, "few_images.json")
    parser.add_argument("--sparsities", nargs="+", type=float, default=[0.8, 0.9, 0.95, 0.98])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    runs = Runs(options.out, networks.loader(options.checkpoints))
    cells: list[dict[str, Any]] = [
        {"network": network, "sparsity": sparsity, "method": method, "seed": seed}
        for network in options.networks
        for seed in range(options.seeds)
        for sparsity in options.sparsities
        for method in options.methods
    ]
    for cell in runs.missing(cells):
        train = runs.data(cell).train
        drawn = torch.Generator().manual_seed(cell["seed"])
        images = torch.randperm(len(train), generator=drawn)[:IMAGES].tolist()
        runs.add(cell, Subset(train, images), sparsity=cell["sparsity"], stages=15)


if __name__ == "__main__":
    main()
