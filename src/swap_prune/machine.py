"""What the machine can hold, and how its memory is handed out."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from swap_prune import settings as settings_of
from swap_prune.errors import InputError

# Of a row: G's float32, and a copy of the columns of the weights that are left.
BYTES_A_WEIGHT = 8
# What glibc's mallopt calls its settings.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
# Where glibc's own adjustment of the threshold ends, and how many maps it allows.
MMAP_THRESHOLD = 32 * 2**20
MMAP_MAX = 2**16


def affordable_memory(n: int, p: int) -> int:
    """How many rows memory="auto" remembers on this machine."""
    return settings_of.remembered_rows(n, p, most_rows(p) - n)


def check_memory(n: int, p: int, remembered: int = 0) -> None:
    """Raise before gradient matrices are asked for that the machine can't hold."""
    if n + remembered > most_rows(p):
        needed = BYTES_A_WEIGHT * (n + remembered) * p
        raise InputError(
            f"samples={n} rows of gradients and memory={remembered} more for {p:,} weights need "
            f"{needed / 2**30:.0f} GiB, and this machine has {_memory() / 2**30:.0f}; give fewer "
            "samples, less memory, or prune fewer layers with include or exclude"
        )


def most_rows(p: int) -> int:
    """How many rows of gradients for `p` weights the machine can hold."""
    return _memory() // (BYTES_A_WEIGHT * p)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory for the next matrix of the same size, and give it back at the end.

    glibc returns large blocks to the system at once, which then clears every page anew: about a
    sixth of the time of a run of small networks. Elsewhere than on glibc nothing happens.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        # glibc can't be told to adjust itself again: what it would have come to with large blocks.
        libc.mallopt(M_MMAP_MAX, MMAP_MAX)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, 2 * MMAP_THRESHOLD)
        libc.malloc_trim(0)
