"""How many rows a machine, or a container on it, can hold."""

import pytest
import torch

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


@pytest.mark.parametrize("instructions", ["avx512_bf16", "amx_bf16"])
def test_bfloat16_only_where_the_processor_has_instructions_for_it(monkeypatch, instructions):
    for native, precision in ((True, "bfloat16"), (False, "float32")):
        found = {"avx2": True, instructions: native}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found, raising=False)
        assert machine.fastest_precision() == precision
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert machine.fastest_precision() == "float32"
