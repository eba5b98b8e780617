"""Runs of a benchmark, each written as it ends and never run again."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from tqdm import tqdm

from benchmarks import networks
from swap_prune import data, evaluate, models, prune

# What tells a run from others: its network, method and seed among it.
Cell = dict[str, Any]


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
        load: gives a cell's network and data.
    """

    def __init__(self, out: Path, load: Callable[[Cell], tuple[nn.Module, data.Splits]]) -> None:
        self.out, self.load = out, load
        self.runs: list[dict[str, Any]] = (
            json.loads(out.read_text())["runs"] if out.exists() else []
        )

    def missing(self, cells: Iterable[Cell]) -> Iterable[Cell]:
        """The cells that have not been run, with a progress bar."""
        return tqdm([c for c in cells if not any(c.items() <= r.items() for r in self.runs)])

    def data(self, cell: Cell) -> data.Splits:
        """The data of a cell's network."""
        return self.load(cell)[1]

    def add(self, cell: Cell, calibration: Dataset[Any], **settings: Any) -> None:
        """Prune a cell's network by its method with its seed, test it, and write the figures."""
        model, splits = self.load(cell)
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
        lines = ",\n".join(map(json.dumps, self.runs))
        self.out.write_text(f'{{"runs": [\n{lines}\n]}}\n')
