"""What the defaults rest on: variants compared on training images kept out of calibration.

    python -m benchmarks.choices --network mlpnet --sparsity 0.98 --seeds 2

The test set is not touched. One row a variant: mean top-1 and loss on 5,000 training images that
no calibration batch contains, and the spread over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset
from tqdm import tqdm

from benchmarks.networks import NETWORKS, load
from swap_prune import evaluate, models, prune

VALIDATION_SAMPLES = 5000
# Each line changes one thing of the default, which is the first.
VARIANTS: dict[str, dict[str, Any]] = {
    "default (ewr)": {},
    "lr": {"method": "lr"},
    "magnitude": {"method": "magnitude"},
    "printed derivative": {"derivative": "printed"},
    "printed derivative, no LR in the mixture": {
        "derivative": "printed", "epsilon": 0.01, "mixture": 1.0,
    },
    "exact derivative, no LR in the mixture": {"epsilon": 0.01, "mixture": 1.0},
    "the paper's epsilon = 1, absolute": {"epsilon": 1.0, "relative": False, "mixture": 1.0},
    "gaussian closed form": {"coupling": "gaussian"},
    "iht selection": {"selection": "iht"},
    "no first-order term": {"first_order": 0.0},
    "no memory": {"memory": 0},
    "no blocks": {"block_size": 0},
    "no layers' outputs": {"reconstruction": False},
    "the paper's metric": {"metric": 0.0},
    "no correcting stages": {"correcting": 0},
    "linear schedule": {"schedule": "linear"},
    "rows of 4 samples": {"samples_per_row": 4},
    "rows of 1 sample": {"samples_per_row": 1},
    "one stage": {"stages": 1},
}  # fmt: skip


def main() -> None:
    """Run the variants, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--network", choices=NETWORKS, default="mlpnet")
    parser.add_argument("--sparsity", type=float, default=0.98)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--checkpoints", type=Path, default=Path("../shared/checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/choices.json"))
    options = parser.parse_args()
    model, splits = load(options.network, options.checkpoints)
    train = splits.train
    assert isinstance(train, TensorDataset)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(12345))
    held, rest = order[:VALIDATION_SAMPLES], order[VALIDATION_SAMPLES:]
    calibration = tuple(tensor[rest] for tensor in train.tensors)
    validation = tuple(tensor[held] for tensor in train.tensors)
    runs = []
    cells = [(variant, seed) for variant in options.variants for seed in range(options.seeds)]
    for variant, seed in tqdm(cells, unit="run"):
        settings = {**NETWORKS[options.network]["settings"], **VARIANTS[variant]}
        result = prune(
            model,
            calibration,
            sparsity=options.sparsity,
            include=models.PRUNABLE.get(options.network),
            seed=seed,
            **settings,
        )
        score = evaluate(result.model, validation)
        runs.append(
            {
                "variant": variant,
                "seed": seed,
                "top1": score.top1,
                "loss": score.loss,
                "seconds": result.seconds["total"],
                "settings": result.settings,
            }
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    contents = {"network": options.network, "sparsity": options.sparsity, "runs": runs}
    options.out.write_text(json.dumps(contents, indent=1) + "\n")
    print("| variant | top-1 % | loss | seconds |\n|---|---|---|---|")
    for variant in options.variants:
        mine = [run for run in runs if run["variant"] == variant]
        top1 = [run["top1"] for run in mine]
        spread = f" (from {min(top1):.2f} to {max(top1):.2f})" if len(top1) > 1 else ""
        loss = statistics.mean(run["loss"] for run in mine)
        seconds = statistics.mean(run["seconds"] for run in mine)
        print(f"| {variant} | {statistics.mean(top1):.2f}{spread} | {loss:.3f} | {seconds:.0f} |")


if __name__ == "__main__":
    main()
