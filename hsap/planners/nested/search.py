"""Search: thousands of small changes to the pieces, kept when they lower the energy or by chance (annealing).

A proposal changes one or two documents; only these are counted again. The energy is what bins receive together, plus
`peak` times what the busiest receives, plus a price for exceeding the caps that rises as the search goes on. Changes
that shift or split often aim at a cap exactly, which keeps cuts few. Everything is seeded: effort is a number of
proposals, never a time.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from hsap.planners.nested.cost import AREA, BIN, BYTES, END, HEADS, HOME, ORDER, OWN, TOKENS, add_causal


@njit(cache=True, inline="always")
def _random(state):
    """Next number in [0, 1) of a xorshift generator. state: uint64 [1]."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return (x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True)
def energy(load, caps, price, unit, peak):
    """Bytes received, plus the priced excess over the caps. unit: bytes that an excess of one whole cap is worth."""
    total = 0.0
    most = 0.0
    excess = 0.0
    for x in range(load.shape[1]):
        total += load[BYTES, x]
        most = max(most, load[BYTES, x])
        for k in range(2):
            over = load[AREA + k, x] / caps[k] - 1.0
            if over > 1e-9:
                excess += over + 0.05 * math.sqrt(over)
    return total + peak * most + price * unit * excess


@njit(cache=True)
def anneal(pieces, counts, weights, load, rules, proposals, heat, price, peak, max_order, seed):
    """Change pieces and counts in place, keep load right, leave the best state met.

    pieces: int64 [documents, places, WIDTH]; counts: int64 [documents]; documents by falling area. weights: factor of
    a document's area. load: float64 [3, bins]. rules: (costs, groups, caps, unit). heat, price: (first, last).
    """
    costs, groups, caps, unit = rules
    num_bins = load.shape[1]
    state = np.array([np.uint64(seed * 2654435761 + 88172645463325252)])
    reach = np.zeros((3, num_bins, groups), np.int64)
    edit = np.zeros((3, pieces.shape[1], pieces.shape[2]), np.int64)
    sizes, which = np.zeros(3, np.int64), np.zeros(3, np.int64)
    kept = load.copy()
    best_pieces, best_counts, best_load = pieces.copy(), counts.copy(), load.copy()
    best = energy(load, caps, price[1], unit, peak)
    now_price = price[0]
    now = energy(load, caps, now_price, unit, peak)
    stale = np.zeros(len(counts), np.bool_)
    for step in range(proposals):
        done = step / proposals
        if step % 64 == 0:
            now_heat = heat[0] * (heat[1] / heat[0]) ** done
            now_price = price[0] * (price[1] / price[0]) ** done
            now = energy(load, caps, now_price, unit, peak)
        changed = _propose(pieces, counts, weights, load, caps, groups, max_order, state, edit, sizes, which)
        if changed == 0:
            continue
        kept[:] = load
        for c in range(changed):
            d = which[c]
            add_causal(load, pieces[d], counts[d], -1.0, weights[d], costs, groups, reach)
            add_causal(load, edit[c], sizes[c], 1.0, weights[d], costs, groups, reach)
        for _ in range(FIX):
            x, k = _fullest(load, caps)
            if load[AREA + k, x] <= caps[k] or _random(state) < PF:
                break
            changed = _mend(pieces, counts, weights, load, rules, state, edit, sizes, which, changed, reach, x, k)
        after = energy(load, caps, now_price, unit, peak)
        if after > now and _random(state) >= math.exp((now - after) / now_heat):
            load[:] = kept
            continue
        now = after
        for c in range(changed):
            d = which[c]
            pieces[d, : sizes[c]] = edit[c, : sizes[c]]
            counts[d] = sizes[c]
            stale[d] = True
        final = energy(load, caps, price[1], unit, peak)
        if final < best - 1e-6:
            best = final
            for d in range(len(counts)):
                if stale[d]:
                    best_pieces[d, : counts[d]] = pieces[d, : counts[d]]
                    best_counts[d] = counts[d]
                    stale[d] = False
            best_load[:] = load
    pieces[:], counts[:], load[:] = best_pieces, best_counts, best_load
    return best

FIX=1
PF=0.3

@njit(cache=True)
def _fullest(load, caps):
    """Bin and resource (0 area, 1 tokens) that exceed their cap most."""
    worst, at, kind = -1.0, 0, 0
    for k in range(2):
        for x in range(load.shape[1]):
            if load[AREA + k, x] / caps[k] > worst:
                worst, at, kind = load[AREA + k, x] / caps[k], x, k
    return at, kind


@njit(cache=True)
def _mend(pieces, counts, weights, load, rules, state, edit, sizes, which, changed, reach, x, k):
    """Cut what bin x has too much off one of its pieces, for a neighbour or for any bin with room: documents changed."""
    costs, groups, caps, _ = rules
    n = len(counts)
    y, room = 0, -1e18
    for z in range(load.shape[1]):
        free = (caps[k] - load[AREA + k, z]) * (0.3 + 0.7 * _random(state))
        if free > room:
            y, room = z, free
    first = int(n * _random(state))
    for step in range(n):
        d = (first + step) % n
        c = changed
        for e in range(changed):
            if which[e] == d:
                c = e
        if c == 3:
            continue
        if c == changed:
            edit[c, : counts[d]] = pieces[d, : counts[d]]
            sizes[c], which[c] = counts[d], d
        found = -1
        start = int(sizes[c] * _random(state))
        for j in range(sizes[c]):
            i = (start + j) % sizes[c]
            if edit[c, i, ORDER] == 1 and edit[c, i, BIN] == x:
                found = i
                break
        if found < 0:
            continue
        add_causal(load, edit[c], sizes[c], -1.0, weights[d], costs, groups, reach)
        begin = edit[c, found - 1, END] if found else 0
        end = edit[c, found, END]
        size = load[AREA + k, x] - caps[k]
        add_causal(load, edit[c], sizes[c], 1.0, weights[d], costs, groups, reach)
        size = load[AREA + k, x] - caps[k]
        at_end = _random(state) < 0.5
        near = found + 1 if at_end else found - 1
        shift = 0 <= near < sizes[c] and edit[c, near, ORDER] == 1 and edit[c, near, OWN] == edit[c, found, OWN]
        shift = shift and edit[c, near, HEADS] == edit[c, found, HEADS] and _random(state) < 0.7
        if k == 0:
            row = _place(begin, end, weights[d], size, 0.0, at_end)
        else:
            row = _place(begin, end, weights[d], 0.0, size, at_end)
        if k == 0:
            row += -1 if at_end else 1
        if row <= begin or row >= end:
            return changed
        if not shift and sizes[c] + 1 > edit.shape[1]:
            return changed
        add_causal(load, edit[c], sizes[c], -1.0, weights[d], costs, groups, reach)
        if shift:
            edit[c, min(found, near), END] = row
        else:
            for m in range(sizes[c], found, -1):
                edit[c, m] = edit[c, m - 1]
            edit[c, found, END] = row
            _give(edit[c, found + 1 if at_end else found], x, y)
            sizes[c] = tidy(edit[c], sizes[c] + 1)
        add_causal(load, edit[c], sizes[c], 1.0, weights[d], costs, groups, reach)
        return max(changed, c + 1)
    return changed


@njit(cache=True)
def _propose(pieces, counts, weights, load, caps, groups, max_order, state, edit, sizes, which):
    """Write a changed copy of one or two documents to `edit`: how many, 0 where the change makes no sense."""
    num_documents, num_bins = len(counts), load.shape[1]
    u = _random(state)
    d = int(num_documents * u * u) if _random(state) < 0.6 else int(num_documents * u)
    count = counts[d]
    edit[0, :count] = pieces[d, :count]
    sizes[0], which[0] = count, d
    i = int(count * _random(state))
    piece = edit[0, i]
    if piece[ORDER] == 0:
        return 0
    kind = _random(state)
    if kind < 0.2 and piece[ORDER] == 1:
        e = int(num_documents * _random(state))
        return _swap(pieces, counts, state, edit, sizes, which, d, i, e)
    if kind < 0.35:
        y = int(num_bins * _random(state))
        _give(piece, piece[BIN + int(piece[ORDER] * _random(state))], y)
    elif kind < 0.6:
        if not _shift(edit[0], count, i, weights[d], load, caps, state):
            return 0
    elif kind < 0.85 or max_order == 1:
        if piece[ORDER] != 1 or count + 1 > edit.shape[1] or not _split(edit[0], count, i, weights[d], load, caps, state):
            return 0
        sizes[0] = count + 1
    elif not _reorder(edit[0], sizes, i, groups, max_order, num_bins, state):
        return 0
    sizes[0] = tidy(edit[0], sizes[0])
    return 1 if valid(edit[0], sizes[0]) else 0


@njit(cache=True)
def _give(piece, x, y):
    """Let y take the place of x; where y is there already they change places."""
    for j in range(piece[ORDER]):
        at = piece[BIN + j]
        piece[BIN + j] = y if at == x else (x if at == y else at)
    if piece[ORDER] == 1:
        piece[HOME] = piece[BIN]


@njit(cache=True)
def _swap(pieces, counts, state, edit, sizes, which, d, i, e):
    """Exchange the bins of two pieces of order 1, often of different documents."""
    j = int(counts[e] * _random(state))
    if pieces[e, j, ORDER] != 1 or pieces[e, j, BIN] == edit[0, i, BIN]:
        return 0
    x, y = edit[0, i, BIN], pieces[e, j, BIN]
    _give(edit[0, i], x, y)
    if e == d:
        _give(edit[0, j], y, x)
        sizes[0] = tidy(edit[0], sizes[0])
        return 1
    edit[1, : counts[e]] = pieces[e, : counts[e]]
    _give(edit[1, j], y, x)
    sizes[1], which[1] = tidy(edit[1], counts[e]), e
    sizes[0] = tidy(edit[0], sizes[0])
    return 2


@njit(cache=True)
def _amount(pairs, rows, x, y, load, caps, state):
    """How much to take from bin x to bin y of something with so many pairs and rows: (pairs, rows), one of them 0."""
    k = 0 if _random(state) < 0.6 else 1
    size = load[AREA + k, x] - caps[k] if _random(state) < 0.5 else caps[k] - load[AREA + k, y]
    if size <= 0 or _random(state) < 0.25:
        size = (pairs if k == 0 else rows) * math.exp(-5.0 * _random(state))
    return (size, 0.0) if k == 0 else (0.0, size)


@njit(cache=True)
def _place(begin, end, weight, pairs, rows, at_end):
    """Row that cuts so many pairs or rows off the end (or the beginning) of [begin, end)."""
    if pairs > 0:
        before = 0.5 * begin * (begin + 1)
        goal = 0.5 * end * (end + 1) - pairs / weight if at_end else before + pairs / weight
        if goal < before:
            return begin
        # Rounded so that what is cut off is never more than asked for.
        row = math.sqrt(2.0 * goal + 0.25) - 0.5
        return int(math.ceil(row)) if at_end else int(row)
    return end - int(rows) if at_end else begin + int(rows)


@njit(cache=True)
def _shift(edit, count, i, weight, load, caps, state):
    """Move the border between piece i and the next."""
    if i + 1 >= count or edit[i, ORDER] != 1 or edit[i + 1, ORDER] != 1:
        return False
    if edit[i, OWN] != edit[i + 1, OWN] or edit[i, HEADS] != edit[i + 1, HEADS]:
        return False
    down = _random(state) < 0.5
    begin = edit[i - 1, END] if i else 0
    middle, end = edit[i, END], edit[i + 1, END]
    x, y = edit[i, BIN], edit[i + 1, BIN]
    if down:
        pairs = weight * 0.5 * (middle * (middle + 1) - begin * (begin + 1))
        pairs, rows = _amount(pairs, middle - begin, x, y, load, caps, state)
        row = _place(begin, middle, weight, pairs, rows, True)
    else:
        pairs = weight * 0.5 * (end * (end + 1) - middle * (middle + 1))
        pairs, rows = _amount(pairs, end - middle, y, x, load, caps, state)
        row = _place(middle, end, weight, pairs, rows, False)
    if row <= begin or row >= end or row == middle:
        return False
    edit[i, END] = row
    return True


@njit(cache=True)
def _split(edit, count, i, weight, load, caps, state):
    """Cut piece i in two and give one part to another bin."""
    begin = edit[i - 1, END] if i else 0
    end = edit[i, END]
    x = edit[i, BIN]
    if _random(state) < 0.5:
        y = int(load.shape[1] * _random(state))
    else:
        other = edit[int(count * _random(state))]
        if other[ORDER] == 0:
            return False
        y = other[BIN + int(other[ORDER] * _random(state))]
    if x == y:
        return False
    at_end = _random(state) < 0.5
    pairs = weight * 0.5 * (end * (end + 1) - begin * (begin + 1))
    pairs, rows = _amount(pairs, end - begin, x, y, load, caps, state)
    row = _place(begin, end, weight, pairs, rows, at_end)
    if row <= begin or row >= end:
        return False
    for k in range(count, i, -1):
        edit[k] = edit[k - 1]
    edit[i, END] = row
    _give(edit[i + 1 if at_end else i], x, y)
    return True


@njit(cache=True)
def _reorder(edit, sizes, i, groups, max_order, num_bins, state):
    """Double the order of piece i with new bins, halve it, or join two neighbours of order 1 in one of order 2."""
    piece = edit[i]
    order = piece[ORDER]
    if not piece[OWN] or piece[HEADS] != (1 << groups) - 1:
        return False
    u = _random(state)
    if u < 0.35 and order > 1:
        piece[ORDER] = order // 2
        piece[HOME] = piece[BIN]
        return True
    if u < 0.6 and order == 1 and i + 1 < sizes[0] and edit[i + 1, ORDER] == 1 and max_order > 1:
        after = edit[i + 1]
        if not after[OWN] or after[HEADS] != piece[HEADS]:
            return False
        piece[ORDER] = 2
        piece[BIN + 1] = after[BIN]
        piece[END] = after[END]
        for k in range(i + 1, sizes[0] - 1):
            edit[k] = edit[k + 1]
        sizes[0] -= 1
        return True
    if 2 * order > max_order or 2 * order > num_bins:
        return False
    for j in range(order, 2 * order):
        piece[BIN + j] = int(num_bins * _random(state))
    piece[ORDER] = 2 * order
    return True


@njit(cache=True)
def tidy(edit, count):
    """Join neighbours of order 1 that are alike: the new count."""
    kept = 0
    for i in range(count):
        piece = edit[i]
        if kept:
            last = edit[kept - 1]
            if last[ORDER] == piece[ORDER] and last[ORDER] <= 1:
                same = last[OWN] == piece[OWN] and last[HEADS] == piece[HEADS]
                if same and (last[ORDER] == 0 or (last[HOME] == piece[HOME] and last[BIN] == piece[BIN])):
                    last[END] = piece[END]
                    continue
        if kept != i:
            edit[kept] = piece
        kept += 1
    return kept


@njit(cache=True)
def valid(edit, count):
    """Whether bins of a tile differ and its columns end before its own rows."""
    begin = 0
    for i in range(count):
        order = edit[i, ORDER]
        if order > 1:
            if edit[i, END] - begin < order:
                return False
            if order > 2 and edit[i, END] - begin > 0.5 * begin:
                return False
            for j in range(order):
                for k in range(j):
                    if edit[i, BIN + j] == edit[i, BIN + k]:
                        return False
        begin = edit[i, END]
    return True
