"""How many rows a machine, or a container on it, can hold."""

import pytest

from swap_prune import machine
from swap_prune.errors import InputError


def test_a_container_may_have_less_than_its_machine(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CONTAINER_LIMITS", (limit, tmp_path / "missing"))
    everything = machine.most_rows(1000)
    limit.write_text("max\n")
    assert machine.most_rows(1000) == everything
    limit.write_text("80000\n")
    assert machine.most_rows(1000) == 10


def test_a_remembered_row_takes_the_room_of_two(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text("80000\n")
    monkeypatch.setattr(machine, "CONTAINER_LIMITS", (limit,))
    machine.check_memory(6, 1000, 2)
    with pytest.raises(InputError, match=r"samples=6 rows .* and memory=3 more"):
        machine.check_memory(6, 1000, 3)
