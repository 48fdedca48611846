"""Slices: the one shape that every attention mask is made of.

A slice `(q0, q1, k0, k1, lo, hi)` makes the pair (q, k) visible iff `q0 <= q < q1`, `k0 <= k < k1` and
`lo <= k - q <= hi`. Causal is hi = 0; a window of w keys, the query's own included, is lo = -(w - 1); full has no
bound. Cutting and intersecting slices gives one slice, and the area (number of visible pairs) is closed form.

Many slices are one int64 array of shape [n, 6]; every function here works on such tables, column by column, and makes
them so that columns are contiguous in memory: a packed batch may have 10^5 slices. A table is *canonical*
when no slice is empty, every row and column of each rectangle sees something, and lo and hi are clipped to the
rectangle, so that equal sets of pairs have equal numbers.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hsap.ir.span import ranges

UNBOUNDED = 1 << 40
"""A bound on k - q that no sequence reaches; canonical slices carry the clipped value instead."""

Q0, Q1, K0, K1, LO, HI = range(6)


class Slice(NamedTuple):
    """One slice as plain integers, for printing and for tests; see the module for its meaning."""

    q0: int
    q1: int
    k0: int
    k1: int
    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED


class Kind(IntEnum):
    """Names derived from a canonical slice, for printing and for choosing kernels."""

    FULL = 0
    """The whole rectangle is visible."""
    CAUSAL = 1
    """Cut above the diagonal only (hi binds)."""
    INV_CAUSAL = 2
    """Cut below the diagonal only (lo binds)."""
    BAND = 3
    """Cut on both sides."""


def slices(rows: Iterable[Iterable[int]]) -> np.ndarray:
    """Make a slice table from sequences of six integers: int64 [n, 6], as given (not canonical)."""
    return np.array([tuple(row) for row in rows], dtype=np.int64).reshape(-1, 6)


def shrink(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bring slices to canonical form, dropping the empty ones: (canonical [m, 6], index of the kept rows [m])."""
    q0, q1, k0, k1, lo, hi = table.T
    # A row sees something iff [q + lo, q + hi] meets [k0, k1); then the same for columns with the rows that are left.
    new_q0, new_q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    new_k0, new_k1 = np.maximum(k0, new_q0 + lo), np.minimum(k1, new_q1 + hi)
    lo, hi = np.maximum(lo, new_k0 - new_q1 + 1), np.minimum(hi, new_k1 - 1 - new_q0)
    kept = np.flatnonzero((new_q0 < new_q1) & (new_k0 < new_k1) & (lo <= hi) & (table[:, LO] <= table[:, HI]))
    columns = np.stack([new_q0, new_q1, new_k0, new_k1, lo, hi])
    return (columns if len(kept) == len(table) else columns.take(kept, axis=1)).T, kept


def canonical(table: np.ndarray) -> np.ndarray:
    """Bring slices to canonical form and drop the empty ones: int64 [m, 6]."""
    return shrink(table)[0]


def area(table: np.ndarray) -> np.ndarray:
    """Count the visible pairs of canonical slices in closed form: int64 [n]."""
    q0, q1, k0, k1, lo, hi = table.T
    # Row q sees min(k1 - 1, q + hi) - max(k0, q + lo) + 1 keys; both terms are one ramp and one constant part.
    bend_hi = np.clip(k1 - 1 - hi, q0, q1)
    bend_lo = np.clip(k0 - lo, q0, q1)
    upper = _ramp(q0, bend_hi) + hi * (bend_hi - q0) + (k1 - 1) * (q1 - bend_hi)
    lower = k0 * (bend_lo - q0) + _ramp(bend_lo, q1) + lo * (q1 - bend_lo)
    return upper - lower + (q1 - q0)


def _ramp(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sum the integers of [a, b)."""
    return (a + b - 1) * (b - a) // 2


def kinds(table: np.ndarray) -> np.ndarray:
    """Name canonical slices: int8 [n] of `Kind`."""
    q0, q1, k0, k1, lo, hi = table.T
    cut_above = hi < k1 - 1 - q0
    cut_below = lo > k0 - q1 + 1
    return (cut_above * Kind.CAUSAL + cut_below * Kind.INV_CAUSAL).astype(np.int8)


def cut(table: np.ndarray, q_spans: np.ndarray, k_spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut every slice by a grid of query spans and key spans.

    q_spans, k_spans: sorted disjoint span sets [n, 2]. Returns (pieces [m, 6] canonical, index of the query span [m],
    index of the key span [m]); a piece lies inside one query span and one key span.
    """
    (q_starts, q_stops), (k_starts, k_stops) = np.ascontiguousarray(q_spans.T), np.ascontiguousarray(k_spans.T)
    first_q = np.searchsorted(q_stops, table[:, Q0], side="right")
    stop_q = np.searchsorted(q_starts, table[:, Q1], side="left")
    owner, q_index = ranges(first_q, stop_q)
    q0, q1, k0, k1, lo, hi = table.T.take(owner, axis=1)
    q0 = np.maximum(q0, q_starts[q_index])
    q1 = np.minimum(q1, q_stops[q_index])
    # Only keys that some row of the piece can see: for causal masks this halves the pairs looked at.
    k0 = np.maximum(k0, q0 + lo)
    k1 = np.minimum(k1, q1 + hi)
    first_k = np.searchsorted(k_stops, k0, side="right")
    stop_k = np.searchsorted(k_starts, k1, side="left")
    strip, k_index = ranges(first_k, stop_k)
    pieces = np.stack([q0, q1, k0, k1, lo, hi]).take(strip, axis=1)
    np.maximum(pieces[K0], k_starts[k_index], out=pieces[K0])
    np.minimum(pieces[K1], k_stops[k_index], out=pieces[K1])
    pieces, kept = shrink(pieces.T)
    return pieces, q_index[strip[kept]], k_index[kept]


def mirror(table: np.ndarray) -> np.ndarray:
    """Turn slices round: position p becomes -1 - p, for queries and keys; what was cut above is cut below."""
    return -table[:, [Q1, Q0, K1, K0, HI, LO]]


def squares(table: np.ndarray, narrow: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Decompose canonical slices into full rectangles, causal squares and inverse causal squares.

    For kernels that know `full` and `causal` with as many rows as columns and nothing else: an inverse causal square is
    a causal one with rows and columns turned round. Returns (pieces [m, 6] canonical, index of the slice each comes
    from [m], ascending); disjoint, same pairs. At most three pieces a slice, but a band is first cut into strips of
    rows as tall as it is wide. Bands of fewer than `narrow` diagonals would be crumbs and come back whole.
    """
    kind = kinds(table)
    narrow_band = (kind == Kind.BAND) & (table[:, HI] - table[:, LO] + 1 < narrow)
    whole = np.flatnonzero(narrow_band | (kind == Kind.FULL))
    one_sided = np.flatnonzero((kind == Kind.CAUSAL) | (kind == Kind.INV_CAUSAL))
    halves, source = _halves(table, np.flatnonzero((kind == Kind.BAND) & ~narrow_band))
    sided, source = np.concatenate([table[one_sided], halves]), np.concatenate([one_sided, source])
    below = kinds(sided) == Kind.INV_CAUSAL
    upper, lower = np.flatnonzero(~below), np.flatnonzero(below)
    parts = [table[whole], *_causal_squares(sided[upper]), *map(mirror, _causal_squares(mirror(sided[lower])))]
    pieces, kept = shrink(np.concatenate(parts))
    origin = np.concatenate([whole, *[source[upper]] * 3, *[source[lower]] * 3])[kept]
    order = np.argsort(origin, kind="stable")
    return pieces[order], origin[order]


def _causal_squares(table: np.ndarray) -> list[np.ndarray]:
    """Cut causal slices in three, each table [n, 6] and not canonical: full, causal square, full."""
    q0, q1, k0, k1, _, hi = table.T
    # Keys [k0, split) are visible to every row; keys [split, k1) form a square on the first rows, full below it.
    split = np.minimum(q0 + hi, k1)
    corner = q0 + (k1 - split)
    open_lo, open_hi = np.full_like(q0, -UNBOUNDED), np.full_like(q0, UNBOUNDED)
    return [
        np.stack([q0, q1, k0, split, open_lo, open_hi], axis=1),
        np.stack([q0, corner, split, k1, open_lo, hi], axis=1),
        np.stack([corner, q1, split, k1, open_lo, open_hi], axis=1),
    ]


def _halves(table: np.ndarray, bands: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut bands into strips, and each strip behind what its first row sees: no half is cut on both sides.

    bands: indices into the table. Returns (halves [m, 6] canonical, index of the slice each comes from [m]).
    """
    pieces, owner = strips(table[bands], table[bands, HI] - table[bands, LO] + 1)
    split = pieces[:, Q0] + pieces[:, HI] + 1
    left, right = pieces.copy(), pieces.copy()
    left[:, K1], right[:, K0] = split, split
    halves, kept = shrink(np.concatenate([left, right]))
    return halves, np.concatenate([bands[owner]] * 2)[kept]


def strips(table: np.ndarray, height: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut canonical slices into strips of at most `height` rows each: (canonical [m, 6], index of the slice [m])."""
    rows = table[:, Q1] - table[:, Q0]
    owner, strip = ranges(np.zeros_like(rows), -(-rows // height))
    pieces = table[owner]
    pieces[:, Q0] += strip * height[owner]
    pieces[:, Q1] = np.minimum(pieces[:, Q0] + height[owner], pieces[:, Q1])
    return shrink(pieces)[0], owner


def joined(table: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join canonical slices that follow each other in the table and make up one: (canonical [m, 6], owners [m]).

    owner: int64 [n], whose a slice is; slices of two owners stay apart. Same pairs. Neighbours along the keys are
    joined first and then those along the queries, so that in a table ordered by strips of queries, and by keys in each,
    a mask that was cut by a grid becomes what it was. Every pass joins neighbours two by two.
    """
    for turn in (_as_given, _transposed):
        table = turn(table)
        while True:
            union, first = _unions(table, owner)
            if not len(first):
                break
            kept = np.ones(len(table), bool)
            kept[first + 1] = False
            table = table.T.copy().T
            table[first] = union
            table, owner = table.T[:, kept].T, owner[kept]
        table = turn(table)
    return table, owner


def _as_given(table: np.ndarray) -> np.ndarray:
    return table


def _transposed(table: np.ndarray) -> np.ndarray:
    """Let queries and keys change places."""
    return np.stack([*table.T[[K0, K1, Q0, Q1]], -table[:, HI], -table[:, LO]]).T


def _unions(table: np.ndarray, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find slices that make up one slice with the next, whose keys follow theirs: (unions [m, 6], their indices [m]).

    Of several in a row every other one is given.
    """
    a, b = table[:-1].T, table[1:].T
    likely = (owner[:-1] == owner[1:]) & (a[K1] == b[K0]) & (a[Q0] <= b[Q0]) & (a[Q1] <= b[Q1])
    first = np.flatnonzero(likely)
    a, b = a[:, first], b[:, first]
    # Where the left one ends before the right one does, lo hides the rest; where the right begins later, hi does.
    union = np.stack([a[Q0], b[Q1], a[K0], b[K1], a[LO], b[HI]])
    halves = np.concatenate([union, union], axis=1)
    halves[K1, : len(first)], halves[K0, len(first) :] = a[K1], b[K0]
    pieces, kept = shrink(halves.T)
    same = np.zeros(2 * len(first), bool)
    same[kept] = (np.concatenate([a, b], axis=1)[:, kept] == pieces.T).all(axis=0)
    sound = np.flatnonzero(same[: len(first)] & same[len(first) :])
    first, union = first[sound], union[:, sound]
    begins = np.append(True, np.diff(first) != 1)[: len(first)]
    run = np.maximum.accumulate(np.where(begins, np.arange(len(first)), 0))
    chosen = np.flatnonzero((np.arange(len(first)) - run) % 2 == 0)
    return union[:, chosen].T, first[chosen]


OVERLAPS_AT_ONCE = 1 << 18
"""Pairs of slices that `overlap` looks at together: 12 MiB for each table of them."""


MOST_COMPARED = 32
"""Pairs a slice up to which `overlap` compares what starts early enough; beyond them a sweep takes less time."""


def overlap(table: np.ndarray) -> tuple[int, int] | None:
    """Find two canonical slices that make the same pair visible: their indices, the smaller first, or None."""
    num_pairs, order, stop = min((_later_starts(table, *side) for side in ((Q0, Q1), (K0, K1))), key=lambda s: s[0])
    if num_pairs > MOST_COMPARED * len(table):
        return _swept(table)
    first = np.arange(1, len(table) + 1)
    total = np.concatenate([[0], np.cumsum(stop - first)])
    edges = np.searchsorted(total, np.arange(0, total[-1] + OVERLAPS_AT_ONCE, OVERLAPS_AT_ONCE))
    for lo, hi in itertools.pairwise(edges.tolist()):
        owner, other = ranges(first[lo:hi], stop[lo:hi])
        a, b = order[lo + owner], order[other]
        both = np.where([[True], [False]] * 3, np.maximum(table[a].T, table[b].T), np.minimum(table[a].T, table[b].T))
        kept = shrink(both.T)[1]
        if len(kept):
            i, j = int(a[kept[0]]), int(b[kept[0]])
            return min(i, j), max(i, j)
    return None


def _later_starts(table: np.ndarray, start: int, end: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Order slices by where they start on one side; each may overlap those up to the last that starts before it ends.

    Returns (number of pairs that leaves, order [n], stop [n]): slice order[i] may overlap order[i + 1 : stop[i]].
    """
    order = np.argsort(table[:, start], kind="stable")
    stop = np.searchsorted(table[order, start], table[order, end])
    return int(stop.sum()) - len(table) * (len(table) + 1) // 2, order, stop


def _swept(table: np.ndarray) -> tuple[int, int] | None:
    """Find what `overlap` does row by row, with the slices that a row has in the order of their keys.

    From a row to the next the ends of what a slice shows stay or move on by one key, so that disjoint slices never
    change places, and the first two that meet were neighbours before: it suffices to compare neighbours.
    """
    rows = table.tolist()

    def meet(i: int, j: int) -> bool:
        q0, k0, lo = (max(rows[i][side], rows[j][side]) for side in (Q0, K0, LO))
        q1, k1, hi = (min(rows[i][side], rows[j][side]) for side in (Q1, K1, HI))
        return k0 < k1 and lo <= hi and max(q0, k0 - hi) < min(q1, k1 - lo)

    # A slice leaves before another begins in the row behind its last.
    events = sorted([(row[Q0], 1, i) for i, row in enumerate(rows)] + [(row[Q1], 0, i) for i, row in enumerate(rows)])
    living: list[int] = []
    for now, begins, i in events:
        q = now if begins else now - 1
        at = bisect_left(living, max(rows[i][K0], q + rows[i][LO]), key=lambda j: max(rows[j][K0], q + rows[j][LO]))
        if begins:
            living.insert(at, i)
            neighbours = [(j, i) for j in living[max(at - 1, 0) : at + 2] if j != i]
        else:
            del living[at]
            neighbours = [(living[at - 1], living[at])] if 0 < at < len(living) else []
        for a, b in neighbours:
            if meet(a, b):
                return min(a, b), max(a, b)
    return None


def dense(table: np.ndarray, num_tokens: int) -> np.ndarray:
    """Count how often each pair is visible: int64 [num_tokens, num_tokens]. For small sizes: the oracle of tests."""
    q = np.arange(num_tokens)[:, None]
    k = np.arange(num_tokens)[None, :]
    count = np.zeros((num_tokens, num_tokens), dtype=np.int64)
    for q0, q1, k0, k1, lo, hi in table:
        count += (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
    return count
