"""Tables that were run apart become one."""

import pytest

from benchmarks.join import joined
from swap_prune.errors import InputError
from swap_prune.reproduce.table1 import TABLE

MACHINE = {"cores": 2, "threads": 1, "torch": "2.13.0", "python": "3.11"}


def part(*cells, command="swap-prune reproduce table1"):
    return {"commands": [command], "machine": MACHINE, "cells": list(cells)}


def cell(top1, seed=0, sparsity=0.5, dense=93.97):
    return {
        "network": "mlpnet",
        "method": "ewr",
        "sparsity": sparsity,
        "noise_fraction": 0.0,
        "seed": seed,
        "top1": top1,
        "loss": None if top1 is None else 0.1,
        "top1_dense": None if top1 is None else dense,
        "seconds": None if top1 is None else 30.0,
        "epochs": 0,
        "code": "abc",
        "diverged": None,
    }


def test_of_the_same_cell_the_last_finished_run_counts():
    parts = part(cell(95.0), cell(94.0, seed=1)), part(cell(96.0)), part(cell(None))
    assert [r["top1"] for r in joined(TABLE, parts)["cells"]] == [96.0, 94.0]


def test_cells_stand_in_the_tables_order_and_commands_once():
    parts = part(cell(94.0, sparsity=0.9)), part(cell(95.0, seed=1), cell(None, seed=0))
    contents = joined(TABLE, parts)
    assert [(r["sparsity"], r["seed"]) for r in contents["cells"]] == [(0.5, 0), (0.5, 1), (0.9, 0)]
    assert contents["commands"] == ["swap-prune reproduce table1"]
    assert contents["seconds"] == 60
    assert contents["machine"] == MACHINE
    assert "2 of 3 cells are finished" in TABLE.markdown(contents)


def test_cells_of_other_weights_are_refused():
    with pytest.raises(InputError, match=r"mlpnet are from different weights.* 90\.00 and 93\.97"):
        joined(TABLE, [part(cell(95.0)), part(cell(90.0, seed=1, dense=90.0))])
