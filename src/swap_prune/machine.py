"""What the machine can hold, and what it is fast at."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from swap_prune import settings as settings_of
from swap_prune.errors import InputError

# Of a row: G's float32, and a copy of the columns of the weights that are left.
BYTES_A_WEIGHT = 8
# x86's two kinds. The first trains ResNet20 1.7 times as fast (docs/results.md, speed); no other
# processor's was measured.
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
# Where Linux says how much memory a container has, in bytes: version 2 of its groups, and 1.
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def affordable_memory(n: int, p: int) -> int:
    """How many rows memory="auto" remembers on this machine."""
    return settings_of.remembered_rows(n, p, most_rows(p) - n)


def check_memory(n: int, p: int, remembered: int = 0, inputs: int = 0) -> None:
    """Raise before gradient matrices and `inputs` bytes are asked for that are too much."""
    rows = n + settings_of.COPIES * remembered
    needed = BYTES_A_WEIGHT * rows * p + inputs
    if needed > _memory():
        more = f" and memory={remembered} more" if remembered else ""
        besides = f" and {inputs / 2**30:.0f} GiB of inputs" if inputs >= 2**29 else ""
        raise InputError(
            f"samples={n} rows of gradients{more} for {p:,} weights{besides} need "
            f"{needed / 2**30:.0f} GiB, and this machine has {_memory() / 2**30:.0f}; give fewer "
            "samples, fewer samples_per_row, less memory, prune fewer layers with include or "
            "exclude, or by method='magnitude', which has no rows"
        )


def most_rows(p: int) -> int:
    """How many rows of gradients for `p` weights the machine can hold."""
    return _memory() // (BYTES_A_WEIGHT * p)


def fastest_precision() -> str:
    """What precision="auto" trains in: bfloat16 on processors with instructions for it.

    Others would emulate it, many times slower than float32.
    """
    # Older versions of torch don't tell.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    native = any(capabilities.get(name, False) for name in BFLOAT16_INSTRUCTIONS)
    return "bfloat16" if native else "float32"


def _memory() -> int:
    """The bytes that this process may have: the machine's, or fewer in a container."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            limits.append(int(file.read_text()))
    return min(limits)
