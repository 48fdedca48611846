"""Moves: the small changes that the search proposes, each to a copy of one or two documents."""

from __future__ import annotations

import math

import numpy as np

from hsap.loops import loop
from hsap.planners.nested.cost import (
    AREA,
    BIN,
    BYTES,
    END,
    HEADS,
    HOME,
    ORDER,
    OWN,
    WIDTH,
    area_before,
    copy_pieces,
    fast,
    row_of_area,
    tidy,
)

AT_BUSIEST = 0.5
"""Share of the proposals that change a document which the busiest bin receives something of."""


@loop(inline="always")
def draw(state):
    """Next number in [0, 1) of a xorshift generator. state: uint64 [1]."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return (x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@fast
def propose(pieces, counts, documents, load, parts, busiest, rules, max_order, state, edit, sizes, which):
    """Write a changed copy of one or two documents to `edit`: how many, 0 where the change makes no sense.

    Large documents are looked at more often, and where it counts those that the busiest bin receives something of.
    """
    n, num_bins = len(counts), load.shape[1]
    u = draw(state)
    d = int(n * u * u) if draw(state) < 0.6 else int(n * u)
    if rules.peak > 0 and draw(state) < AT_BUSIEST:
        for _ in range(n):
            if parts[d, BYTES, busiest] > 0:
                break
            d = d + 1 if d + 1 < n else 0
    count = counts[d]
    if count > edit.shape[1]:
        return 0
    i = int(count * draw(state))
    order = pieces[d, i, ORDER]
    if order == 0:
        return 0
    kind = draw(state)
    if kind < 0.2 and order == 1:
        return _swap(pieces, counts, state, edit, sizes, which, d, i)
    copy_pieces(edit, 0, pieces, d, count)
    sizes[0], which[0] = count, d
    first = edit[0]
    if kind < 0.35:
        x, y = first[i, BIN + int(order * draw(state))], int(num_bins * draw(state))
        if x == y:
            return 0
        give(first, i, x, y)
    elif kind < 0.6:
        if not _shift(first, count, i, d, documents, load, rules.caps, state):
            return 0
    elif kind < 0.85 or max_order == 1:
        if order != 1 or count >= edit.shape[1]:
            return 0
        if not _split(first, count, i, d, documents, load, rules.caps, state):
            return 0
        sizes[0] = count + 1
    else:
        may_grow = 2 * order <= min(max_order, num_bins) and (documents.table[d] < 0 or 2 * order <= rules.groups)
        sizes[0] = _reorder(first, count, i, rules.groups, may_grow, num_bins, state)
    sizes[0] = tidy(first, sizes[0])
    return 1 if sizes[0] and valid(first, sizes[0]) else 0


@fast
def give(edit, i, x, y):
    """Let bin y take the place of x in piece i; where y is there already they change places."""
    for j in range(edit[i, ORDER]):
        at = edit[i, BIN + j]
        edit[i, BIN + j] = y if at == x else (x if at == y else at)
    if edit[i, ORDER] == 1:
        edit[i, HOME] = edit[i, BIN]


@fast
def _swap(pieces, counts, state, edit, sizes, which, d, i):
    """Exchange the bins of two pieces of order 1, often of different documents."""
    e = int(len(counts) * draw(state))
    j = int(counts[e] * draw(state))
    x, y = pieces[d, i, BIN], pieces[e, j, BIN]
    if pieces[e, j, ORDER] != 1 or x == y or counts[e] > edit.shape[1]:
        return 0
    copy_pieces(edit, 0, pieces, d, counts[d])
    first = edit[0]
    give(first, i, x, y)
    which[0] = d
    if e == d:
        give(first, j, y, x)
        sizes[0] = tidy(first, counts[d])
        return 1
    sizes[0] = tidy(first, counts[d])
    copy_pieces(edit, 1, pieces, e, counts[e])
    second = edit[1]
    give(second, j, y, x)
    sizes[1], which[1] = tidy(second, counts[e]), e
    return 2


@fast
def _amount(pairs, rows, x, y, load, caps, state):
    """How much to take from bin x to bin y of something with so many pairs and rows: (pairs, rows), one of them 0."""
    k = 0 if draw(state) < 0.6 else 1
    size = load[AREA + k, x] - caps[k, x] if draw(state) < 0.5 else caps[k, y] - load[AREA + k, y]
    if size <= 0 or draw(state) < 0.25:
        size = (pairs if k == 0 else rows) * math.exp(-5.0 * draw(state))
    return (size, 0.0) if k == 0 else (0.0, size)


@fast
def cut_row(documents, d, begin, end, pairs, rows, at_end):
    """Row that cuts so many pairs (or rows) off the end or the beginning of [begin, end), rather less than more."""
    if pairs > 0 and at_end:
        return math.ceil(row_of_area(documents, d, area_before(documents, d, end) - pairs))
    if pairs > 0:
        return int(row_of_area(documents, d, area_before(documents, d, begin) + pairs))
    return end - int(rows) if at_end else begin + int(rows)


@fast
def part_of(edit, i, groups):
    """Share of the head groups that piece i, of order 1, is computed for."""
    here = 0
    for g in range(groups):
        here += edit[i, HEADS] >> g & 1
    return here / groups


@fast
def joins(edit, i, j):
    """Whether rows can go from piece i to piece j."""
    if edit[i, ORDER] == 0 or edit[j, ORDER] == 0:
        return False
    return edit[i, OWN] == edit[j, OWN] and edit[i, HEADS] == edit[j, HEADS]


@fast
def _shift(edit, count, i, d, documents, load, caps, state):
    """Move the border between piece i and the next."""
    if i + 1 >= count or not joins(edit, i, i + 1):
        return False
    begin = edit[i - 1, END] if i else 0
    middle, end = edit[i, END], edit[i + 1, END]
    x = edit[i, BIN + int(edit[i, ORDER] * draw(state))]
    y = edit[i + 1, BIN + int(edit[i + 1, ORDER] * draw(state))]
    down = draw(state) < 0.5
    if not down:
        begin, end, x, y = middle, end, y, x
        pairs = area_before(documents, d, end) - area_before(documents, d, begin)
    else:
        end = middle
        pairs = area_before(documents, d, end) - area_before(documents, d, begin)
    pairs, rows = _amount(pairs, end - begin, x, y, load, caps, state)
    row = cut_row(documents, d, begin, end, pairs, rows, down)
    if row <= begin or row >= end:
        return False
    edit[i, END] = row
    return True


@fast
def _split(edit, count, i, d, documents, load, caps, state):
    """Cut piece i in two and give one part to another bin."""
    begin = edit[i - 1, END] if i else 0
    end = edit[i, END]
    x = edit[i, BIN]
    if draw(state) < 0.5:
        y = int(load.shape[1] * draw(state))
    else:
        other = int(count * draw(state))
        if edit[other, ORDER] == 0:
            return False
        y = edit[other, BIN + int(edit[other, ORDER] * draw(state))]
    if x == y:
        return False
    pairs = area_before(documents, d, end) - area_before(documents, d, begin)
    pairs, rows = _amount(pairs, end - begin, x, y, load, caps, state)
    at_end = draw(state) < 0.5
    row = cut_row(documents, d, begin, end, pairs, rows, at_end)
    if row <= begin or row >= end:
        return False
    insert(edit, count, i, row)
    give(edit, i + 1 if at_end else i, x, y)
    return True


@fast
def insert(edit, count, i, row):
    """Cut piece i of `count` in two at a row."""
    for k in range(count, i, -1):
        for c in range(WIDTH):
            edit[k, c] = edit[k - 1, c]
    edit[i, END] = row


@fast
def _reorder(edit, count, i, groups, may_grow, num_bins, state):
    """Double the order of piece i with new bins, halve it, or join two of order 1 in one: the new count, or 0."""
    order = edit[i, ORDER]
    if not edit[i, OWN] or edit[i, HEADS] != (1 << groups) - 1:
        return 0
    u = draw(state)
    if u < 0.35 and order > 1:
        edit[i, ORDER] = order // 2
        edit[i, HOME] = edit[i, BIN]
        return count
    if not may_grow:
        return 0
    if u < 0.6 and order == 1 and i + 1 < count:
        if edit[i + 1, ORDER] != 1 or not joins(edit, i, i + 1):
            return 0
        edit[i, ORDER] = 2
        edit[i, BIN + 1] = edit[i + 1, BIN]
        edit[i, END] = edit[i + 1, END]
        for k in range(i + 1, count - 1):
            for c in range(WIDTH):
                edit[k, c] = edit[k + 1, c]
        return count - 1
    for j in range(order, 2 * order):
        edit[i, BIN + j] = int(num_bins * draw(state))
    edit[i, ORDER] = 2 * order
    return count


@fast
def valid(edit, count):
    """Whether bins of a tile differ and its columns end before its own rows."""
    begin = 0
    for i in range(count):
        order = edit[i, ORDER]
        if order > 1:
            width = edit[i, END] - begin
            if width < order or (order > 2 and width > 0.5 * begin):
                return False
            for j in range(order):
                for k in range(j):
                    if edit[i, BIN + j] == edit[i, BIN + k]:
                        return False
        begin = edit[i, END]
    return True
