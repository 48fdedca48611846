"""Memory: buffers that are alive together don't share bytes of the arena, and all fit into it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hsap.ir.precision import ALIGNMENT
from hsap.ir.problem import arena_capacity
from hsap.ir.program import Space
from hsap.ir.sort import order_of
from hsap.loops import loop
from hsap.verify.columns import NUM_BYTES, OFFSET, RANK, SPACE
from hsap.verify.stream import Found, Stream, at_buffers


def fits(s: Stream) -> Iterator[Found]:
    """No buffer ends beyond the arena's capacity; where the problem sets none, all of a rank's side by side."""
    problem, most = s.plan.problem, -1
    if problem.arena_multiple is not None:
        most = arena_capacity(problem, int(s.plan.tokens_per_rank.max(initial=0)))
    capacity, beyond = _beyond(s.held, s.last, s.plan.num_ranks, most)
    say = "{} ends beyond the arena's {} bytes"
    yield from at_buffers(s, np.flatnonzero(beyond), lambda i: say.format(s.describe(i), capacity[s.held[RANK, i]]))


@loop
def _beyond(held: np.ndarray, last: np.ndarray, num_ranks: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that each rank may use, and whether a buffer ends beyond them. most: of each rank, -1 without a limit."""
    capacity, beyond = np.full(num_ranks, max(most, 0)), np.zeros(held.shape[1], np.bool_)
    if most < 0:
        # No plan needs more. Executors make the arena as large as the farthest end, so that one must be in proportion.
        for b in range(len(beyond)):
            if held[SPACE, b] == Space.ARENA and last[b] >= 0:  # the bytes of what isn't touched weren't judged
                capacity[held[RANK, b]] += -(-held[NUM_BYTES, b] // ALIGNMENT) * ALIGNMENT
    for b in range(len(beyond)):
        end = held[OFFSET, b] + held[NUM_BYTES, b]
        beyond[b] = held[SPACE, b] == Space.ARENA and end > capacity[held[RANK, b]]
    return capacity, beyond


def apart(s: Stream) -> Iterator[Found]:
    """Buffers alive together don't overlap; a buffer lives from its first touch to its last, waits included."""
    assert s.first is not None and s.last is not None, "judged before"
    index = np.flatnonzero((s.held[SPACE] == Space.ARENA) & (s.held[NUM_BYTES] > 0) & (s.last >= 0))
    # Instruction indices rise over all ranks, so that buffers of two ranks are never alive together.
    begins = s.first[index]
    by_begin = order_of(begins)
    index, begins = index[by_begin], begins[by_begin]
    low = s.held[OFFSET, index]
    one, other = clash(begins, s.last[index], low, low + s.held[NUM_BYTES, index], np.empty_like(begins))
    if one >= 0:
        say = f"{s.describe(index[other])} lies on bytes of {s.describe(index[one])}, which is still in use"
        yield Found(say, int(begins[other]))


@loop
def clash(
    begins: np.ndarray, lasts: np.ndarray, low: np.ndarray, high: np.ndarray, alive: np.ndarray
) -> tuple[int, int]:
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
