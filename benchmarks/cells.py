"""Runs of a benchmark, each written as it ends and never run again."""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from benchmarks import networks
from swap_prune import data, evaluate, models, prune


def arguments(description: str, out: str) -> argparse.ArgumentParser:
    """A parser of what all such benchmarks take; `out` is the name of the JSON file."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=networks.NETWORKS, default=["mlpnet"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--checkpoints", type=Path, default=Path("../shared/checkpoints"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results") / out)
    return parser


class Runs:
    """The runs in a JSON file.

    Args:
        out: the file; what it has is kept.
        checkpoints: the directory of the networks' weights.
    """

    def __init__(self, out: Path, checkpoints: Path) -> None:
        self.out = out
        self.load = functools.cache(lambda network: networks.load(network, checkpoints))
        self.runs: list[dict[str, Any]] = (
            json.loads(out.read_text())["runs"] if out.exists() else []
        )

    def missing(self, cells: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """The cells that have not been run, with a progress bar."""
        return tqdm([c for c in cells if not any(c.items() <= r.items() for r in self.runs)])

    def data(self, network: str) -> data.Splits:
        """A network's data."""
        return self.load(network)[1]

    def add(self, cell: dict[str, Any], calibration: Dataset[Any], **settings: Any) -> None:
        """Prune a cell's network by its method with its seed, test it, and write the figures."""
        model, splits = self.load(cell["network"])
        result = prune(
            model,
            calibration,
            include=models.PRUNABLE.get(cell["network"]),
            method=cell["method"],
            seed=cell["seed"],
            **settings,
        )
        score = evaluate(result.model, splits.test)
        figures = {"top1": score.top1, "loss": score.loss, "seconds": result.seconds["total"]}
        machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
        self.runs.append({**cell, **figures, **machine, "settings": result.settings})
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({"runs": self.runs}, indent=1) + "\n")
