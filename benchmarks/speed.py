"""Speed as ratios to the obvious alternative, measured in one process, as JSON.

    python -m benchmarks.speed --out benchmarks/results/speed.json

Rows of G against a loop of single backward passes, products with G against a plain dot and copy
over the same bytes, Sinkhorn against POT's, and training in bfloat16 against float32.
Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks import transport
from swap_prune import models, select_weights
from swap_prune.calibration import Samples
from swap_prune.gradients import DenseGradients, gradient_rows
from swap_prune.machine import fastest_precision
from swap_prune.training import FineTuning, Period


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed.json"))
    options = parser.parse_args()
    result = {
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "gradients": measure_gradients(),
        "products": measure_products(),
        "transport": transport.measure(),
        "training": measure_training(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure_gradients(samples: int = 1000) -> dict[str, Any]:
    """Rows of ResNet20 (random weights, 32×32 images) against a loop over the samples."""
    torch.manual_seed(0)
    model = models.build("resnet20")
    weights = select_weights(model, models.PRUNABLE["resnet20"])
    inputs, labels = torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))
    parameters = [model.get_parameter(name) for name in weights.names]
    rows, loop_rows = torch.empty(samples, weights.size), torch.empty(samples, weights.size)

    def loop() -> None:
        for i in range(samples):
            loss = functional.cross_entropy(model(inputs[i : i + 1]), labels[i : i + 1])
            gradients = torch.autograd.grad(loss, parameters)
            torch.cat([g.flatten() for g in gradients], out=loop_rows[i])

    def ours() -> None:
        gradient_rows(model, weights, inputs, labels, functional.cross_entropy, out=rows)

    loop_seconds, our_seconds, ratios = _in_turns(loop, ours)
    return {
        "samples": samples,
        "loop_seconds": loop_seconds,
        "seconds": our_seconds,
        "ratio": loop_seconds / our_seconds,
        "ratios_of_rounds": ratios,
        "largest_difference": float((rows - loop_rows).abs().max() / loop_rows.abs().max()),
    }


def measure_products() -> list[dict[str, Any]]:
    """Bytes of G read a second by `G @ w` and `G.T @ v`, relative to dot and copy."""
    measured = []
    for n, p in ((1000, 32_360), (1000, 267_264)):
        G = DenseGradients(torch.randn(n, p))
        w, v = torch.randn(p), torch.randn(n)
        flat = G.rows().view(-1)
        target = torch.empty_like(flat)
        seconds = {
            "dot": _best(lambda flat=flat: torch.dot(flat, flat)),
            "copy": _best(lambda flat=flat, target=target: target.copy_(flat)),
            "G @ w": _best(lambda G=G, w=w: G @ w),
            "G.T @ v": _best(lambda G=G, v=v: G.T @ v),
        }
        gigabytes = {name: 4e-9 * n * p / value for name, value in seconds.items()}
        plain = max(gigabytes["dot"], gigabytes["copy"])
        measured.append(
            {
                "shape": [n, p],
                "gigabytes_per_second": gigabytes,
                "product_fraction": gigabytes["G @ w"] / plain,
                "adjoint_fraction": gigabytes["G.T @ v"] / plain,
            }
        )
    return measured


def measure_training(samples: int = 1280) -> dict[str, Any]:
    """An epoch of ResNet20, half of its weights pruned, in float32 against bfloat16."""
    torch.manual_seed(0)
    model = models.build("resnet20")
    weights = select_weights(model, models.PRUNABLE["resnet20"])
    masks = {name: torch.rand_like(model.get_parameter(name)) < 0.5 for name in weights.names}
    data = Samples((torch.randn(samples, 3, 32, 32), torch.randint(10, (samples,))))
    everything = torch.arange(samples)
    full, rounded = (
        Period(
            model, masks, None, functional.cross_entropy, data, everything,
            FineTuning(precision=precision), epochs=1, seed=0, period=0,
        )
        for precision in ("float32", "bfloat16")
    )  # fmt: skip
    slow, fast, ratios = _in_turns(lambda: full.run_epoch(0), lambda: rounded.run_epoch(0))
    return {
        "samples": samples,
        "float32_seconds": slow,
        "bfloat16_seconds": fast,
        "ratio": slow / fast,
        "ratios_of_rounds": ratios,
        "fastest_precision": fastest_precision(),
    }


def _in_turns(slow: Callable[[], Any], fast: Callable[[], Any]) -> tuple[float, float, list[float]]:
    """The shortest times of both, and the ratios of five rounds.

    In turns: the machine's speed changes from minute to minute, for both alike.
    """
    seconds = [(_best(slow, 1), _best(fast, 1)) for _ in range(5)]
    shortest = [min(times) for times in zip(*seconds, strict=True)]
    return shortest[0], shortest[1], sorted(first / second for first, second in seconds)


def _best(function: Callable[[], Any], repeats: int = 9) -> float:
    """The shortest of several times: the others were disturbed."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
