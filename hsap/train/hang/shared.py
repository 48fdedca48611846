"""Shared: memory in which a rank's position lies, open to other processes of the machine, and gone with the last.

A memory file has no name in any folder: others find it among the open files of the process that made it, as long as
that lives, stopped or not. Nothing is left behind, however a process ends.
"""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass

from hsap.position import NUM_BYTES
from hsap.train import flags


@dataclass(frozen=True, slots=True)
class Shared:
    """Records of some ranks. path: where other processes of the machine find them, empty where they can't."""

    path: str
    memory: memoryview

    def record(self, index: int) -> memoryview:
        """The memory of one record."""
        return self.memory[index * NUM_BYTES : (index + 1) * NUM_BYTES]


def make(num_records: int) -> Shared:
    """Make memory for records; on Linux it is shared."""
    size = num_records * NUM_BYTES
    if sys.platform != "linux":
        return Shared("", memoryview(bytearray(size)))
    handle = os.memfd_create("hsap-position")
    os.ftruncate(handle, size)
    # The file stays open: closed, it couldn't be found any more.
    return Shared(f"/proc/{os.getpid()}/fd/{handle}", memoryview(mmap.mmap(handle, size)))


def open_at(path: str, writable: bool = False) -> Shared | None:
    """Open what another process has made; None where it is gone, or may not be seen."""
    try:
        with open(path, "r+b" if writable else "rb") as file:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return Shared(path, memoryview(mmap.mmap(file.fileno(), 0, access=access)))
    except (OSError, ValueError):
        return None


def mine(rank: int) -> tuple[Shared, int]:
    """Where this rank's record lies: in what the process that started it has made for all, or in memory of its own."""
    if path := os.environ.get(flags.POSITIONS):
        there = open_at(path, writable=True)
        if there is not None and len(there.memory) >= (rank + 1) * NUM_BYTES:
            return there, rank
    return make(1), 0
