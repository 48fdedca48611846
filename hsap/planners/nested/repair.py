"""Repair: bring bins under their caps by exact cuts of what they have too much, one at a time.

Area and tokens can be mended apart from each other: rows may be computed by one bin and live in another (their queries
then travel there and the outputs home). So a cut that helps always exists, down to single rows. `mend` makes one cut
that it meets by chance, within a proposal of the search; `repair` makes the cheapest ones, until caps hold.
"""

from __future__ import annotations

import math

import numpy as np

from hsap.loops import inner
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
    copy_load,
    copy_pieces,
    energy,
    fast,
    recount,
    tidy,
)
from hsap.planners.nested.items import ZERO
from hsap.planners.nested.moves import cut_row, draw, insert, joins, part_of, valid
from hsap.planners.nested.peel import least

MOST_RECEIVERS = 4
WITH_ROWS, COMPUTE_ONLY, HOME_ONLY, TO_NEIGHBOUR = range(4)
SMALLER = 0.25
"""Share of what is too much that a cut takes where none helps that takes all of it."""


@inner
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
        d, way, share = ZERO[0] - 1, WITH_ROWS + ZERO[0], 1.0
        for attempt in range(4):
            if d < 0:
                args = (k, x, receivers, way, share, edit, trial, reach)
                d, size = _best_cut(pieces, counts, documents, load, rules, price, *args)
            way = WITH_ROWS if attempt % 2 else (COMPUTE_ONLY if k == 0 else HOME_ONLY)
            # What leaves a tile may be too much for whoever gets it: a part of it then.
            share = 1.0 if attempt < 1 else SMALLER
        if d < 0:
            return
        for sign in (-1.0, 1.0):
            add_document(load, pieces[d], counts[d], sign, d, documents, rules, reach)
            _copy(edit[1], size, pieces[d])
            counts[d] = size


@inner
def _copy(table, count, out):
    """Write the first `count` rows of a table of any kind over those of another."""
    for i in range(count):
        for k in range(table.shape[1]):
            out[i, k] = table[i, k]


@inner
def _best_cut(pieces, counts, documents, load, rules, price, k, x, receivers, way, share, edit, trial, reach):
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
                    size = _cut(edit[0], count, i, d, documents, load, rules, k, x, y, end % 2 == 1, what, share)
                    if size == 0:
                        continue
                    _copy(trial[0], rows, trial[1])
                    add_document(trial[1], edit[0], size, 1.0, d, documents, rules, reach)
                    after = energy(trial[1], rules, price)
                    if after < best:
                        best, best_document, best_size = after, d, size
                        _copy(edit[0], size, edit[1])
    return best_document, best_size


@inner
def fullest(load, caps):
    """Resource (0 area, 1 tokens) and bin that exceed their cap most."""
    worst, x, k = -1.0, 0, 0
    for r in range(2):
        for z in range(load.shape[1]):
            full = load[AREA + r, z] / caps[r, z]
            if full > worst:
                worst, x, k = full, z, r
    return k, x


@fast
def mend(pieces, counts, load, documents, parts, fresh, rules, state, edit, sizes, which, changed, reach, k, x):
    """Cut what bin x has too much of resource k off one of its pieces: number of documents changed.

    Cuts in a document that is changed already, or in one more. y is a bin with room, by chance.
    """
    y, most = 0, -1e300
    for z in range(load.shape[1]):
        free = (rules.caps[k, z] - load[AREA + k, z]) * (0.3 + 0.7 * draw(state))
        if free > most:
            y, most = z, free
    n = len(counts)
    d = int(n * draw(state))
    for _ in range(n):
        d = d + 1 if d + 1 < n else 0
        c = changed
        for e in range(changed):
            c = e if which[e] == d else c
        if c == 3 or (fresh[c, AREA + k, x] if c < changed else parts[d, AREA + k, x]) <= 0:
            continue
        if c == changed and counts[d] > edit.shape[1]:
            continue
        if c == changed:
            copy_pieces(edit, c, pieces, d, counts[d])
            sizes[c], which[c] = counts[d], d
            copy_load(fresh[c], parts[d])
        i = _piece_of(edit[c], sizes[c], x, k, state)
        if i < 0:
            continue
        way = TO_NEIGHBOUR if edit[c, i, ORDER] > 1 or draw(state) < 0.6 else WITH_ROWS
        at_end = draw(state) < 0.5
        after = _cut(edit[c], sizes[c], i, d, documents, load, rules, k, x, y, at_end, way, 1.0)
        if after == 0 and way == TO_NEIGHBOUR and edit[c, i, ORDER] == 1:
            after = _cut(edit[c], sizes[c], i, d, documents, load, rules, k, x, y, at_end, WITH_ROWS, 1.0)
        if after == 0:
            return changed
        sizes[c] = after
        recount(load, fresh[c], fresh[c], edit[c], sizes[c], d, documents, rules, reach)
        return max(changed, c + 1)
    return changed


@fast
def _piece_of(pieces, count, x, k, state):
    """A piece that loads bin x with resource k, -1 where there is none."""
    i = int(count * draw(state))
    for _ in range(count):
        i = i + 1 if i + 1 < count else 0
        if _uses(pieces[i], x, k):
            return i
    return -1


@fast
def _emptiest(load, caps, k):
    """Bin that has the least of resource k beside its cap."""
    best = 0
    for x in range(load.shape[1]):
        if load[AREA + k, x] / caps[k, x] < load[AREA + k, best] / caps[k, best]:
            best = x
    return best


@fast
def _uses(piece, x, k):
    """Whether a piece loads bin x with resource k."""
    if piece[ORDER] == 1:
        return piece[BIN] == x and piece[HEADS] != 0 if k == 0 else piece[HOME] == x and piece[OWN] != 0
    used = False
    for j in range(piece[ORDER]):
        used = used or piece[BIN + j] == x
    return used


@fast
def _cut(edit, count, i, d, documents, load, rules, k, x, y, at_end, way, share):
    """Cut what x has too much, and y has room for, off piece i: the new count, 0 where that can't be done."""
    piece = edit[i]
    order = piece[ORDER]
    begin = edit[i - 1, END] if i else 0
    end = piece[END]
    # What leaves a tile relieves each of its bins by a part only, but one bin gets all of it.
    room, size = rules.caps[k, y] - load[AREA + k, y], (load[AREA + k, x] - rules.caps[k, x]) * order * share
    if way == TO_NEIGHBOUR:
        return _shift(edit, count, i, d, documents, size, rules, k, at_end)
    all_of_it = size <= room
    size = min(size, room)
    if (x == y and order == 1) or size <= 0 or (way == COMPUTE_ONLY and not piece[OWN]) or (order > 1 and at_end):
        return 0
    whole = False
    if k == 0:
        part = part_of(edit, i, rules.groups)
        pairs = size / part
        whole = pairs >= area_before(documents, d, end) - area_before(documents, d, begin)
        row = cut_row(documents, d, begin, end, pairs, 0.0, at_end)
    else:
        rows = max(math.ceil(size) if all_of_it else int(size), 1)
        whole = rows >= end - begin
        row = end - rows if at_end else begin + rows
    if whole:
        if at_end or order > 1:
            return 0
        part_index, size_after = i, count
    else:
        if k == 0 and (
            row == (end if at_end else begin)
            or (all_of_it and _next_fits(documents, d, begin, end, row, at_end, room / part))
        ):
            row += -1 if at_end else 1
        if row <= begin or row >= end or count >= edit.shape[0]:
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


@fast
def _next_fits(documents, d, begin, end, row, at_end, pairs):
    """Whether one row more than those from `row` to the end, or from the beginning to it, has at most so many pairs."""
    if at_end:
        return area_before(documents, d, end) - area_before(documents, d, row - 1) <= pairs
    return area_before(documents, d, row + 1) - area_before(documents, d, begin) <= pairs


@fast
def _shift(edit, count, i, d, documents, size, rules, k, at_end):
    """Move the border of piece i so that its bins together have so much less: the new count, or 0."""
    near = i + 1 if at_end else i - 1
    if near < 0 or near >= count or not joins(edit, i, near):
        return 0
    begin, end = edit[i - 1, END] if i else 0, edit[i, END]
    if k == 0:
        row = cut_row(documents, d, begin, end, size / part_of(edit, i, rules.groups), 0.0, at_end)
        row += -1 if at_end else 1
    else:
        row = end - int(size) - 1 if at_end else begin + int(size) + 1
    if row <= begin or row >= end:
        return 0
    edit[min(i, near), END] = row
    return count if valid(edit, count) else 0
