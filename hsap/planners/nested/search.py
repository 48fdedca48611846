"""Search: thousands of small changes to the pieces, kept when they lower the energy or by chance (annealing).

A proposal changes one or two documents, often mends what then exceeds a cap by an exact cut in a third; only these are
counted again. The price of exceeding a cap rises as the search goes on. Everything is seeded: effort is a number of
proposals, never a time.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from hsap.planners.nested.cost import AREA, BIN, END, ORDER, OWN, Rules, add_document, energy, tidy
from hsap.planners.nested.moves import alike, cut_row, draw, give, insert, part_of, propose
from hsap.planners.nested.peel import peel
from hsap.planners.nested.repair import repair

REPAIR_PRICE = 2000.0


@njit(cache=True)
def solve(template, counts, documents, rules, wishes, keep, proposals, heat, price, max_order, places, seed):
    """Place a template's items: (pieces, counts, load, energy) of the best placement found.

    template: int64 [documents, any, WIDTH] with counts [documents]: pieces of order 1 are to be placed. wishes:
    float64 [starts, 4], see `peel`. keep: how many starts to improve, with `proposals` together. heat, price: (first,
    last). places: pieces a document may have.
    """
    n, num_bins = len(counts), rules.caps.shape[1]
    pieces = np.zeros((keep + 1, n, places, template.shape[2]), np.int64)
    sizes = np.zeros((keep + 1, n), np.int64)
    load = np.zeros((keep + 1, 3, num_bins))
    found = np.full(keep, 1e300)
    reach = np.zeros((3, num_bins, rules.groups), np.int64)
    for t in range(len(wishes)):
        peel(template, counts, documents, rules, wishes[t], pieces[keep], sizes[keep])
        load[keep] = 0
        for d in range(n):
            sizes[keep, d] = tidy(pieces[keep, d], sizes[keep, d])
            add_document(load[keep], pieces[keep, d], sizes[keep, d], 1.0, d, documents, rules, reach)
        value = energy(load[keep], rules, price[1])
        worst = np.argmax(found)
        if value < found[worst] and not (found == value).any():
            found[worst] = value
            pieces[worst], sizes[worst], load[worst] = pieces[keep], sizes[keep], load[keep]
    rules = priced(rules, max(rules.unit, load[np.argmin(found), 0].sum() / num_bins))
    for k in range(min(keep, len(wishes))):
        if found[k] < 1e300 and num_bins > 1:
            share = proposals // keep
            repair(pieces[k], sizes[k], documents, load[k], rules, price[1], 3 * num_bins)
            found[k] = anneal(pieces[k], sizes[k], documents, load[k], rules, share, heat, price, max_order, seed + k)
    best = np.argmin(found)
    repair(pieces[best], sizes[best], documents, load[best], rules, REPAIR_PRICE, 20 * num_bins)
    return pieces[best], sizes[best], load[best], found[best]


@njit(cache=True)
def priced(rules, unit):
    """The same rules with another unit."""
    return Rules(rules.kv, rules.q, rules.o, rules.groups, rules.caps, unit, rules.peak)


@njit(cache=True)
def anneal(pieces, counts, documents, load, rules, proposals, heat, price, max_order, seed):
    """Change pieces and counts in place, keep load right, leave the best state met: its energy at the last price."""
    state = np.array([np.uint64(seed * 2654435761 + 88172645463325252)])
    reach = np.zeros((3, load.shape[1], rules.groups), np.int64)
    edit = np.zeros((3, pieces.shape[1], pieces.shape[2]), np.int64)
    sizes, which = np.zeros(3, np.int64), np.zeros(3, np.int64)
    kept = load.copy()
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
        kept[:] = load
        for c in range(changed):
            d = which[c]
            add_document(load, pieces[d], counts[d], -1.0, d, documents, rules, reach)
            add_document(load, edit[c], sizes[c], 1.0, d, documents, rules, reach)
        if draw(state) < 0.7:
            changed = _mend(pieces, counts, documents, load, rules, state, edit, sizes, which, changed, reach)
        after = energy(load, rules, now_price)
        if after > now and draw(state) >= math.exp((now - after) / now_heat):
            load[:] = kept
            continue
        now = after
        for c in range(changed):
            d = which[c]
            pieces[d, : sizes[c]] = edit[c, : sizes[c]]
            counts[d] = sizes[c]
            stale[d] = True
        final = energy(load, rules, price[1])
        if final < best - 1e-6:
            best = final
            for d in np.flatnonzero(stale):
                best_pieces[d, : counts[d]] = pieces[d, : counts[d]]
                best_counts[d] = counts[d]
            stale[:] = False
            best_load[:] = load
    pieces[:], counts[:], load[:] = best_pieces, best_counts, best_load
    return best


@njit(cache=True)
def _mend(pieces, counts, documents, load, rules, state, edit, sizes, which, changed, reach):
    """Cut what the fullest bin has too much off one of its pieces, for a neighbour or a bin with room: documents changed."""
    k, x, y = _fullest(load, rules.caps, state)
    size = load[AREA + k, x] - rules.caps[k, x]
    if size <= 0:
        return changed
    n = len(counts)
    first = int(n * draw(state))
    for step in range(n):
        d = (first + step) % n
        c = changed
        for e in range(changed):
            c = e if which[e] == d else c
        if c == 3:
            continue
        if c == changed:
            edit[c, : counts[d]] = pieces[d, : counts[d]]
            sizes[c], which[c] = counts[d], d
        i = _piece_of(edit[c], sizes[c], x, state)
        if i < 0 or (k == 1 and not edit[c, i, OWN]):
            continue
        begin = edit[c, i - 1, END] if i else 0
        end = edit[c, i, END]
        at_end = draw(state) < 0.5
        near = i + 1 if at_end else i - 1
        shift = 0 <= near < sizes[c] and alike(edit[c, i], edit[c, min(max(near, 0), sizes[c] - 1)]) and draw(state) < 0.7
        part = part_of(edit[c, i], rules.groups)
        pairs, rows = (size / part if part else 0.0, 0.0) if k == 0 else (0.0, size + 1)
        row = cut_row(documents, d, begin, end, pairs, rows, at_end)
        if k == 0:
            row += -1 if at_end else 1
        if row <= begin or row >= end or not (shift or sizes[c] < edit.shape[1]):
            return changed
        add_document(load, edit[c], sizes[c], -1.0, d, documents, rules, reach)
        if shift:
            edit[c, min(i, near), END] = row
        else:
            insert(edit[c], sizes[c], i, row)
            give(edit[c, i + 1 if at_end else i], x, y)
            sizes[c] = tidy(edit[c], sizes[c] + 1)
        add_document(load, edit[c], sizes[c], 1.0, d, documents, rules, reach)
        return max(changed, c + 1)
    return changed


@njit(cache=True)
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


@njit(cache=True)
def _piece_of(edit, count, x, state):
    """A piece of order 1 that bin x computes, -1 where there is none."""
    first = int(count * draw(state))
    for step in range(count):
        i = (first + step) % count
        if edit[i, ORDER] == 1 and edit[i, BIN] == x:
            return i
    return -1
