"""Buffers: live ranges become places in the arena (HSAP §3.4).

First fit in order of first use: a rank has few buffers alive at once, so the search is short, and a place freed is the
first one taken again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.ir.effects import live_ranges, touches
from hsap.ir.precision import aligned
from hsap.ir.program import NONE, Programs, Space
from hsap.ir.sort import order_of


def place_buffers(programs: Programs) -> Programs:
    """Give every arena buffer its offset [bytes].

    Instruction indices rise over all ranks, so that buffers of two ranks are never alive together: one walk serves all.
    """
    buffers = programs.buffers
    first, last = live_ranges(touches(programs), programs)
    index = np.flatnonzero(buffers.space == Space.ARENA)
    index = index[order_of(first[index])]
    offset = np.full(len(buffers), NONE, np.int64)
    offset[index] = _first_fit(first[index].tolist(), last[index].tolist(), aligned(buffers.num_bytes[index]).tolist())
    return replace(programs, buffers=replace(buffers, offset=offset))


def _first_fit(first: list[int], last: list[int], sizes: list[int]) -> list[int]:
    """Offsets of buffers alive in [first, last] so that buffers alive together don't overlap. first: rising."""
    offsets = []
    alive: list[tuple[int, int, int]] = []  # (offset, end, last use), by offset
    for now, until, size in zip(first, last, sizes):
        alive = [entry for entry in alive if entry[2] >= now]
        place, at = 0, len(alive)
        for i, (begin, end, _) in enumerate(alive):
            if begin - place >= size:
                at = i
                break
            place = end
        offsets.append(place)
        if size:
            alive.insert(at, (place, place + size, until))
    return offsets
