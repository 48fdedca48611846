"""Peel: a first placement, bin by bin. Whole documents where they fit, then one cut that makes the area come out right.

A causal suffix is rich in pairs, a prefix or a short document is rich in tokens. A bin starts with the largest item: it
takes it whole or, where that is too much, the suffix that makes its area right. Then come the largest items that leave
room for the light ones that its tokens need; where area is still missing, a suffix of the item that has to be cut least
far from its document's start (the bin needs the keys before the cut); then short documents, and at last a prefix of the
item that it has a suffix of, which costs it nothing. The last bin takes the rest.
"""

from __future__ import annotations

import math

import numpy as np

from hsap.loops import inner
from hsap.planners.nested.cost import BIN, END, HOME, MAX_ORDER, ORDER, area_before, row_of_area
from hsap.planners.nested.items import ZERO, items_of, pairs_of, tokens_of

MAX_TILES = 8
AREA_GOAL, TOKEN_GOAL, NOISE, PREFIX, LARGEST_ORDER, FILL = range(6)
"""Columns of wishes: how far to go between the mean and the cap in area and in tokens; noise of choices; share of the
missing tokens that comes from the cut item's own prefix; largest order of the tiles that large items start as, and how
full a tile has to make its bins."""


@inner
def peel(template, counts, documents, rules, wish, pieces, sizes):
    """Place a template's items and write the documents that come of it to pieces and sizes.

    wish: float64 [6], the parameters of a first placement, see `AREA_GOAL` and those that follow it.
    """
    items = items_of(template, counts, documents, rules.groups)
    caps = rules.caps
    n, num_bins = len(items.low), caps.shape[1]
    heads, tails = np.zeros((n, num_bins, 2), np.int64), np.zeros((n, num_bins + MAX_TILES, 2), np.int64)
    ends = np.zeros((2, n), np.int64)
    left, room, goal, load = np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2)
    loads = np.zeros((2, num_bins))
    tiles = _tiles(items, documents, rules, loads, tails, ends, wish)
    for t in range(n):
        left[0] += pairs_of(items, documents, t, items.low[t], items.high[t])
        left[1] += tokens_of(items, t)
    for k in range(2):
        for x in range(num_bins):
            room[k] += caps[k, x] - loads[k, x]
    for x in range(num_bins - 1):
        for k in range(2):
            load[k] = loads[k, x]
            free = caps[k, x] - loads[k, x]
            mean = left[k] * free / room[k] if room[k] > 0 else free
            room[k] -= free
            goal[k] = loads[k, x] + min(max(mean + wish[AREA_GOAL + k] * (free - mean), left[k] - room[k]), free)
        cut = _fill_area(items, documents, goal, load, tails, ends, x, wish)
        _fill_tokens(items, documents, goal, caps, load, heads, ends, x, cut, wish[PREFIX])
        for k in range(2):
            left[k] -= load[k] - loads[k, x]
    _collect(items, template, counts, heads, tails, ends, tiles, num_bins - 1, pieces, sizes)


@inner
def _collect(items, template, counts, heads, tails, ends, tiles, last, pieces, sizes):
    """Write the documents; bin `last` takes what nobody has taken."""
    n = len(items.low)
    item_of = np.zeros((len(counts), template.shape[1]), np.int64)
    for t in range(n):
        item_of[items.document[t], items.place[t]] = 1 + t
    for d in range(len(counts)):
        sizes[d] = 0
        for i in range(counts[d]):
            t = item_of[d, i] - 1
            if t < 0:
                _write(pieces, sizes, template, d, i, template[d, i, END], t)
                continue
            for h in range(ends[0, t]):
                _write(pieces, sizes, template, d, i, heads[t, h, 0], heads[t, h, 1])
            if items.high[t] > items.low[t]:
                _write(pieces, sizes, template, d, i, items.high[t], last)
            for h in range(ends[1, t] - 1, -1, -1):
                x = tails[t, h, 1]
                _write(pieces, sizes, template, d, i, tails[t, h, 0], max(x, 0))
                if x < 0:
                    pieces[d, sizes[d] - 1, ORDER] = tiles[-1 - x, 0]
                    for j in range(MAX_ORDER):
                        pieces[d, sizes[d] - 1, BIN + j] = tiles[-1 - x, 1 + j]


@inner
def _tiles(items, documents, rules, loads, tails, ends, wish):
    """Place suffixes of large items as tiles, on the emptiest bins: int64 [MAX_TILES, 1 + MAX_ORDER] order, bins."""
    caps, num_bins = rules.caps, loads.shape[1]
    tiles = np.zeros((MAX_TILES, 1 + MAX_ORDER), np.int64)
    num, t = 0, ZERO[0]
    fill, emptiest = np.zeros(num_bins), np.zeros(min(MAX_ORDER, num_bins), np.int64)
    mean = 0.0
    for x in range(num_bins):
        mean += caps[0, x]
    mean /= num_bins
    while t < len(items.low) and num < MAX_TILES:
        d, low, high = items.document[t], items.low[t], items.high[t]
        pairs = pairs_of(items, documents, t, low, high)
        order = _order(rules, documents, d, high, mean, min(int(wish[LARGEST_ORDER]), num_bins))
        while order > 1 and pairs < wish[FILL] * order * mean:
            order //= 2
        for x in range(num_bins):
            fill[x] = loads[0, x] / caps[0, x]
        least(fill, emptiest)
        room = 1e300
        for x in emptiest[:order]:
            room = min(room, 0.98 * caps[0, x] - loads[0, x])
        if order < 2 or not items.own[t] or items.part[t] < 1 or room < 0.3 * mean:
            t += 1
            continue
        row = low
        if pairs > order * room:
            row = math.ceil(row_of_area(documents, d, area_before(documents, d, high) - order * room))
        if order > rules.groups:
            row = max(row, (2 * high + 2) // 3)
        if row >= high - order:
            t += 1
            continue
        tiles[num, 0] = order
        for j in range(order):
            x = emptiest[j]
            tiles[num, 1 + j] = x
            loads[0, x] += pairs_of(items, documents, t, row, high) / order
            loads[1, x] += (high - row) / order
        tails[t, ends[1, t], 0], tails[t, ends[1, t], 1] = high, -1 - num
        ends[1, t] += 1
        items.high[t] = row
        num += 1
    return tiles


@inner
def least(values, out):
    """Write the indices of the least values to out, the least first, of equal ones the first."""
    for j in range(len(out)):
        best = -1
        for x in range(len(values)):
            taken = False
            for k in range(j):
                taken = taken or out[k] == x
            if not taken and (best < 0 or values[x] < values[best]):
                best = x
        out[j] = best


@inner
def _order(rules, documents, d, high, pairs, most):
    """Order of a tile below row `high` that costs a bin least when it computes so many pairs there."""
    rows = high - row_of_area(documents, d, area_before(documents, d, high) - pairs)
    best, least = 1, rules.kv * rules.groups * high
    order = 2
    while order <= most:
        parts = min(order, rules.groups)
        if order > parts and documents.table[d] >= 0:
            break
        cost = rows * (order - 1) * (rules.q + rules.o) + rules.kv * high * parts / order
        cost *= rules.groups / parts
        if cost < least:
            best, least = order, cost
        order *= 2
    return best


@inner
def _write(pieces, sizes, template, d, i, end, x):
    """Append what the template says of piece i, up to row `end` and on bin x, where x isn't negative."""
    at = sizes[d]
    for k in range(template.shape[2]):
        pieces[d, at, k] = template[d, i, k]
    pieces[d, at, END] = end
    if x >= 0:
        pieces[d, at, HOME], pieces[d, at, BIN] = x, x
    sizes[d] = at + 1


@inner
def _fill_area(items, documents, goal, load, tails, ends, x, wish):
    """Take whole items from the largest on, or a suffix where one doesn't fit: the item cut last, or -1."""
    n = len(items.low)
    noise, share = wish[NOISE], wish[PREFIX]
    largest, light = _light(items, documents)
    if largest < 0:
        return -1
    room = goal[1] - load[1] - tokens_of(items, largest)
    if (
        room < 0
        or load[0] + pairs_of(items, documents, largest, items.low[largest], items.high[largest]) + _filler(light, room)
        > goal[0]
    ):
        row = _start(items, documents, goal, load, light, largest, share)
        if items.low[largest] < row < items.high[largest]:
            _take_suffix(items, documents, load, tails, ends, largest, row, x)
            return largest
    for t in range(n):
        if items.high[t] == items.low[t]:
            continue
        room = goal[1] - load[1] - tokens_of(items, t)
        pairs = pairs_of(items, documents, t, items.low[t], items.high[t])
        skipped = t != largest and (t * 7919 + x * 104729) % 97 / 97.0 < noise * 0.3
        if not skipped and room >= 0 and load[0] + pairs + _filler(light, room) <= goal[0]:
            _take_suffix(items, documents, load, tails, ends, t, items.low[t], x)
    if goal[0] - load[0] - _filler(light, goal[1] - load[1]) < 0.01 * goal[0]:
        return -1
    best, cost, row = ZERO[0] - 1, 1e18, ZERO[0]
    for t in range(n):
        d, high = items.document[t], items.high[t]
        if high - items.low[t] < 2 or items.part[t] == 0:
            continue
        # Where the suffix would begin if nothing else came with it.
        least = row_of_area(documents, d, area_before(documents, d, high) - (goal[0] - load[0]) / items.part[t])
        if least >= cost:
            continue
        start = _start(items, documents, goal, load, light, t, share)
        if items.low[t] < start < items.high[t]:
            price = start * (1.0 + noise * ((t * 31 + x * 17) % 13 / 13.0))
            if price < cost:
                best, cost, row = t, price, start
    if best >= 0:
        _take_suffix(items, documents, load, tails, ends, best, row, x)
    return best


@inner
def _light(items, documents):
    """The largest item that is left, and the others cumulated from the lightest on: float64 [m, 2] (pairs, tokens)."""
    n = len(items.low)
    largest, most = ZERO[0] - 1, 0.0
    for t in range(n):
        if items.high[t] > items.low[t]:
            pairs = pairs_of(items, documents, t, items.low[t], items.high[t])
            if pairs > most:
                largest, most = t, pairs
    light = np.zeros((n + 1, 2))
    at = 0
    for t in range(n - 1, -1, -1):
        if t != largest and items.high[t] > items.low[t] and items.own[t]:
            at += 1
            light[at, 0] = light[at - 1, 0] + pairs_of(items, documents, t, items.low[t], items.high[t])
            light[at, 1] = light[at - 1, 1] + tokens_of(items, t)
    return largest, light[: at + 1]


@inner
def _start(items, documents, goal, load, light, t, share):
    """First row of the suffix of item t that brings the area to its goal.

    The tokens that are missing then come from the item's own prefix (a share, and what short documents can't give).
    """
    d, low, high, own = items.document[t], items.low[t], items.high[t], items.own[t]
    if items.part[t] == 0:
        return low
    width = 0.0
    start = float(high)
    for _ in range(6):
        tokens = max(goal[1] - load[1] - width, 0.0)
        prefix = max(share * tokens, tokens - light[-1, 1]) * own
        wanted = goal[0] - load[0] - _filler(light, tokens - prefix)
        wanted = (
            wanted / items.part[t] - area_before(documents, d, min(low + prefix, high)) + area_before(documents, d, low)
        )
        start = min(row_of_area(documents, d, area_before(documents, d, high) - wanted), float(high))
        width = own * (0.5 * (width + high - start) if width > 0 else high - start)
    if own * (high - start) > goal[1] - load[1]:
        start = high - (goal[1] - load[1])
    return max(math.ceil(start), low)


@inner
def _filler(light, tokens):
    """Pairs of the lightest items that hold so many tokens."""
    if tokens <= 0:
        return 0.0
    at, beyond = 0, len(light)
    while at < beyond:
        middle = (at + beyond) // 2
        if light[middle, 1] < tokens:
            at = middle + 1
        else:
            beyond = middle
    if at == len(light):
        return light[at - 1, 0]
    pairs, rows = light[at - 1, 0], light[at - 1, 1]
    return pairs + (light[at, 0] - pairs) * (tokens - rows) / max(light[at, 1] - rows, 1.0)


@inner
def _take_suffix(items, documents, load, tails, ends, t, row, x):
    load[0] += pairs_of(items, documents, t, row, items.high[t])
    load[1] += (items.high[t] - row) * items.own[t]
    tails[t, ends[1, t], 0] = items.high[t]
    tails[t, ends[1, t], 1] = x
    ends[1, t] += 1
    items.high[t] = row


@inner
def _take_prefix(items, documents, load, heads, ends, t, rows, x):
    low = items.low[t]
    load[0] += pairs_of(items, documents, t, low, low + rows)
    load[1] += rows * items.own[t]
    items.low[t] += rows
    if not ends[0, t] or heads[t, ends[0, t] - 1, 1] != x:
        heads[t, ends[0, t], 1] = x
        ends[0, t] += 1
    heads[t, ends[0, t] - 1, 0] = items.low[t]


@inner
def _fill_tokens(items, documents, goal, caps, load, heads, ends, x, cut, share):
    """Take tokens until the goal: the cut item's prefix, short documents, a prefix again."""
    n = len(items.low)
    if cut >= 0 and share > 0 and items.own[cut]:
        rows = _fitting(items, documents, cut, int(share * (goal[1] - load[1])), caps[0, x] - load[0])
        if rows > 0:
            _take_prefix(items, documents, load, heads, ends, cut, rows, x)
    for t in range(n - 1, -1, -1):
        width = items.high[t] - items.low[t]
        if load[1] >= goal[1] or t == cut or width == 0 or not items.own[t]:
            continue
        if (
            load[1] + width <= caps[1, x]
            and load[0] + pairs_of(items, documents, t, items.low[t], items.high[t]) <= caps[0, x]
        ):
            _take_prefix(items, documents, load, heads, ends, t, width, x)
    for u in range(-1, n):
        missing = int(goal[1] - load[1])
        t = cut if u < 0 else u
        if missing > 0 and t >= 0 and items.own[t]:
            rows = _fitting(items, documents, t, missing, caps[0, x] - load[0])
            if rows > 0:
                _take_prefix(items, documents, load, heads, ends, t, rows, x)


@inner
def _fitting(items, documents, t, rows, pairs):
    """At most so many rows of item t, from its first on, that their pairs fit."""
    low = items.low[t]
    rows = min(rows, items.high[t] - low)
    if rows <= 0 or pairs <= 0:
        return 0
    if pairs_of(items, documents, t, low, low + rows) <= pairs:
        return rows
    return (
        int(
            row_of_area(
                documents, items.document[t], area_before(documents, items.document[t], low) + pairs / items.part[t]
            )
        )
        - low
    )
