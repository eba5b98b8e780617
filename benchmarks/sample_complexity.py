"""How fast transport between samples approaches transport between their laws, as JSON.

    python -m benchmarks.sample_complexity --out benchmarks/results/sample_complexity.json

The paper (section 3, appendix A.2) says that the entropy improves the rate of W2² from n^(-1/4) to
n^(-1/2). In one dimension, which is where x = G w and y = G w_bar live, this measures what is so.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swap_prune.transport import Coupling, couple

SIZES = (25, 50, 100, 200, 400)
# In units of the variance of the law of y.
EPSILONS = (0.0, 0.1, 1.0, math.inf)
# Mean and standard deviation of x and of y.
LAWS = {
    "different Gaussians": ((0.0, 1.0), (1.0, 2.0)),
    "equal Gaussians": ((0.0, 1.0), (0.0, 1.0)),
    "equal coins": ((0.5, 0.5), (0.5, 0.5)),
}
MEASURES = ("error", "error_of_root", "deviation", "bias", "target_error")


def main() -> None:
    """Simulate, write, and print the slopes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=160)
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/sample_complexity.json")
    )
    options = parser.parse_args()
    seeds = range(options.seeds)
    curves = [curve(law, epsilon, seeds) for law in LAWS for epsilon in EPSILONS]
    result = {"seeds": list(seeds), "sizes": SIZES, "curves": curves}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    for each in curves:
        slopes = {name: round(value, 2) for name, value in each["slopes"].items()}
        print(f"{each['law']}, epsilon {each['epsilon']}: {slopes}")


def curve(law: str, epsilon: float, seeds: Sequence[int]) -> dict[str, Any]:
    """Errors of the transport between n samples of x and n of y, for every n of `SIZES`.

    Args:
        law: One of `LAWS`.
        epsilon: In units of the variance of the law of y.
        seeds: Each gives one sample of every size, the same for every epsilon.

    Returns:
        The objective of the laws themselves (`truth`); for each size, of `objective - truth`, the
        mean of the absolute value (`error`), the standard deviation (`deviation`) and the mean
        (`bias`, less the part of first order, which has mean 0 and would drown it) with its
        standard error, the mean of `|√objective - √truth|` (`error_of_root`) and the root of the
        mean square distance of the targets from those of the laws (`target_error`); for each of
        `MEASURES` the slope in log-log (left out where it is not positive at every size).
    """
    absolute = epsilon * LAWS[law][1][1] ** 2 if epsilon else 0.0
    truth = transport_of_laws(law, absolute)
    records: list[list[tuple[float, float, float, float]]] = [[] for _ in SIZES]
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for n, record in zip(SIZES, records, strict=True):
            x, y = (sample(law, side, n, generator) for side in (0, 1))
            found = couple(x, y, absolute, relative=False)
            error = found.objective - truth.objective
            root = abs(math.sqrt(found.objective) - math.sqrt(truth.objective))
            remainder = error - first_order_error(law, truth, x, y)
            misfit = (found.targets - targets_of_laws(law, truth, x)).square().mean()
            record.append((error, root, remainder, float(misfit)))
    sizes = []
    for n, record in zip(SIZES, records, strict=True):
        error, root, remainder, misfit = torch.tensor(record, dtype=torch.float64).T
        sizes.append(
            {
                "n": n,
                "error": float(error.abs().mean()),
                "error_of_root": float(root.mean()),
                "deviation": float(error.std()),
                "bias": float(remainder.mean()),
                "bias_standard_error": float(remainder.std() / math.sqrt(len(seeds))),
                "target_error": float(misfit.mean().sqrt()),
            }
        )
    values = {name: [size[name] for size in sizes] for name in MEASURES}
    return {
        "law": law,
        # JSON has no infinity.
        "epsilon": str(epsilon),
        "truth": truth.objective,
        "sizes": sizes,
        "slopes": {name: slope(each) for name, each in values.items() if min(each) > 0},
    }


def transport_of_laws(law: str, epsilon: float) -> Coupling:
    """Couple the laws themselves, each given by the two points mean ± standard deviation.

    For coins these points are the law, for Gaussians they have its moments, which are all that the
    closed form takes.
    """
    x, y = (torch.tensor([m - s, m + s], dtype=torch.float64) for m, s in LAWS[law])
    kind = "sinkhorn" if law.endswith("coins") else "gaussian"
    return couple(x, y, epsilon, coupling=kind, relative=False, tolerance=1e-12)


def targets_of_laws(law: str, truth: Coupling, x: Tensor) -> Tensor:
    """Targets (n,) at `x` (n,): on the line through those of the two points."""
    mean, deviation = LAWS[law][0]
    low, high = truth.targets
    return low + (high - low) * (x - mean + deviation) / (2 * deviation)


def covariance_of_laws(law: str, truth: Coupling) -> float:
    """Covariance of x and y under the plan of the laws: slope of the targets times variance."""
    return LAWS[law][0][1] * float(truth.targets[1] - truth.targets[0]) / 2


def first_order_error(law: str, truth: Coupling, x: Tensor, y: Tensor) -> float:
    """What the samples' error is to first order: the potentials' means less their expectations.

    The slope of the potential of x is `2 (x - t(x))` (envelope theorem), so with t on a line the
    potential is a parabola; the same for y.
    """
    (x_mean, x_deviation), (y_mean, y_deviation) = LAWS[law]
    covariance = covariance_of_laws(law, truth)

    def part(values: Tensor, mean: float, deviation: float, other_mean: float) -> float:
        centred = values - mean
        bend = 1 - covariance / deviation**2
        excess = bend * (centred.square() - deviation**2) + 2 * (mean - other_mean) * centred
        return float(excess.mean())

    return part(x, x_mean, x_deviation, y_mean) + part(y, y_mean, y_deviation, x_mean)


def first_order_variance(law: str, truth: Coupling) -> float:
    """The variance of √n times `first_order_error` for Gaussians: that of the limit theorem."""
    (x_mean, x_deviation), (y_mean, y_deviation) = LAWS[law]
    covariance = covariance_of_laws(law, truth)
    shift = 4 * (x_mean - y_mean) ** 2 * (x_deviation**2 + y_deviation**2)
    return shift + 2 * sum((s**2 - covariance) ** 2 for s in (x_deviation, y_deviation))


def sample(law: str, side: int, n: int, generator: torch.Generator) -> Tensor:
    """Draw n values of x (side 0) or y (side 1)."""
    mean, deviation = LAWS[law][side]
    normal = torch.randn(n, dtype=torch.float64, generator=generator)
    return mean + deviation * (normal.sign() if law.endswith("coins") else normal)


def slope(values: Sequence[float]) -> float:
    """Least-squares slope of log(values) against log(SIZES)."""
    log_n = torch.tensor(SIZES, dtype=torch.float64).log()
    log_values = torch.tensor(values, dtype=torch.float64).log()
    centred = log_n - log_n.mean()
    return float(centred @ log_values / centred.square().sum())


if __name__ == "__main__":
    main()
