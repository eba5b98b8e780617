"""The demo: an embedded digits network, three methods, calibration labels right and wrong."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from swap_prune import data, models
from swap_prune.calibration import Samples
from swap_prune.errors import InputError
from swap_prune.evaluation import evaluate
from swap_prune.noise import LabelNoise
from swap_prune.pruning import prune
from swap_prune.run import PruneResult
from swap_prune.run_directory import RunDirectory

METHODS = ("magnitude", "lr", "ewr")
SPARSITIES = (0.9, 0.95, 0.98)
# Wrong labels cost accuracy at every sparsity; noise in the digits does not (docs/noise.md).
NOISE = LabelNoise(0.25)
RIGHT, WRONG = "right labels", "wrong labels"
# One draw of 1,000 digits says little: a run's top-1 differs from the next one's by points.
SEEDS = (0, 1, 2)
STAGES = 10
PICTURE = "accuracy.png"


def run_demo(out: Path, overwrite: bool) -> None:
    """Prune the digits network to 90, 95 and 98%; print a table and write results to `out`."""
    directory = RunDirectory(out, overwrite=overwrite)
    directory.check_free()
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("the demo draws with matplotlib: install swap-prune[demo]") from error
    matplotlib.use("Agg")
    model, splits = models.pretrained("digits"), data.load("digits")
    train = Samples(splits.train)
    inputs, targets = train.read(torch.arange(len(train)))
    calibration = {(RIGHT, seed): (inputs, targets) for seed in SEEDS}
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        calibration[WRONG, seed] = NOISE.samples(
            (inputs, targets), generator, int(targets.max()) + 1
        )
    dense = evaluate(model, splits.test)
    rows: list[dict[str, Any]] = []
    best: PruneResult | None = None
    cases = [(*c, m, s) for c in calibration for m in METHODS for s in SPARSITIES]
    with tqdm(cases, unit="run") as bar:
        for condition, seed, method, sparsity in bar:
            bar.set_description(f"{condition}, {method}, sparsity {sparsity}")
            result = prune(
                model,
                calibration[condition, seed],
                sparsity=sparsity,
                method=method,
                stages=STAGES,
                seed=seed,
            )
            score = evaluate(result.model, splits.test)
            rows.append(
                {
                    "calibration": condition,
                    "method": method,
                    "sparsity": sparsity,
                    "seed": seed,
                    "nonzeros": result.nonzeros,
                    "top1": score.top1,
                    "loss": score.loss,
                    "seconds": result.seconds["total"],
                }
            )
            if (condition, method, sparsity, seed) == (RIGHT, "ewr", SPARSITIES[0], SEEDS[0]):
                best = result
    assert best is not None
    contents = {
        "top1_dense": dense.top1,
        "loss_dense": dense.loss,
        "test_samples": dense.samples,
        "runs": rows,
        "noise": NOISE.describe(),
        "configuration": {"model": "digits", "data": "digits", **best.settings},
    }
    with directory.lock():
        directory.clear()
        directory.write_model(best.model)
        directory.write_result(contents)
    _draw(rows, dense.top1 or 0.0, out / PICTURE)
    print(table(rows, dense.top1 or 0.0, dense.samples))
    print(
        f"\nwritten to {out}/: model.safetensors ({RIGHT}, ewr, {SPARSITIES[0]:.0%}), "
        f"result.json, {PICTURE}"
    )


def table(rows: list[dict[str, Any]], dense: float, samples: int) -> str:
    """Mean top-1 by calibration data and method (lines) and sparsity (columns)."""
    lines = [
        f"top-1 accuracy in % on {samples} test images, mean of {len(SEEDS)} seeds; dense model "
        f"{dense:.1f}; {WRONG}: {NOISE.fraction:.0%} of them",
        "",
        f"{'calibration':12} {'method':10}"
        + "".join(f"{f'{s:.0%} zeros':>12}" for s in SPARSITIES),
    ]
    for condition, method in dict.fromkeys((r["calibration"], r["method"]) for r in rows):
        means = "".join(f"{v:>12.1f}" for v in _means(rows, condition, method))
        lines.append(f"{condition:12} {method:10}{means}")
    return "\n".join(lines)


def _means(rows: list[dict[str, Any]], condition: str, method: str) -> list[float]:
    """The mean top-1 over the seeds, for every sparsity."""
    return [
        statistics.mean(
            row["top1"]
            for row in rows
            if (row["calibration"], row["method"], row["sparsity"]) == (condition, method, sparsity)
        )
        for sparsity in SPARSITIES
    ]


def _draw(rows: list[dict[str, Any]], dense: float, path: Path) -> None:
    """One panel for right and one for wrong calibration labels: top-1 against sparsity."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, condition in zip(axes, (RIGHT, WRONG), strict=True):
        axis.axhline(dense, color="0.6", linestyle=":", label="dense model")
        for method, marker in zip(METHODS, "osD", strict=True):
            axis.plot(
                [100 * s for s in SPARSITIES],
                _means(rows, condition, method),
                marker=marker,
                markersize=7 if method == "lr" else 5,
                linestyle="--" if method == "lr" else "-",
                label=method,
            )
        share = f", {NOISE.fraction:.0%} of them" if condition == WRONG else ""
        axis.set_title(f"calibrated with {condition}{share}")
        axis.set_xlabel("pruned weights, %")
        axis.set_xticks([100 * s for s in SPARSITIES])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("top-1 on test images, %")
    axes[0].legend()
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png", dpi=120)
    os.replace(temporary, path)
    pyplot.close(figure)
