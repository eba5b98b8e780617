"""How wrong noise makes gradients, and how wrong they are after EWR's checks, as JSON and a table.

    python -m benchmarks.audit --networks mlpnet resnet20

Rows of one training image, at the weights of a network of which a part is cut by magnitude. Errors
of the mean gradient and of the curvature `GᵀG` (in 20 random directions), as norms relative to
those without noise. No test image has a part in it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import networks
from benchmarks.robustness import NOISES
from swap_prune import audit, filtering, models, noise, prune, residuals, select_weights
from swap_prune.evaluation import cross_entropy
from swap_prune.gradients import DenseGradients, gradient_rows

# Those that make a row another than the gradient of its sample's loss.
KINDS = ("clean", "gradient-entries", "gradient-rows", "analog", "adversarial")
PROBES = 20


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=networks.NETWORKS, default=["mlpnet"])
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--sparsity", type=float, default=0.6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--checkpoints", type=Path, default=Path("../shared/checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/audit.json"))
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for network in options.networks:
        for seed in range(options.seeds):
            found = measure(network, options.samples, options.sparsity, seed, options.checkpoints)
            runs += found
            options.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        print(table(network, [run for run in runs if run["network"] == network]))


def measure(
    network: str, samples: int, sparsity: float, seed: int, checkpoints: Path
) -> list[dict[str, Any]]:
    """Errors by kind of noise, before and after."""
    model, splits = networks.load(network, checkpoints)
    images, labels = splits.train[:]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(labels), generator=generator)[:samples]
    batch = images[drawn], labels[drawn]
    include = models.PRUNABLE.get(network)
    model = prune(
        model, batch, sparsity=sparsity, method="magnitude", stages=1, include=include,
        held_out=0, batchnorm="never",
    ).model  # fmt: skip
    weights = select_weights(model, include)
    w = weights.read(model)
    losses = audit.losses_by_weights(model, weights, batch, cross_entropy, 1)

    def rows() -> Tensor:
        return gradient_rows(model, weights, *batch, cross_entropy).rows()

    def rows_by_own_outputs(noisy: Tensor) -> Tensor:
        seen = residuals.outputs(model, batch[0][: residuals.COMPARED_SAMPLES])
        with weights.kept(model):
            weights.write(model, w)
            own = residuals.by_own_outputs(model, seen, batch, cross_entropy, 1, weights.size)
        if own is None:
            return noisy.clone()
        return gradient_rows(model, weights, *own, residuals.linear_loss).rows()

    exact, found = rows(), []
    probes = torch.randn(weights.size, PROBES, generator=generator)
    for kind in KINDS:
        given = NOISES[kind]
        noisy, checked = exact.clone(), exact.clone()
        if given is not None:
            made = noise.build(**given)
            with made.weights(model, weights, generator):
                noisy = rows()
                checked = rows_by_own_outputs(noisy)
            state = generator.get_state()
            for matrix in (noisy, checked):
                made.rows(matrix, generator.set_state(state))
        before = errors(noisy, exact, probes)
        filtered = filtering.filter_rows(model, weights, batch[0], checked, 1)
        with weights.kept(model):
            corrected = audit.correct_rows(DenseGradients(checked), losses, w, generator)
        after = errors(checked, exact, probes)
        run = {"network": network, "noise": kind, "seed": seed, "samples": samples}
        run |= {"sparsity": sparsity, "filtered": filtered, "corrected": corrected}
        run |= {"before": before, "after": after}
        found.append(run)
    return found


def errors(rows: Tensor, exact: Tensor, probes: Tensor) -> dict[str, float]:
    """Relative errors of rows (n, p): of their mean, and of their curvature along probes (p, k)."""

    def relative(found: Tensor, wanted: Tensor) -> float:
        return float((found - wanted).norm() / wanted.norm())

    curvature = relative(rows.T @ (rows @ probes), exact.T @ (exact @ probes))
    return {"mean": relative(rows.mean(0), exact.mean(0)), "curvature": curvature}


def table(network: str, runs: list[dict[str, Any]]) -> str:
    """Means over the seeds, and the least and the most."""
    lines = [f"| {network} | filtered | corrected | mean gradient | after | curvature | after |"]
    lines.append("|---|" + "---|" * 6)
    for kind in KINDS:
        of_kind = [run for run in runs if run["noise"] == kind]
        rows = sum(run["samples"] for run in of_kind)
        cells = [
            f"{sum(run[done] for run in of_kind) / rows:.0%}" for done in ("filtered", "corrected")
        ]
        for what in ("mean", "curvature"):
            for when in ("before", "after"):
                values = [run[when][what] for run in of_kind]
                spread = f"{min(values):.2f} to {max(values):.2f}"
                cells.append(f"{sum(values) / len(values):.2f} ({spread})")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
