"""Moves: the small changes that the search proposes, each to a copy of one or two documents."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from hsap.planners.nested.cost import AREA, BIN, END, HEADS, HOME, ORDER, OWN, area_before, row_of_area, tidy


@njit(cache=True, inline="always")
def draw(state):
    """Next number in [0, 1) of a xorshift generator. state: uint64 [1]."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return (x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True)
def propose(pieces, counts, documents, load, rules, max_order, state, edit, sizes, which):
    """Write a changed copy of one or two documents to `edit`: how many, 0 where the change makes no sense."""
    n, num_bins = len(counts), load.shape[1]
    u = draw(state)
    d = int(n * u * u) if draw(state) < 0.6 else int(n * u)
    count = counts[d]
    edit[0, :count] = pieces[d, :count]
    sizes[0], which[0] = count, d
    i = int(count * draw(state))
    piece = edit[0, i]
    if piece[ORDER] == 0:
        return 0
    kind = draw(state)
    if kind < 0.2 and piece[ORDER] == 1:
        return _swap(pieces, counts, state, edit, sizes, which, i, int(n * draw(state)))
    if kind < 0.35:
        give(piece, piece[BIN + int(piece[ORDER] * draw(state))], int(num_bins * draw(state)))
    elif kind < 0.6:
        if not _shift(edit[0], count, i, d, documents, load, rules.caps, state):
            return 0
    elif kind < 0.85 or max_order == 1:
        if (
            piece[ORDER] != 1
            or count == edit.shape[1]
            or not _split(edit[0], count, i, d, documents, load, rules.caps, state)
        ):
            return 0
        sizes[0] = count + 1
    elif not _reorder(edit[0], sizes, i, d, documents, rules.groups, max_order, num_bins, state):
        return 0
    sizes[0] = tidy(edit[0], sizes[0])
    return 1 if valid(edit[0], sizes[0]) else 0


@njit(cache=True)
def give(piece, x, y):
    """Let bin y take the place of x; where y is there already they change places."""
    for j in range(piece[ORDER]):
        at = piece[BIN + j]
        piece[BIN + j] = y if at == x else (x if at == y else at)
    if piece[ORDER] == 1:
        piece[HOME] = piece[BIN]


@njit(cache=True)
def _swap(pieces, counts, state, edit, sizes, which, i, e):
    """Exchange the bins of two pieces of order 1, often of different documents."""
    j = int(counts[e] * draw(state))
    if pieces[e, j, ORDER] != 1 or pieces[e, j, BIN] == edit[0, i, BIN]:
        return 0
    x, y = edit[0, i, BIN], pieces[e, j, BIN]
    give(edit[0, i], x, y)
    if e == which[0]:
        give(edit[0, j], y, x)
        sizes[0] = tidy(edit[0], sizes[0])
        return 1
    edit[1, : counts[e]] = pieces[e, : counts[e]]
    give(edit[1, j], y, x)
    sizes[1], which[1] = tidy(edit[1], counts[e]), e
    sizes[0] = tidy(edit[0], sizes[0])
    return 2


@njit(cache=True)
def _amount(pairs, rows, x, y, load, caps, state):
    """How much to take from bin x to bin y of something with so many pairs and rows: (pairs, rows), one of them 0."""
    k = 0 if draw(state) < 0.6 else 1
    size = load[AREA + k, x] - caps[k, x] if draw(state) < 0.5 else caps[k, y] - load[AREA + k, y]
    if size <= 0 or draw(state) < 0.25:
        size = (pairs if k == 0 else rows) * math.exp(-5.0 * draw(state))
    return (size, 0.0) if k == 0 else (0.0, size)


@njit(cache=True)
def cut_row(documents, d, begin, end, pairs, rows, at_end):
    """Row that cuts so many pairs (or rows) off the end or the beginning of [begin, end), rather less than more."""
    if pairs > 0 and at_end:
        return math.ceil(row_of_area(documents, d, area_before(documents, d, end) - pairs))
    if pairs > 0:
        return int(row_of_area(documents, d, area_before(documents, d, begin) + pairs))
    return end - int(rows) if at_end else begin + int(rows)


@njit(cache=True)
def part_of(piece, groups):
    """Share of the head groups that a piece of order 1 is computed for."""
    here = 0
    for g in range(groups):
        here += piece[HEADS] >> g & 1
    return here / groups


@njit(cache=True)
def alike(a, b):
    """Whether two pieces of order 1 differ in nothing but their rows and bins."""
    return a[ORDER] == 1 and b[ORDER] == 1 and joins(a, b)


@njit(cache=True)
def joins(a, b):
    """Whether rows can go from one piece to the other."""
    return a[ORDER] > 0 and b[ORDER] > 0 and a[OWN] == b[OWN] and a[HEADS] == b[HEADS]


@njit(cache=True)
def _shift(edit, count, i, d, documents, load, caps, state):
    """Move the border between piece i and the next."""
    if i + 1 >= count or not joins(edit[i], edit[i + 1]):
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


@njit(cache=True)
def _split(edit, count, i, d, documents, load, caps, state):
    """Cut piece i in two and give one part to another bin."""
    begin = edit[i - 1, END] if i else 0
    end = edit[i, END]
    x = edit[i, BIN]
    if draw(state) < 0.5:
        y = int(load.shape[1] * draw(state))
    else:
        other = edit[int(count * draw(state))]
        if other[ORDER] == 0:
            return False
        y = other[BIN + int(other[ORDER] * draw(state))]
    if x == y:
        return False
    pairs = area_before(documents, d, end) - area_before(documents, d, begin)
    pairs, rows = _amount(pairs, end - begin, x, y, load, caps, state)
    at_end = draw(state) < 0.5
    row = cut_row(documents, d, begin, end, pairs, rows, at_end)
    if row <= begin or row >= end:
        return False
    insert(edit, count, i, row)
    give(edit[i + 1 if at_end else i], x, y)
    return True


@njit(cache=True)
def insert(edit, count, i, row):
    """Cut piece i of `count` in two at a row."""
    for k in range(count, i, -1):
        edit[k] = edit[k - 1]
    edit[i, END] = row


@njit(cache=True)
def _reorder(edit, sizes, i, d, documents, groups, max_order, num_bins, state):
    """Double the order of piece i with new bins, halve it, or join two neighbours of order 1 in one of order 2."""
    piece = edit[i]
    order = piece[ORDER]
    if not piece[OWN] or piece[HEADS] != (1 << groups) - 1:
        return False
    u = draw(state)
    if u < 0.35 and order > 1:
        piece[ORDER] = order // 2
        piece[HOME] = piece[BIN]
        return True
    if 2 * order > min(max_order, num_bins) or (documents.table[d] >= 0 and 2 * order > groups):
        return False
    if u < 0.6 and order == 1 and i + 1 < sizes[0]:
        if not alike(piece, edit[i + 1]):
            return False
        piece[ORDER] = 2
        piece[BIN + 1] = edit[i + 1, BIN]
        piece[END] = edit[i + 1, END]
        for k in range(i + 1, sizes[0] - 1):
            edit[k] = edit[k + 1]
        sizes[0] -= 1
        return True
    for j in range(order, 2 * order):
        piece[BIN + j] = int(num_bins * draw(state))
    piece[ORDER] = 2 * order
    return True


@njit(cache=True)
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
