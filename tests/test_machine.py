"""Freed memory is kept while a run needs it, and given back after it."""

import platform
import resource

import pytest
import torch

from swap_prune import machine

MATRIX = 25_000_000  # numbers, 100 MB: far above what glibc keeps by itself
PAGES = 4 * MATRIX // resource.getpagesize()

glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told what to keep"
)


def touch() -> int:
    """Take, fill and free a matrix; the pages that the system had to clear for it."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(MATRIX)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident() -> int:
    """The bytes that the process holds."""
    with open("/proc/self/statm") as statistics:
        return int(statistics.read().split()[1]) * resource.getpagesize()


@glibc
def test_freed_memory_is_handed_out_again():
    with machine.freed_memory_kept():
        # Now and then a small block lies in the way, and a second place is needed.
        assert sum(touch() for _ in range(20)) < 5 * PAGES


@glibc
def test_kept_memory_is_given_back():
    with machine.freed_memory_kept():
        touch()
        held = resident()
    assert resident() < held - 4 * MATRIX / 2


def test_another_malloc_is_left_alone(monkeypatch):
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())
    with machine.freed_memory_kept():
        pass
