"""Cost: what a document's pieces make bins receive, compute and hold, counted one document a time.

Exact for causal documents; others are counted from tables of their rows (`documents`).

A document is an ordered list of *pieces*, row intervals, and a bin is a node (level 1) or a rank (level 2). A piece of
order 1 is computed by one bin; one of order k is computed by k bins, which share its head groups first and then, where
there are more bins than groups, the keys before it in column ranges of equal area; each owns 1/k of the rows. A piece
of order 0 is another node's: only its rows matter, as keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hsap.loops import inner, loop

END, OWN, HEADS, ORDER, HOME, BIN = range(6)
"""Columns of a piece: last row + 1; whether its rows live in these bins; bit set of the head groups to be computed in
these bins; order; home bin and compute bins (up to `MAX_ORDER` columns from BIN on)."""
MAX_ORDER = 8
WIDTH = BIN + MAX_ORDER

BYTES, AREA, TOKENS, PIECES = range(4)
"""Rows of a load table: what each bin receives, computes (pairs, all heads = 1), holds, and in how many pieces."""
NUM_LOADS = 4

counted = loop(allocates=False, error_model="numpy")
"""Compile a function that makes no arrays and checks no divisions."""
fast = inner(allocates=False, error_model="numpy")
"""The same for what only loops call."""

POSITION, PAIRS, SLOPE, SEEN = range(4)
"""Rows of a document's curves, from SEEN on `SEEN_ROWS` for each mask."""
FIRST_LOW, FIRST_HIGH, LAST_LOW, LAST_HIGH, SINK_SHARE = range(5)
"""Rows of a mask: what a cell's first and last row see, as lowest key, highest key + 1; then the mask as a whole."""
SEEN_ROWS = 5


class Documents(NamedTuple):
    """Documents as the compiled loops see them, see `hsap.planners.nested.documents`.

    length: int64 [n]. table: int64 [n], which table describes a document, or -1 for a causal one (closed forms).
    curves: float64 [tables, SEEN + SEEN_ROWS · masks, cells + 1], whole numbers but for the shares: rows and pairs
    before each cell border; pairs of a cell's first row; for each mask what a cell's rows see, and in two columns the
    sink (keys from the first on that rows see apart from the others) and the mask's share of the layers.
    """

    length: np.ndarray
    table: np.ndarray
    curves: np.ndarray


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


@fast
def area_before(documents, d, row):
    """Pairs of the rows [0, row) of document d: closed form, or interpolated in its table."""
    table = documents.table[d]
    if table < 0:
        return 0.5 * row * (row + 1.0)
    position, area = documents.curves[table, POSITION], documents.curves[table, PAIRS]
    at = min(max(np.searchsorted(position, row, side="right") - 1, 0), len(position) - 2)
    width = position[at + 1] - position[at]
    if width == 0:
        return area[at]
    even = documents.curves[table, SLOPE, at] * width
    part, pairs = (row - position[at]) / width, area[at + 1] - area[at]
    return area[at] + part * (even + part * (pairs - even))


@fast
def row_of_area(documents, d, goal):
    """Row before which document d has so many pairs; a real number."""
    goal = max(goal, 0.0)
    table = documents.table[d]
    if table < 0:
        return math.sqrt(2.0 * goal + 0.25) - 0.5
    position, area = documents.curves[table, POSITION], documents.curves[table, PAIRS]
    at = min(max(np.searchsorted(area, goal), 1), len(area) - 1)
    width = position[at] - position[at - 1]
    even = documents.curves[table, SLOPE, at - 1] * width
    pairs, wanted = area[at] - area[at - 1], goal - area[at - 1]
    root = math.sqrt(max(even * even + 4.0 * (pairs - even) * wanted, 0.0)) + even
    return position[at - 1] + width * (min(2.0 * wanted / root, 1.0) if root > 0 else 1.0)


@counted
def add_document(load, pieces, count, sign, d, documents, rules, reach):
    """Add (sign 1) or take away (sign -1) what a document brings the bins. reach: int64 [3, bins, groups], scratch."""
    for k in range(3):
        for x in range(load.shape[1]):
            for g in range(rules.groups):
                reach[k, x, g] = 0
    in_columns = False
    for i in range(count):
        in_columns = in_columns or pieces[i, ORDER] > rules.groups
    if documents.table[d] < 0 and not in_columns:
        _add_rows(load, pieces, count, sign, rules, reach)
    else:
        _add_apart(load, pieces, count, sign, d, documents, rules, reach)


@fast
def _add_rows(load, pieces, count, sign, rules, reach):
    """Count a causal document without column ranges, in one pass.

    Every key that a bin needs lies before the last row that it computes, and so does what it owned until then. reach:
    rows up to which a bin needs keys, how many of these it owns, and (for the first group) how many it owns so far.
    """
    groups = rules.groups
    begin, before = 0, 0.0
    for i in range(count):
        end, order, heads = pieces[i, END], pieces[i, ORDER], pieces[i, HEADS]
        width, up_to = end - begin, 0.5 * end * (end + 1.0)
        shift = log2(order)
        per_part = groups >> shift
        for j in range(order):
            x, mine, here, keys = pieces[i, BIN + j], 0, 0, 0
            if order > 1:
                mine = (width * (j + 1) >> shift) - (width * j >> shift)
                load[TOKENS, x] += sign * mine
                reach[2, x, 0] += mine
            elif pieces[i, OWN]:
                home = pieces[i, HOME]
                load[TOKENS, home] += sign * width
                reach[2, home, 0] += width
                mine = width if x == home else 0
            for g in range(j * per_part, (j + 1) * per_part):
                if heads >> g & 1:
                    here += 1
                    keys += end - reach[0, x, g] - reach[2, x, 0] + reach[1, x, g]
                    reach[0, x, g], reach[1, x, g] = end, reach[2, x, 0]
            load[AREA, x] += sign * (up_to - before) * here / groups
            load[PIECES, x] += sign
            load[BYTES, x] += sign * (
                rules.kv * keys + rules.q * (width - mine) * here + rules.o * mine * (groups - here)
            )
            if mine == 0 and order == 1 and pieces[i, OWN]:
                load[BYTES, pieces[i, HOME]] += sign * rules.o * width * groups
        begin, before = end, up_to


@fast
def _add_apart(load, pieces, count, sign, d, documents, rules, reach):
    """Count any document: rows, then keys."""
    groups = rules.groups
    begin, before = 0, 0.0
    for i in range(count):
        end, order = pieces[i, END], pieces[i, ORDER]
        width = end - begin
        up_to = area_before(documents, d, end)
        if order == 1:
            x, home, own, heads = pieces[i, BIN], pieces[i, HOME], pieces[i, OWN], pieces[i, HEADS]
            here = 0
            for g in range(groups):
                if heads >> g & 1:
                    here += 1
                    reach[0, x, g] = end
            load[AREA, x] += sign * (up_to - before) * here / groups
            load[PIECES, x] += sign
            if own:
                load[TOKENS, home] += sign * width
                load[BYTES, home] += sign * width * rules.o * (groups - here if x == home else groups)
            if here and not (own and x == home):
                load[BYTES, x] += sign * width * rules.q * here
        elif order > 1:
            _add_tile(load, pieces, i, begin, sign, up_to - before, rules, reach)
        begin, before = end, up_to
    if documents.table[d] < 0:
        _add_keys(load, pieces, count, sign, rules.kv, groups, reach)
    else:
        for mask in range((documents.curves.shape[1] - SEEN) // SEEN_ROWS):
            _add_masked_keys(load, pieces, count, sign, d, mask, documents, rules, reach)


@loop(inline="always")
def log2(order):
    """Logarithm of an order: 1, 2, 4 or 8."""
    return int(order > 1) + int(order > 2) + int(order > 4)


@fast
def _add_tile(load, pieces, i, begin, sign, pairs, rules, reach):
    end, order = pieces[i, END], pieces[i, ORDER]
    width, shift = end - begin, log2(order)
    head_parts = min(order, rules.groups)
    head_shift = log2(head_parts)
    columns = order >> head_shift
    per_part = rules.groups >> head_shift
    for j in range(order):
        x = pieces[i, BIN + j]
        mine = (width * (j + 1) >> shift) - (width * j >> shift)
        load[AREA, x] += sign * pairs / order
        load[PIECES, x] += sign
        load[TOKENS, x] += sign * mine
        load[BYTES, x] += sign * per_part * ((width - mine) * rules.q + mine * (order - 1) * rules.o)
        part, column = j & (head_parts - 1), j >> head_shift
        for g in range(part * per_part, (part + 1) * per_part):
            if columns == 1:
                reach[0, x, g] = end
            else:
                lo, hi = column_range(begin, end, column, columns)
                if reach[2, x, g] == 0:
                    reach[1, x, g] = lo
                reach[1, x, g] = min(reach[1, x, g], lo)
                reach[2, x, g] = max(reach[2, x, g], hi)


@loop(inline="always")
def column_range(begin, end, column, columns):
    """Keys of one of a tile's column ranges; all but the last end before the tile's own rows."""
    step = (begin + (end - begin + 1) / 2) / columns
    return int(column * step), end if column == columns - 1 else int((column + 1) * step)


@fast
def _add_keys(load, pieces, count, sign, kv, groups, reach):
    """Add the keys that bins need and don't own in a causal document.

    reach: keys [0, reach[0]) and those of the column range [reach[1], reach[2]) are needed.
    """
    for x in range(reach.shape[1]):
        for g in range(groups):
            need = reach[0, x, g] + max(reach[2, x, g] - max(reach[1, x, g], reach[0, x, g]), 0)
            load[BYTES, x] += sign * kv * need
    begin = 0
    for i in range(count):
        end = pieces[i, END]
        if pieces[i, OWN]:
            order = pieces[i, ORDER]
            shift = log2(order)
            for j in range(order):
                x = pieces[i, HOME] if order == 1 else pieces[i, BIN + j]
                lo = begin + ((end - begin) * j >> shift)
                hi = begin + ((end - begin) * (j + 1) >> shift)
                for g in range(groups):
                    first = reach[0, x, g]
                    covered = max(min(hi, first) - lo, 0)
                    covered += max(min(hi, reach[2, x, g]) - max(lo, first, reach[1, x, g]), 0)
                    load[BYTES, x] -= sign * kv * covered
        begin = end


@fast
def _add_masked_keys(load, pieces, count, sign, d, mask, documents, rules, reach):
    """Add the keys that bins need and don't own in a document that isn't causal.

    From the last piece to the first; reach[0]: the keys from here on are counted already (0: none yet, else + 1).
    """
    for k in range(2):
        for x in range(load.shape[1]):
            for g in range(rules.groups):
                reach[k, x, g] = 0
    table, row = documents.table[d], SEEN + SEEN_ROWS * mask + SINK_SHARE
    sink, kv = int(documents.curves[table, row, 0]), rules.kv * documents.curves[table, row, 1] * sign
    for i in range(count - 1, -1, -1):
        piece = pieces[i]
        begin, end = pieces[i - 1, END] if i else 0, piece[END]
        order = piece[ORDER]
        low, high = _span(documents, table, mask, begin, end) if order else (0, 0)
        parts = min(max(order, 1), rules.groups)
        per_part = rules.groups // parts
        for j in range(order):
            x = piece[BIN + j]
            for g in range(rules.groups):
                if not (piece[HEADS] >> g & 1) or (order > 1 and g // per_part != j % parts):
                    continue
                known = reach[0, x, g] - 1
                if known < 0:
                    load[BYTES, x] += kv * sink
                    known = high
                load[BYTES, x] += kv * max(min(high, known) - max(low, sink), 0)
                reach[0, x, g] = min(known, low) + 1
                reach[1, x, g] = i + 1
        for j in range(order if piece[OWN] else 0):
            x = piece[HOME] if order == 1 else piece[BIN + j]
            first, stop = begin + (end - begin) * j // order, begin + (end - begin) * (j + 1) // order
            for g in range(rules.groups):
                if reach[1, x, g] == i + 1 or (reach[0, x, g] and reach[0, x, g] - 1 <= first):
                    load[BYTES, x] -= kv * (stop - first)
                elif reach[0, x, g] and first < sink:
                    load[BYTES, x] -= kv * (min(stop, sink) - first)


@fast
def _span(documents, table, mask, begin, end):
    """Lowest key and highest + 1 that the rows [begin, end) see beside the sink."""
    rows = SEEN + SEEN_ROWS * mask
    position, keys = documents.curves[table, POSITION], documents.curves[table, rows : rows + SEEN_ROWS]
    at = min(max(np.searchsorted(position, begin, side="right") - 1, 0), len(position) - 2)
    low, high = float(1 << 60), 0.0
    while at < len(position) - 1 and position[at] < end:
        width = position[at + 1] - position[at]
        if width > 0:
            steps = max(width - 1, 1)
            for row in (max(begin, position[at]), min(end, position[at + 1]) - 1):
                part = (row - position[at]) / steps
                low = min(low, keys[FIRST_LOW, at] + part * (keys[LAST_LOW, at] - keys[FIRST_LOW, at]))
                high = max(high, keys[FIRST_HIGH, at] + part * (keys[LAST_HIGH, at] - keys[FIRST_HIGH, at]))
        at += 1
    return int(min(low, high)), math.ceil(high)


@fast
def judge(load, rules):
    """Judge a load: (bytes and what they weigh, excess over the caps, its worst: resource, bin or -1, -1; busiest bin).

    Excess has a linear and a square-root term: either alone stalls.
    """
    total, most, excess, busiest = 0.0, 0.0, 0.0, 0
    worst, k, x = 0.0, -1, -1
    for z in range(load.shape[1]):
        total += load[BYTES, z] + rules.piece * load[PIECES, z]
        if load[BYTES, z] > most:
            most, busiest = load[BYTES, z], z
    for r in range(2):
        for z in range(load.shape[1]):
            cap = rules.caps[r, z]
            if load[AREA + r, z] > cap * (1.0 + 1e-9):
                over = load[AREA + r, z] / cap - 1.0
                excess += over + 0.05 * math.sqrt(over)
                if over > worst:
                    worst, k, x = over, r, z
    return total + rules.peak * most, excess, k, x, busiest


@fast
def energy(load, rules, price):
    """Bytes received, plus the priced excess over the caps."""
    cost, excess, _, _, _ = judge(load, rules)
    return cost + price * rules.unit * excess


@fast
def copy_load(target, source):
    """Copy a load table."""
    for k in range(NUM_LOADS):
        for x in range(target.shape[1]):
            target[k, x] = source[k, x]


@fast
def recount(load, old, fresh, pieces, count, d, documents, rules, reach):
    """Count a changed document into fresh and put it in the place of the old one in the load. old may be fresh."""
    for k in range(NUM_LOADS):
        for x in range(load.shape[1]):
            load[k, x] -= old[k, x]
            fresh[k, x] = 0.0
    add_document(fresh, pieces, count, 1.0, d, documents, rules, reach)
    for k in range(NUM_LOADS):
        for x in range(load.shape[1]):
            load[k, x] += fresh[k, x]


@fast
def copy_pieces(target, c, source, d, count):
    """Copy the first pieces of document d of one list to document c of another."""
    for i in range(count):
        for k in range(WIDTH):
            target[c, i, k] = source[d, i, k]


@fast
def tidy(pieces, count):
    """Join neighbours of order 1 (or 0) that are alike, in place: the new count."""
    kept = 0
    for i in range(count):
        order = pieces[i, ORDER]
        if kept and order <= 1:
            last = kept - 1
            same = pieces[last, ORDER] == order and pieces[last, OWN] == pieces[i, OWN]
            same = same and pieces[last, HEADS] == pieces[i, HEADS]
            same_bins = pieces[last, HOME] == pieces[i, HOME] and pieces[last, BIN] == pieces[i, BIN]
            if same and (order == 0 or same_bins):
                pieces[last, END] = pieces[i, END]
                continue
        if kept != i:
            for k in range(WIDTH):
                pieces[kept, k] = pieces[i, k]
        kept += 1
    return kept
