"""Cost: what a document's pieces make bins receive, compute and hold. Counted exactly, one document a time.

A document is an ordered list of *pieces*, row intervals, and a bin is a node (level 1) or a rank (level 2). A piece of
order 1 is computed by one bin; one of order k is computed by k bins, which share its head groups first and then, where
there are more bins than groups, the keys before it in column ranges of equal area; each owns 1/k of the rows. A piece
of order 0 is another node's: only its rows matter, as keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

END, OWN, HEADS, ORDER, HOME, BIN = range(6)
"""Columns of a piece: last row + 1; whether its rows live in these bins; bit set of the head groups to be computed in
these bins; order; home bin and compute bins (up to `MAX_ORDER` columns from BIN on)."""
MAX_ORDER = 8
WIDTH = BIN + MAX_ORDER

BYTES, AREA, TOKENS, PIECES = range(4)
"""Rows of a load table: what each bin receives, computes (pairs, all heads = 1), holds, and in how many pieces."""
NUM_LOADS = 4


class Documents(NamedTuple):
    """Documents as the compiled loops see them.

    weight: float64 [n], factor of the area. table: int64 [n], which row of area, or -1 for a causal document (closed
    forms). length: int64 [n].
    """

    length: np.ndarray
    weight: np.ndarray
    table: np.ndarray
    area: np.ndarray


class Rules(NamedTuple):
    """What a level is judged by.

    kv, q, o: bytes of one head group's row. groups: number of head groups. caps: float64 [2, bins], most area and most
    tokens of each bin. unit: bytes that an excess of one whole cap is worth. peak: weight of the busiest bin's bytes.
    piece: bytes that a piece more is worth.
    """

    kv: float
    q: float
    o: float
    groups: int
    caps: np.ndarray
    unit: float
    peak: float
    piece: float


@njit(cache=True, inline="always")
def area_before(documents, d, row):
    """Pairs of the rows [0, row) of document d: closed form, or interpolated in its table."""
    table = documents.table[d]
    if table < 0:
        return documents.weight[d] * 0.5 * row * (row + 1.0)
    area = documents.area[table]
    at = row * (len(area) - 1) / documents.length[d]
    low = min(int(at), len(area) - 2)
    return documents.weight[d] * (area[low] + (at - low) * (area[low + 1] - area[low]))


@njit(cache=True)
def row_of_area(documents, d, goal):
    """Row before which document d has so many pairs; a real number."""
    goal = max(goal, 0.0)
    table = documents.table[d]
    if table < 0:
        return math.sqrt(2.0 * goal / documents.weight[d] + 0.25) - 0.5
    area = documents.area[table]
    goal = goal / documents.weight[d]
    at = min(max(np.searchsorted(area, goal), 1), len(area) - 1)
    step = area[at] - area[at - 1]
    part = (goal - area[at - 1]) / step if step > 0 else 0.0
    return (at - 1 + min(part, 1.0)) * documents.length[d] / (len(area) - 1)


@njit(cache=True)
def add_document(load, pieces, count, sign, d, documents, rules, reach):
    """Add (sign 1) or take away (sign -1) what a document brings the bins.

    reach: int64 [3, bins, groups], scratch: keys [0, reach[0]) and those of the column range [reach[1], reach[2]) are
    needed.
    """
    reach[:] = 0
    groups = rules.groups
    begin = 0
    before = 0.0
    for i in range(count):
        piece = pieces[i]
        end = piece[END]
        order = piece[ORDER]
        width = end - begin
        up_to = area_before(documents, d, end)
        pairs = up_to - before
        if order == 1:
            x = piece[BIN]
            home = piece[HOME]
            own = piece[OWN]
            here = 0
            for g in range(groups):
                if piece[HEADS] >> g & 1:
                    here += 1
                    reach[0, x, g] = end
            load[AREA, x] += sign * pairs * here / groups
            load[PIECES, x] += sign
            if own:
                load[TOKENS, home] += sign * width
                load[BYTES, home] += sign * width * rules.o * (groups - here if x == home else groups)
            if here and not (own and x == home):
                load[BYTES, x] += sign * width * rules.q * here
        elif order > 1:
            _add_tile(load, piece, begin, sign, pairs, rules, reach)
        begin = end
        before = up_to
    _add_keys(load, pieces, count, sign, rules.kv, groups, reach)


@njit(cache=True)
def _add_tile(load, piece, begin, sign, pairs, rules, reach):
    end, order = piece[END], piece[ORDER]
    width = end - begin
    head_parts = min(order, rules.groups)
    columns = order // head_parts
    per_part = rules.groups // head_parts
    for j in range(order):
        x = piece[BIN + j]
        mine = width * (j + 1) // order - width * j // order
        load[AREA, x] += sign * pairs / order
        load[PIECES, x] += sign
        load[TOKENS, x] += sign * mine
        load[BYTES, x] += sign * per_part * ((width - mine) * rules.q + mine * (order - 1) * rules.o)
        part, column = j % head_parts, j // head_parts
        for g in range(part * per_part, (part + 1) * per_part):
            if columns == 1:
                reach[0, x, g] = end
            else:
                lo, hi = column_range(begin, end, column, columns)
                if reach[2, x, g] == 0:
                    reach[1, x, g] = lo
                reach[1, x, g] = min(reach[1, x, g], lo)
                reach[2, x, g] = max(reach[2, x, g], hi)


@njit(cache=True, inline="always")
def column_range(begin, end, column, columns):
    """Keys of one of a tile's column ranges; all but the last end before the tile's own rows."""
    step = (begin + (end - begin + 1) / 2) / columns
    return int(column * step), end if column == columns - 1 else int((column + 1) * step)


@njit(cache=True)
def _add_keys(load, pieces, count, sign, kv, groups, reach):
    """Add the keys that bins need and don't own."""
    for x in range(reach.shape[1]):
        for g in range(groups):
            if reach[0, x, g] or reach[2, x, g]:
                need = reach[0, x, g] + max(reach[2, x, g] - max(reach[1, x, g], reach[0, x, g]), 0)
                load[BYTES, x] += sign * kv * need
    begin = 0
    for i in range(count):
        piece = pieces[i]
        end = piece[END]
        if piece[OWN]:
            order = piece[ORDER]
            for j in range(order):
                x = piece[HOME] if order == 1 else piece[BIN + j]
                lo = begin + (end - begin) * j // order
                hi = begin + (end - begin) * (j + 1) // order
                for g in range(groups):
                    first = reach[0, x, g]
                    covered = max(min(hi, first) - lo, 0)
                    covered += max(min(hi, reach[2, x, g]) - max(lo, first, reach[1, x, g]), 0)
                    load[BYTES, x] -= sign * kv * covered
        begin = end


@njit(cache=True)
def energy(load, rules, price):
    """Bytes received, plus the priced excess over the caps (a linear and a square-root term: either alone stalls)."""
    total = 0.0
    most = 0.0
    excess = 0.0
    for x in range(load.shape[1]):
        total += load[BYTES, x] + rules.piece * load[PIECES, x]
        most = max(most, load[BYTES, x])
        for k in range(2):
            over = load[AREA + k, x] / rules.caps[k, x] - 1.0
            if over > 1e-9:
                excess += over + 0.05 * math.sqrt(over)
    return total + rules.peak * most + price * rules.unit * excess


@njit(cache=True)
def tidy(pieces, count):
    """Join neighbours of order 1 (or 0) that are alike, in place: the new count."""
    kept = 0
    for i in range(count):
        piece = pieces[i]
        if kept:
            last = pieces[kept - 1]
            if last[ORDER] == piece[ORDER] and last[ORDER] <= 1:
                same = last[OWN] == piece[OWN] and last[HEADS] == piece[HEADS]
                if same and (last[ORDER] == 0 or (last[HOME] == piece[HOME] and last[BIN] == piece[BIN])):
                    last[END] = piece[END]
                    continue
        if kept != i:
            pieces[kept] = piece
        kept += 1
    return kept
