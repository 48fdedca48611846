"""Memory: buffers that are alive together don't share bytes of the arena, and all fit into it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hsap.ir.precision import aligned
from hsap.ir.problem import arena_capacity
from hsap.ir.program import Space
from hsap.ir.sort import order_of
from hsap.loops import loop
from hsap.verify.columns import NUM_BYTES, OFFSET, RANK, SPACE
from hsap.verify.stream import Found, Stream, at_buffers


def fits(s: Stream) -> Iterator[Found]:
    """No buffer ends beyond the arena's capacity; where the problem sets none, all of a rank's side by side."""
    b, problem = s.buffers, s.plan.problem
    in_arena = b.space == Space.ARENA
    if problem.arena_multiple is None:
        # No plan needs more. Executors make the arena as large as the farthest end, so that one must be in proportion.
        used = in_arena & (s.last >= 0)  # the bytes of what isn't touched weren't judged
        running = np.concatenate([[0], np.cumsum(np.where(used, aligned(b.num_bytes), 0))])
        capacity = np.diff(running[b.offsets])[s.held[RANK]]
    else:
        # Whatever int64 can't hold is more than any buffer's end, which is below 2 ** 62.
        most = min(arena_capacity(problem, int(s.plan.tokens_per_rank.max(initial=0))), 1 << 62)
        capacity = np.full(len(b), most)
    bad = np.flatnonzero(in_arena & (b.offset + b.num_bytes > capacity))
    yield from at_buffers(s, bad, lambda i: f"{s.describe(i)} ends beyond the arena's {capacity[i]} bytes")


def apart(s: Stream) -> Iterator[Found]:
    """Buffers alive together don't overlap; a buffer lives from its first touch to its last, waits included."""
    index = np.flatnonzero((s.held[SPACE] == Space.ARENA) & (s.held[NUM_BYTES] > 0) & (s.last >= 0))
    # Instruction indices rise over all ranks, so that buffers of two ranks are never alive together.
    index = index[order_of(s.first[index])]
    low = s.held[OFFSET][index]
    begins = s.first[index]
    one, other = clash(begins, s.last[index], low, low + s.held[NUM_BYTES][index], np.empty_like(begins))
    if one >= 0:
        say = f"{s.describe(index[other])} lies on bytes of {s.describe(index[one])}, which is still in use"
        yield Found(say, int(begins[other]))


@loop
def clash(begins, lasts, low, high, alive):
    """Find two buffers that overlap in time and in bytes: (earlier, later), (-1, -1) where there are none.

    begins: rising. alive: room for as many. A walk through time keeps the living in address order; they are disjoint,
    so ordered by their ends too, and a newcomer is compared with its two neighbours. The dead leave when there are as
    many as living.
    """
    count, room = 0, 16
    for now in range(len(begins)):
        if count == room:
            kept = 0
            for entry in range(count):
                if lasts[alive[entry]] >= begins[now]:
                    alive[kept] = alive[entry]
                    kept += 1
            count, room = kept, 2 * kept + 16
        place, stop = 0, count
        while place < stop:
            middle = (place + stop) // 2
            if low[alive[middle]] < low[now]:
                place = middle + 1
            else:
                stop = middle
        first, stop = place, place
        while first and lasts[alive[first - 1]] < begins[now]:
            first -= 1
        if first and high[alive[first - 1]] > low[now]:
            return alive[first - 1], now
        while stop < count and low[alive[stop]] < high[now]:
            if lasts[alive[stop]] >= begins[now]:
                return alive[stop], now
            stop += 1
        # The newcomer takes the place of [first, stop), all dead.
        if first == stop:
            for i in range(count, first, -1):
                alive[i] = alive[i - 1]
        else:
            for i in range(stop, count):
                alive[i + first + 1 - stop] = alive[i]
        alive[first] = now
        count += first + 1 - stop
    return -1, -1


RULES = (fits, apart)
