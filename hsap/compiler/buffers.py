"""Buffers: live ranges become places in the arena (HSAP §3.4).

First fit in order of first use: a rank has few buffers alive at once, so the search is short, and a place freed is the
first one taken again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.ir.effects import live_ranges
from hsap.ir.precision import aligned
from hsap.ir.program import NONE, Programs, Space, typed


def place_buffers(programs: Programs) -> Programs:
    """Give every arena buffer its offset [bytes]."""
    buffers = programs.buffers
    first, last = live_ranges(programs)
    sizes = aligned(buffers.num_bytes)
    offset = np.full(len(buffers), NONE, np.int64)
    known: dict[tuple, np.ndarray] = {}
    for rank in range(programs.num_ranks):
        lo, hi = buffers.offsets[rank], buffers.offsets[rank + 1]
        index = lo + np.flatnonzero(buffers.space[lo:hi] == Space.ARENA)
        start = programs.offsets[rank]
        key = ((first[index] - start).tobytes(), (last[index] - start).tobytes(), sizes[index].tobytes())
        if key not in known:  # columns with equal head shares have equal streams
            known[key] = _first_fit(first[index], last[index], sizes[index])
        offset[index] = known[key]
    return replace(programs, buffers=typed(replace(buffers, offset=offset)))


def _first_fit(first: np.ndarray, last: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Offsets of buffers alive in [first, last] so that buffers alive together don't overlap."""
    offsets = [0] * len(sizes)
    alive: list[tuple[int, int, int]] = []  # (offset, end, last use), by offset
    begins, ends, lengths = first.tolist(), last.tolist(), sizes.tolist()
    for b in np.argsort(first, kind="stable").tolist():
        now, size = begins[b], lengths[b]
        alive = [entry for entry in alive if entry[2] >= now]
        place, at = 0, 0
        for at, (begin, end, _) in enumerate(alive):  # noqa: B007
            if begin - place >= size:
                break
            place = end
        else:
            at = len(alive)
        offsets[b] = place
        if size:
            alive.insert(at, (place, place + size, ends[b]))
    return np.array(offsets, dtype=np.int64)
