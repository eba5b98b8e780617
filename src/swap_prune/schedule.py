"""How the sparsity grows from stage to stage (Algorithm 1, line 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from swap_prune.errors import InputError

SCHEDULES = ("cubic", "linear")


def sparsities(
    schedule: str | Sequence[float], sparsity: float, stages: int, correcting: int
) -> list[float]:
    """The sparsity after each of `stages` stages.

    `cubic` is the paper's `k_t = k_T + (k_0 - k_T)(1 - t/T)³`, which prunes much while there is
    much to spare; `linear` takes equal steps. The last `correcting` stages keep the final sparsity
    and only move the weights.

    Args:
        schedule: "cubic", "linear", or one's own non-decreasing list that ends at `sparsity`.
        sparsity: the fraction of zeros after the last stage, in [0, 1).
        stages: the number T of stages, correcting ones included; must fit one's own list.
        correcting: how many of them prune nothing; not used with one's own list.
    """
    if isinstance(schedule, (list, tuple)):
        return _own(list(schedule), sparsity, stages)
    if schedule not in SCHEDULES:
        raise InputError(
            f"schedule={schedule!r} is unknown: give one of {', '.join(SCHEDULES)}, "
            "or a list of sparsities"
        )
    if not 0 <= correcting < stages:
        raise InputError(
            f"correcting={correcting} must be at least 0 and less than stages={stages}: "
            "one stage at least has to prune"
        )
    pruning = stages - correcting
    done = [min(1.0, t / pruning) for t in range(1, stages + 1)]
    power = 3 if schedule == "cubic" else 1
    return [sparsity * (1 - (1 - fraction) ** power) for fraction in done]


def _own(steps: list[float], sparsity: float, stages: int) -> list[float]:
    numeric = all(isinstance(step, (int, float)) for step in steps)
    rising = numeric and all(a <= b for a, b in pairwise(steps))
    inside = numeric and all(0 <= s < 1 for s in steps)
    # What numpy.linspace and its like end with may be a last digit off.
    ends = numeric and bool(steps) and math.isclose(steps[-1], sparsity, abs_tol=1e-9)
    if not (ends and rising and inside and len(steps) == stages):
        raise InputError(
            f"schedule={steps} must be non-decreasing sparsities in [0, 1), one for each of "
            f"stages={stages}, the last of which is sparsity={sparsity}"
        )
    return [*(min(step, sparsity) for step in steps[:-1]), sparsity]


def round_to_kept(p: int, sparsity: float) -> int:
    """k, the number of weights that stay of `p` at a sparsity."""
    return p - round(p * sparsity)
