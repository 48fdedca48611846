"""Repair: bring every bin under its caps by the cheapest exact cuts, one at a time.

Area and tokens can be mended apart from each other: rows may be computed by one bin and live in another (their queries
then travel there and the outputs home). So a cut that helps always exists, down to single rows.
"""

from __future__ import annotations

import numpy as np

from hsap.loops import loop
from hsap.planners.nested.cost import (
    AREA,
    BIN,
    END,
    HEADS,
    HOME,
    ORDER,
    OWN,
    add_document,
    area_before,
    energy,
    tidy,
)
from hsap.planners.nested.items import ZERO
from hsap.planners.nested.moves import cut_row, insert, joins, part_of, valid
from hsap.planners.nested.peel import least

MOST_RECEIVERS = 4
WITH_ROWS, COMPUTE_ONLY, HOME_ONLY, TO_NEIGHBOUR = range(4)


@loop
def repair(pieces, counts, documents, load, rules, price, most_steps):
    """Change pieces and counts in place until no bin exceeds a cap or no cut helps; load is kept right."""
    num_bins = load.shape[1]
    reach = np.zeros((3, num_bins, rules.groups), np.int64)
    edit = np.zeros((2, pieces.shape[1], pieces.shape[2]), np.int64)
    trial, over = np.zeros((2, load.shape[0], num_bins)), np.zeros(num_bins)
    receivers = np.zeros(min(MOST_RECEIVERS, num_bins), np.int64)
    for _ in range(most_steps):
        k, x = fullest(load, rules.caps)
        if load[AREA + k, x] <= rules.caps[k, x]:
            return
        for y in range(num_bins):
            over[y] = load[AREA + k, y] - rules.caps[k, y]
        least(over, receivers)
        d, way = ZERO[0] - 1, WITH_ROWS + ZERO[0]
        for _ in range(2):
            if d < 0:
                d, size = _best_cut(
                    pieces, counts, documents, load, rules, price, k, x, receivers, way, edit, trial, reach
                )
            way = COMPUTE_ONLY if k == 0 else HOME_ONLY
        if d < 0:
            return
        for sign in (-1.0, 1.0):
            add_document(load, pieces[d], counts[d], sign, d, documents, rules, reach)
            _copy(edit[1], size, pieces[d])
            counts[d] = size


@loop
def _copy(table, count, out):
    """Write the first `count` rows of a table of any kind over those of another."""
    for i in range(count):
        for k in range(table.shape[1]):
            out[i, k] = table[i, k]


@loop
def _best_cut(pieces, counts, documents, load, rules, price, k, x, receivers, way, edit, trial, reach):
    """Write the document after the cut that leaves the least energy to edit[1]: (document, count), -1 if none helps."""
    best, best_document, best_size = energy(load, rules, price) * (1 - 1e-9), -1, 0
    rows = load.shape[0]
    for d in range(len(counts)):
        count = counts[d]
        fresh = True
        for i in range(count):
            if count + 2 > pieces.shape[1] or not _uses(pieces[d, i], x, k):
                continue
            if fresh:
                fresh = False
                _copy(load, rows, trial[0])
                add_document(trial[0], pieces[d], count, -1.0, d, documents, rules, reach)
            for y in receivers:
                for end in range(4 if way == WITH_ROWS and y == receivers[0] else 2):
                    _copy(pieces[d], count, edit[0])
                    what = way if end < 2 else TO_NEIGHBOUR
                    size = _cut(edit[0], count, i, d, documents, load, rules, k, x, y, end % 2 == 1, what)
                    if size == 0:
                        continue
                    _copy(trial[0], rows, trial[1])
                    add_document(trial[1], edit[0], size, 1.0, d, documents, rules, reach)
                    after = energy(trial[1], rules, price)
                    if after < best:
                        best, best_document, best_size = after, d, size
                        _copy(edit[0], size, edit[1])
    return best_document, best_size


@loop
def fullest(load, caps):
    """Resource (0 area, 1 tokens) and bin that exceed their cap most."""
    worst, x, k = -1.0, 0, 0
    for r in range(2):
        for z in range(load.shape[1]):
            full = load[AREA + r, z] / caps[r, z]
            if full > worst:
                worst, x, k = full, z, r
    return k, x


@loop
def _emptiest(load, caps, k):
    """Bin that has the least of resource k beside its cap."""
    best = 0
    for x in range(load.shape[1]):
        if load[AREA + k, x] / caps[k, x] < load[AREA + k, best] / caps[k, best]:
            best = x
    return best


@loop
def _uses(piece, x, k):
    """Whether a piece loads bin x with resource k."""
    if piece[ORDER] == 1:
        return piece[BIN] == x and piece[HEADS] != 0 if k == 0 else piece[HOME] == x and piece[OWN] != 0
    used = False
    for j in range(piece[ORDER]):
        used = used or piece[BIN + j] == x
    return used


@loop
def _cut(edit, count, i, d, documents, load, rules, k, x, y, at_end, way):
    """Cut what x has too much, and y has room for, off piece i: the new count, 0 where that can't be done."""
    piece = edit[i]
    order = piece[ORDER]
    begin = edit[i - 1, END] if i else 0
    end = piece[END]
    # What leaves a tile relieves each of its bins by a part only, but one bin gets all of it.
    room = rules.caps[k, y] - load[AREA + k, y]
    size = min((load[AREA + k, x] - rules.caps[k, x]) * order, room)
    if way == TO_NEIGHBOUR:
        return _shift(edit, count, i, d, documents, load[AREA + k, x] - rules.caps[k, x], rules, k, at_end)
    if (x == y and order == 1) or size <= 0 or (way == COMPUTE_ONLY and not piece[OWN]) or (order > 1 and at_end):
        return 0
    whole = False
    if k == 0:
        part = part_of(edit, i, rules.groups)
        pairs = size / part
        whole = pairs >= area_before(documents, d, end) - area_before(documents, d, begin)
        row = cut_row(documents, d, begin, end, pairs, 0.0, at_end)
    else:
        rows = max(int(size), 1)
        whole = rows >= end - begin
        row = end - rows if at_end else begin + rows
    if whole:
        if at_end or order > 1:
            return 0
        part_index, size_after = i, count
    else:
        if k == 0 and row == (end if at_end else begin):
            row += -1 if at_end else 1
        if row <= begin or row >= end:
            return 0
        insert(edit, count, i, row)
        part_index, size_after = i + 1 if at_end else i, count + 1
    given = edit[part_index]
    if order > 1:
        # What leaves a tile needs a home and a rank: the emptiest where they aren't y.
        given[ORDER] = 1
        given[BIN], given[HOME] = _emptiest(load, rules.caps, 0), _emptiest(load, rules.caps, 1)
    if way != HOME_ONLY:
        given[BIN] = y
    if way != COMPUTE_ONLY:
        given[HOME] = y
    return tidy(edit, size_after)


@loop
def _shift(edit, count, i, d, documents, size, rules, k, at_end):
    """Move the border of piece i and a neighbour so that each bin of piece i has so much less: the new count, or 0."""
    near = i + 1 if at_end else i - 1
    if near < 0 or near >= count or not joins(edit, i, near):
        return 0
    begin, end = edit[i - 1, END] if i else 0, edit[i, END]
    size = size * edit[i, ORDER]
    if k == 0:
        row = cut_row(documents, d, begin, end, size / part_of(edit, i, rules.groups), 0.0, at_end)
        row += -1 if at_end else 1
    else:
        row = end - int(size) - 1 if at_end else begin + int(size) + 1
    if row <= begin or row >= end:
        return 0
    edit[min(i, near), END] = row
    return count if valid(edit, count) else 0
