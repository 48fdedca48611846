"""Search: thousands of small changes to the pieces, kept when they lower the energy or by chance (annealing).

A proposal changes one or two documents, often mends what then exceeds a cap by an exact cut in a third; only these are
counted again. The price of exceeding a cap rises as the search goes on. Everything is seeded: effort is a number of
proposals, never a time.
"""

from __future__ import annotations

import math

import numpy as np

from hsap.loops import loop
from hsap.planners.nested.cost import (
    AREA,
    BIN,
    BYTES,
    END,
    NUM_LOADS,
    ORDER,
    OWN,
    Rules,
    add_document,
    copy_pieces,
    energy,
    fast,
    tidy,
)
from hsap.planners.nested.moves import cut_row, draw, give, insert, joins, part_of, propose, valid
from hsap.planners.nested.peel import peel
from hsap.planners.nested.repair import repair

REPAIR_PRICE = 2000.0
NOT_FOUND = 1e300
ORDERS = np.array([1.0, 2.0, 4.0, 8.0])
KEPT = 1
HOPEFUL = 1.3
"""Starts whose energy is more than this many times the least one are not improved."""
SPARE_PLACES = 2
"""Pieces a bin, of those a document may have, that the search leaves to the repair."""


@loop
def solve(template, counts, documents, rules, wishes, proposals, heat, price, max_order, places, seed):
    """Place a template's items: (pieces, counts, load, energy) of the best placement found.

    template: int64 [documents, any, WIDTH] with counts [documents]: pieces of order 1 are to be placed. wishes:
    float64 [starts, 6], see `peel`. Of the starts with equal largest order the `KEPT` best are improved with half of
    the proposals, the best of all with the other half. heat, price: (first, last). places: pieces a document may have.
    """
    n, num_bins = len(counts), rules.caps.shape[1]
    keep = len(ORDERS) * KEPT
    pieces = np.zeros((keep + 1, n, places, template.shape[2]), np.int64)
    sizes = np.zeros((keep + 1, n), np.int64)
    load = np.zeros((keep + 1, NUM_LOADS, num_bins))
    found = np.full(keep, NOT_FOUND)
    reach = np.zeros((3, num_bins, rules.groups), np.int64)
    stale = np.zeros(n, np.bool_)
    for t in range(len(wishes)):
        peel(template, counts, documents, rules, wishes[t], pieces[keep], sizes[keep])
        _count(load[keep], pieces[keep], sizes[keep], documents, rules, reach)
        value = energy(load[keep], rules, price[0])
        first = np.searchsorted(ORDERS, wishes[t, 4]) * KEPT
        worst = first + np.argmax(found[first : first + KEPT])
        if value < found[worst] and not (found == value).any():
            found[worst] = value
            _copy_stale(pieces[worst], sizes[worst], pieces[keep], sizes[keep], stale, True)
            copy_load(load[worst], load[keep])
    if rules.peak > 0:
        rules = priced(rules, max(rules.unit, load[np.argmin(found), BYTES].sum() / num_bins))
    heat = (heat[0] * rules.unit, heat[1] * rules.unit)
    if num_bins > 1:
        found[found > HOPEFUL * max(found.min(), 0.0) + 1.0] = NOT_FOUND
        share = proposals // (2 * (found < NOT_FOUND).sum())
        for k in np.flatnonzero(found < NOT_FOUND):
            repair(pieces[k], sizes[k], documents, load[k], rules, price[1], num_bins // 2)
            found[k] = anneal(pieces[k], sizes[k], documents, load[k], rules, share, heat, price, max_order, seed + k)
    b = np.argmin(found)
    if num_bins > 1:
        middle = (math.sqrt(heat[0] * heat[1]), heat[1])
        improve(pieces[b], sizes[b], documents, load[b], rules, proposals // 2, middle, price[1], max_order, seed)
    return pieces[b], sizes[b], load[b], energy(load[b], rules, price[1])


@loop
def improve(pieces, counts, documents, load, rules, proposals, heat, price, max_order, seed):
    """Search on from a placement, in place, and bring it under its caps: its energy. heat: (first, last), in bytes."""
    anneal(pieces, counts, documents, load, rules, proposals, heat, (price, price), max_order, seed)
    repair(pieces, counts, documents, load, rules, REPAIR_PRICE, 20 * load.shape[1])
    return energy(load, rules, price)


@fast
def _count(load, pieces, counts, documents, rules, reach):
    """Join what is alike and count all documents anew."""
    for k in range(load.shape[0]):
        for x in range(load.shape[1]):
            load[k, x] = 0.0
    for d in range(len(counts)):
        counts[d] = tidy(pieces[d], counts[d])
        add_document(load, pieces[d], counts[d], 1.0, d, documents, rules, reach)


@loop
def repair_from(pieces, counts, documents, rules, exact):
    """Repair in place where bins compute `exact` pairs, float64 [bins], rather than what documents' tables say."""
    load = np.zeros((NUM_LOADS, rules.caps.shape[1]))
    reach = np.zeros((3, load.shape[1], rules.groups), np.int64)
    for d in range(len(counts)):
        add_document(load, pieces[d], counts[d], 1.0, d, documents, rules, reach)
    load[AREA] = exact
    repair(pieces, counts, documents, load, rules, REPAIR_PRICE, 20 * load.shape[1])


@loop
def priced(rules, unit):
    """The same rules with another unit."""
    return Rules(rules.kv, rules.q, rules.o, rules.groups, rules.caps, unit, rules.peak, rules.piece)


@loop
def anneal(pieces, counts, documents, load, rules, proposals, heat, price, max_order, seed):
    """Change pieces and counts in place, keep load right, leave the best state met: its energy at the last price."""
    state = np.array([np.uint64(seed * 2654435761 + 88172645463325252)])
    reach = np.zeros((3, load.shape[1], rules.groups), np.int64)
    parts = np.zeros((len(counts), load.shape[0], load.shape[1]))
    for d in range(len(counts)):
        add_document(parts[d], pieces[d], counts[d], 1.0, d, documents, rules, reach)
    edit = np.zeros((3, pieces.shape[1] - SPARE_PLACES * load.shape[1], pieces.shape[2]), np.int64)
    fresh = np.zeros((3, load.shape[0], load.shape[1]))
    sizes, which = np.zeros(3, np.int64), np.zeros(3, np.int64)
    trial = load.copy()
    best_pieces, best_counts, best_load = pieces.copy(), counts.copy(), load.copy()
    best = energy(load, rules, price[1])
    now, now_price, now_heat = 0.0, price[0], heat[0]
    stale = np.zeros(len(counts), np.bool_)
    for step in range(proposals):
        if step % 64 == 0:
            now_heat = heat[0] * (heat[1] / heat[0]) ** (step / proposals)
            now_price = price[0] * (price[1] / price[0]) ** (step / proposals)
            now = energy(load, rules, now_price)
        changed = propose(pieces, counts, documents, load, rules, max_order, state, edit, sizes, which)
        if changed == 0:
            continue
        copy_load(trial, load)
        for c in range(changed):
            add_load(trial, parts[which[c]], -1.0)
            _recount(trial, fresh[c], edit[c], sizes[c], which[c], documents, rules, reach)
        if draw(state) < 0.7:
            changed = _mend(
                pieces, counts, documents, trial, parts, fresh, rules, state, edit, sizes, which, changed, reach
            )
        after = energy(trial, rules, now_price)
        if after > now and draw(state) >= math.exp((now - after) / now_heat):
            continue
        now = after
        copy_load(load, trial)
        for c in range(changed):
            d = which[c]
            copy_pieces(pieces, d, edit, c, sizes[c])
            counts[d] = sizes[c]
            copy_load(parts[d], fresh[c])
            stale[d] = True
        last = energy(load, rules, price[1])
        if last < best - 1e-6:
            best = last
            _copy_stale(best_pieces, best_counts, pieces, counts, stale, False)
            copy_load(best_load, load)
    _copy_stale(pieces, counts, best_pieces, best_counts, stale, True)
    copy_load(load, best_load)
    return best


@fast
def _copy_stale(to_pieces, to_counts, pieces, counts, stale, all_of_them):
    """Copy the documents that are marked, and unmark them."""
    for d in range(len(counts)):
        if stale[d] or all_of_them:
            copy_pieces(to_pieces, d, pieces, d, counts[d])
            to_counts[d] = counts[d]
            stale[d] = False


@fast
def copy_load(target, source):
    """Copy a load table."""
    for k in range(target.shape[0]):
        for x in range(target.shape[1]):
            target[k, x] = source[k, x]


@fast
def add_load(target, source, sign):
    """Add a load table to another."""
    for k in range(target.shape[0]):
        for x in range(target.shape[1]):
            target[k, x] += sign * source[k, x]


@fast
def _recount(load, fresh, edit, size, d, documents, rules, reach):
    """Count a changed document into fresh and add it to the load."""
    for k in range(fresh.shape[0]):
        for x in range(fresh.shape[1]):
            fresh[k, x] = 0.0
    add_document(fresh, edit, size, 1.0, d, documents, rules, reach)
    add_load(load, fresh, 1.0)


@fast
def _mend(pieces, counts, documents, load, parts, fresh, rules, state, edit, sizes, which, changed, reach):
    """Cut what the fullest bin has too much off one of its pieces, for one with room: number of documents changed."""
    k, x, y = _fullest(load, rules.caps, state)
    size = load[AREA + k, x] - rules.caps[k, x]
    if size <= 0:
        return changed
    n = len(counts)
    d = int(n * draw(state))
    for _ in range(n):
        d = d + 1 if d + 1 < n else 0
        c = changed
        for e in range(changed):
            c = e if which[e] == d else c
        if c == 3:
            continue
        if c < changed:
            i = _piece_of(edit, c, sizes[c], x, k, state)
        else:
            i = _piece_of(pieces, d, counts[d], x, k, state)
        if i < 0:
            continue
        if c == changed:
            copy_pieces(edit, c, pieces, d, counts[d])
            sizes[c], which[c] = counts[d], d
            copy_load(fresh[c], parts[d])
        after = _cut(edit[c], sizes[c], i, d, documents, size, k, x, y, rules.groups, state)
        if after < 0:
            continue
        if after == 0:
            return changed
        sizes[c] = after
        add_load(load, fresh[c], -1.0)
        _recount(load, fresh[c], edit[c], sizes[c], d, documents, rules, reach)
        return max(changed, c + 1)
    return changed


@fast
def _cut(edit, count, i, d, documents, size, k, x, y, groups, state):
    """Cut so much off piece i, for bin y or a neighbour: the new count, 0 where that can't be done, -1: try another."""
    begin = edit[i - 1, END] if i else 0
    end = edit[i, END]
    at_end = draw(state) < 0.5
    near = i + 1 if at_end else i - 1
    order = edit[i, ORDER]
    shift = 0 <= near < count and joins(edit, i, near) and (order > 1 or draw(state) < 0.7)
    if order > 1 and not shift:
        return -1
    part = part_of(edit, i, groups) / order
    pairs, rows = (size / part if part else 0.0, 0.0) if k == 0 else (0.0, size * order + 1)
    row = cut_row(documents, d, begin, end, pairs, rows, at_end)
    if k == 0:
        row += -1 if at_end else 1
    if row <= begin or row >= end or not (shift or count < edit.shape[0]):
        return 0
    if shift:
        border = min(i, near)
        edit[border, END] = row
        if not valid(edit, count):
            edit[border, END] = end if at_end else begin
            return 0
        return count
    insert(edit, count, i, row)
    give(edit, i + 1 if at_end else i, x, y)
    return tidy(edit, count + 1)


@fast
def _fullest(load, caps, state):
    """Resource (0 area, 1 tokens) and bin that exceed their cap most, and a bin that has room for it, by chance."""
    worst, x, k = -1.0, 0, 0
    for r in range(2):
        for z in range(load.shape[1]):
            full = load[AREA + r, z] / caps[r, z]
            if full > worst:
                worst, x, k = full, z, r
    y, most = 0, -1e300
    for z in range(load.shape[1]):
        free = (caps[k, z] - load[AREA + k, z]) * (0.3 + 0.7 * draw(state))
        if free > most:
            y, most = z, free
    return k, x, y


@fast
def _piece_of(pieces, d, count, x, k, state):
    """A piece of document d that loads bin x with resource k, -1 where there is none."""
    i = int(count * draw(state))
    for _ in range(count):
        i = i + 1 if i + 1 < count else 0
        if k == 0 or pieces[d, i, OWN]:
            for j in range(pieces[d, i, ORDER]):
                if pieces[d, i, BIN + j] == x:
                    return i
    return -1
