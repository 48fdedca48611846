"""Memory: buffers that are alive together don't share bytes of the arena, and all fit into it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from hsap.ir.effects import live_ranges
from hsap.ir.precision import aligned
from hsap.ir.problem import arena_capacity
from hsap.ir.program import Space
from hsap.ir.sort import order_of
from hsap.ir.span import ranges
from hsap.verify.stream import Found, Stream, at_buffers

PAIRS_PER_BUFFER = 64
"""Pairs of buffers alive together that are compared all at once; a plan with more is swept buffer by buffer."""


def fits(s: Stream) -> Iterator[Found]:
    """No buffer ends beyond the arena's capacity; where the problem sets none, all of a rank's side by side."""
    b, problem = s.buffers, s.plan.problem
    in_arena = b.space == Space.ARENA
    if problem.arena_multiple is None:
        # No plan needs more. Executors make the arena as large as the farthest end, so that one must be in proportion.
        used = np.zeros(len(b), bool)
        used[s.touched.buffer] = True  # the bytes of the others weren't judged
        running = np.concatenate([[0], np.cumsum(np.where(in_arena & used, aligned(b.num_bytes), 0))])
        capacity = np.diff(running[b.offsets])[s.buffer_rank]
    else:
        # Whatever int64 can't hold is more than any buffer's end, which is below 2 ** 62.
        most = min(arena_capacity(problem, int(s.plan.tokens_per_rank.max(initial=0))), 1 << 62)
        capacity = np.full(len(b), most)
    bad = np.flatnonzero(in_arena & (b.offset + b.num_bytes > capacity))
    yield from at_buffers(s, bad, lambda i: f"{s.describe(i)} ends beyond the arena's {capacity[i]} bytes")


def apart(s: Stream) -> Iterator[Found]:
    """Buffers alive together don't overlap; a buffer lives from its first touch to its last, waits included."""
    b = s.buffers
    first, last = live_ranges(s.touched, s.programs)
    index = np.flatnonzero((b.space == Space.ARENA) & (b.num_bytes > 0) & (last >= 0))
    # Instruction indices rise over all ranks, so that buffers of two ranks are never alive together.
    index = index[order_of(first[index])]
    begins, lasts = first[index], last[index]
    low = b.offset[index]
    high = low + b.num_bytes[index]
    stop = np.searchsorted(begins, lasts, side="right")
    following = np.arange(1, len(index) + 1)
    if int(np.maximum(stop - following, 0).sum()) <= PAIRS_PER_BUFFER * len(index):
        one, other = ranges(following, stop)
        clash = np.flatnonzero((low[one] < high[other]) & (low[other] < high[one]))[:1]
        pair = [(int(one[c]), int(other[c])) for c in clash]
    else:
        pair = _sweep(begins.tolist(), lasts.tolist(), low.tolist(), high.tolist())
    for a, c in pair:
        say = f"{s.describe(index[c])} lies on bytes of {s.describe(index[a])}, which is still in use"
        yield Found(say, int(begins[c]))


def _sweep(begins: list, lasts: list, low: list, high: list) -> list[tuple[int, int]]:
    """Find the first overlap by walking through time with the living buffers in address order."""
    alive: list[tuple[int, int]] = []  # (low, buffer); disjoint, so ordered by their ends too
    for now in range(len(begins)):
        place = bisect_left(alive, (low[now], -1))
        while place and lasts[alive[place - 1][1]] < begins[now]:
            place -= 1
            del alive[place]
        if place and high[alive[place - 1][1]] > low[now]:
            return [(alive[place - 1][1], now)]
        while place < len(alive) and alive[place][0] < high[now]:
            if lasts[alive[place][1]] >= begins[now]:
                return [(alive[place][1], now)]
            del alive[place]
        alive.insert(place, (low[now], now))
    return []


RULES = (fits, apart)
