"""Cost: what a document's pieces make bins receive, compute and hold. Counted exactly, one document a time.

A document is an ordered list of *pieces*, row intervals, and a bin is a node (level 1) or a rank (level 2). A piece of
order 1 is computed by one bin; one of order k is computed by k bins, which share its head groups first and then, where
there are more bins than groups, the keys before it in column ranges of equal area; each owns 1/k of the rows. A piece
of order 0 is another node's: only its rows matter, as keys.
"""

from __future__ import annotations

import numpy as np
from numba import njit

END, OWN, HEADS, ORDER, HOME, BIN = range(6)
"""Columns of a piece: last row + 1; whether its rows live in these bins; bit set of the head groups to be computed in
these bins; order; home bin and compute bins (up to `MAX_ORDER` columns from BIN on)."""
MAX_ORDER = 8
WIDTH = BIN + MAX_ORDER

BYTES, AREA, TOKENS = range(3)
"""Rows of a load table: what each bin receives, computes (pairs, all heads = 1), holds."""


@njit(cache=True, inline="always")
def area_before(row, area, length):
    """Visible pairs of a document's rows [0, row): closed form, or interpolated in its table."""
    if len(area) == 0:
        return 0.5 * row * (row + 1)
    at = row * (len(area) - 1) / length
    low = min(int(at), len(area) - 2)
    return area[low] + (at - low) * (area[low + 1] - area[low])


@njit(cache=True)
def add_causal(load, pieces, count, sign, weight, costs, groups, reach):
    """Add (sign 1) or take away (sign -1) what a causal document brings the bins.

    costs: bytes of one head group's row of kv, of q, of o. reach: int64 [3, bins, groups], scratch: keys [0, reach[0])
    and those of the column range [reach[1], reach[2]) are needed.
    """
    kv, q, o = costs
    reach[:] = 0
    begin = 0
    for i in range(count):
        piece = pieces[i]
        end = piece[END]
        order = piece[ORDER]
        width = end - begin
        pairs = weight * 0.5 * (end * (end + 1) - begin * (begin + 1))
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
            if own:
                load[TOKENS, home] += sign * width
                load[BYTES, home] += sign * width * o * (groups - here if x == home else groups)
            if here and not (own and x == home):
                load[BYTES, x] += sign * width * q * here
        elif order > 1:
            _add_tile(load, piece, begin, sign, pairs, costs, groups, reach)
        begin = end
    _add_keys(load, pieces, count, sign, kv, groups, reach)


@njit(cache=True)
def _add_tile(load, piece, begin, sign, pairs, costs, groups, reach):
    _, q, o = costs
    end, order = piece[END], piece[ORDER]
    width = end - begin
    head_parts = min(order, groups)
    columns = order // head_parts
    per_part = groups // head_parts
    for j in range(order):
        x = piece[BIN + j]
        mine = width * (j + 1) // order - width * j // order
        load[AREA, x] += sign * pairs / order
        load[TOKENS, x] += sign * mine
        load[BYTES, x] += sign * ((width - mine) * q * per_part + mine * (order - 1) * per_part * o)
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


def no_area_table() -> np.ndarray:
    """The table of a document whose areas are closed form."""
    return np.zeros(0)
