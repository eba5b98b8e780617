"""Our Sinkhorn against POT's log-domain one: same problem, same error, same process, one thread.

Run with `python -m benchmarks.transport`; prints JSON.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ot
import torch

from swap_prune.transport import Coupling, couple

SAMPLES = 1000
EPSILONS = (0.01, 0.1, 1.0)
# POT stops when the Euclidean norm of the column error is below this, or after this many rounds;
# in the second case it has done less than we have, and the ratio is a lower bound.
TOLERANCE = 1e-6
POT_ITERATIONS = 600


def clouds(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and y, (SAMPLES,) each: y Gaussian or heavy-tailed, x a noisy, shrunken copy."""
    generator = np.random.default_rng(0)
    y = (
        generator.standard_normal(SAMPLES)
        if kind == "gaussian"
        else generator.standard_t(3, SAMPLES)
    )
    x = 0.8 * y + 0.1 * generator.standard_normal(SAMPLES)
    return torch.from_numpy(x), torch.from_numpy(y)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the shortest time in seconds of up to 10 runs in 5 seconds, and the last result."""
    seconds: list[float] = []
    while not seconds or (len(seconds) < 10 and sum(seconds) < 5):
        begin = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), result


def compare(kind: str, epsilon: float) -> dict[str, Any]:
    """Time both on one problem, and say how far each is from its marginals and from the other."""
    x, y = clouds(kind)
    masses = np.full(SAMPLES, 1 / SAMPLES)

    def ours() -> tuple[Coupling, np.ndarray]:
        # We stop at the largest error, which this many times smaller bounds the Euclidean norm.
        found = couple(x, y, epsilon, tolerance=TOLERANCE / SAMPLES**0.5)
        return found, found.plan().numpy()

    def pots() -> tuple[np.ndarray, dict[str, Any]]:
        squares = (x.numpy()[:, None] - y.numpy()) ** 2
        absolute = epsilon * y.numpy().var()
        return ot.bregman.sinkhorn_log(
            masses,
            masses,
            squares,
            absolute,
            numItermax=POT_ITERATIONS,
            stopThr=TOLERANCE,
            log=True,
        )

    our_seconds, (found, our_plan) = timed(ours)
    pot_seconds, (pot_plan, log) = timed(pots)
    pot_error = float(np.linalg.norm(pot_plan.sum(0) - masses))
    pot_targets = pot_plan @ y.numpy() / pot_plan.sum(1)
    difference = np.abs(found.targets.numpy() - pot_targets).max() / y.numpy().std()
    return {
        "y": kind,
        "epsilon": epsilon,
        "our_seconds": our_seconds,
        "pot_seconds": pot_seconds,
        "ratio": pot_seconds / our_seconds,
        "our_iterations": found.iterations,
        "pot_iterations": int(log["niter"]),
        "our_marginal_error": float(np.linalg.norm(our_plan.sum(0) - masses)),
        "pot_marginal_error": pot_error,
        "pot_reached_tolerance": pot_error <= TOLERANCE,
        "largest_target_difference_in_std_of_y": float(difference),
    }


def measure() -> dict[str, Any]:
    """Compare on Gaussian and heavy-tailed y at several relative epsilons, with one thread.

    Returns:
        The settings, one record for each problem, and the smallest ratio of POT's time to ours.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        problems = [compare(kind, e) for kind in ("gaussian", "heavy-tailed") for e in EPSILONS]
    finally:
        torch.set_num_threads(threads)
    return {
        "samples": SAMPLES,
        "tolerance": TOLERANCE,
        "problems": problems,
        "smallest_ratio": min(problem["ratio"] for problem in problems),
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
