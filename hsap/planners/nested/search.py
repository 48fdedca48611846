"""Search: thousands of small changes to the pieces, kept when they lower the energy or by chance (annealing).

A proposal changes one or two documents, often mends what then exceeds a cap by an exact cut in a third; only these are
counted again. The price of exceeding a cap rises as the search goes on. Everything is seeded: effort is a number of
proposals, never a time.
"""

from __future__ import annotations

import math

import numpy as np

from hsap.loops import inner, loop
from hsap.planners.nested.cost import (
    AREA,
    BYTES,
    NUM_LOADS,
    Rules,
    add_document,
    copy_load,
    copy_pieces,
    energy,
    fast,
    judge,
    recount,
    tidy,
)
from hsap.planners.nested.moves import draw, propose
from hsap.planners.nested.peel import LARGEST_ORDER, peel
from hsap.planners.nested.repair import mend, repair

REPAIR_PRICE = 2000.0
NOT_FOUND = 1e300
ORDERS = np.array([1.0, 2.0, 4.0, 8.0])
KEPT = 1
HOPEFUL = 1.3
"""Starts whose energy is more than this many times the least one are not improved."""
MENDED = 0.7
"""Share of the proposals that exceed a cap which are mended."""
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
        first = np.searchsorted(ORDERS, wishes[t, LARGEST_ORDER]) * KEPT
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


@inner
def priced(rules, unit):
    """The same rules with another unit."""
    return Rules(rules.kv, rules.q, rules.o, rules.groups, rules.caps, unit, rules.peak, rules.piece)


@inner
def anneal(pieces, counts, documents, load, rules, proposals, heat, price, max_order, seed):
    """Change pieces and counts in place, keep load right, leave the best state met: its energy at the last price."""
    state = np.array([np.uint64(seed * 2654435761 + 88172645463325252)])
    reach = np.zeros((3, load.shape[1], rules.groups), np.int64)
    parts = np.zeros((len(counts), NUM_LOADS, load.shape[1]))
    for d in range(len(counts)):
        add_document(parts[d], pieces[d], counts[d], 1.0, d, documents, rules, reach)
    edit = np.zeros((3, pieces.shape[1] - SPARE_PLACES * load.shape[1], pieces.shape[2]), np.int64)
    fresh = np.zeros((3, NUM_LOADS, load.shape[1]))
    sizes, which = np.zeros(3, np.int64), np.zeros(3, np.int64)
    trial = load.copy()
    best_pieces, best_counts, best_load = pieces.copy(), counts.copy(), load.copy()
    best = energy(load, rules, price[1])
    now, now_price, now_heat, busiest = 0.0, price[0], heat[0], 0
    stale = np.zeros(len(counts), np.bool_)
    for step in range(proposals):
        if step % 64 == 0:
            now_heat = heat[0] * (heat[1] / heat[0]) ** (step / proposals)
            now_price = rules.unit * price[0] * (price[1] / price[0]) ** (step / proposals)
            cost, excess, _, _, busiest = judge(load, rules)
            now = cost + now_price * excess
        changed = propose(pieces, counts, documents, load, parts, busiest, rules, max_order, state, edit, sizes, which)
        if changed == 0:
            continue
        # What is accepted is drawn first, so that what bytes alone forbid isn't looked at further.
        most = now - now_heat * math.log(1.0 - draw(state))
        copy_load(trial, load)
        for c in range(changed):
            recount(trial, parts[which[c]], fresh[c], edit[c], sizes[c], which[c], documents, rules, reach)
        cost, excess, k, x, most_loaded = judge(trial, rules)
        if cost > most:
            continue
        if x >= 0 and draw(state) < MENDED:
            args = (documents, parts, fresh, rules, state, edit, sizes, which, changed, reach, k, x)
            changed = mend(pieces, counts, trial, *args)
            cost, excess, k, x, most_loaded = judge(trial, rules)
        if cost + now_price * excess > most:
            continue
        now, busiest = cost + now_price * excess, most_loaded
        copy_load(load, trial)
        for c in range(changed):
            d = which[c]
            copy_pieces(pieces, d, edit, c, sizes[c])
            counts[d] = sizes[c]
            copy_load(parts[d], fresh[c])
            stale[d] = True
        last = cost + price[1] * rules.unit * excess
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
