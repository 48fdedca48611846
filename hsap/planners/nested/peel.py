"""Peel: a first placement, bin by bin. Whole documents where they fit, then one cut that makes the area come out right.

A causal suffix is rich in pairs, a prefix or a short document is rich in tokens. A bin takes the largest documents that
leave room for the light ones its tokens need; where area is still missing it takes a suffix of the document that has to
be cut least far from its start (the bin needs the keys before the cut); then it takes short documents, and at last a
prefix of the document that it has a suffix of, which costs it nothing. The last bin takes the rest.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from hsap.planners.nested.cost import BIN, END, HEADS, HOME, ORDER, OWN


@njit(cache=True, inline="always")
def _pairs(begin, end):
    return 0.5 * (end * (end + 1.0) - begin * (begin + 1.0))


@njit(cache=True)
def peel(pieces, counts, lengths, weights, caps, num_bins, groups, wish):
    """Write a placement of whole documents, by falling area, to pieces and counts.

    wish: float64 [4]: how far to go between the mean and the cap in area and in tokens, noise of choices, share of the
    missing tokens that comes from the cut document's own prefix.
    """
    n = len(lengths)
    low, high = np.zeros(n, np.int64), lengths.copy()
    heads, tails = np.zeros((n, num_bins, 2), np.int64), np.zeros((n, num_bins, 2), np.int64)
    num_heads, num_tails = np.zeros(n, np.int64), np.zeros(n, np.int64)
    left = np.zeros(2)
    for d in range(n):
        left[0] += weights[d] * _pairs(0, lengths[d])
        left[1] += lengths[d]
    for x in range(num_bins - 1):
        rest = num_bins - x
        goal, load = np.zeros(2), np.zeros(2)
        for k in range(2):
            mean = left[k] / rest
            goal[k] = min(max(mean + wish[k] * (caps[k] - mean), left[k] - (rest - 1) * caps[k]), caps[k])
        cut = _fill_area(low, high, weights, goal, load, tails, num_tails, x, wish[2], wish[3])
        _fill_tokens(low, high, weights, goal, caps, load, heads, num_heads, x, cut, wish[3])
        left -= load
    for d in range(n):
        count = 0
        for t in range(num_heads[d]):
            _write(pieces[d, count], heads[d, t, 0], heads[d, t, 1], groups)
            count += 1
        if high[d] > low[d]:
            _write(pieces[d, count], high[d], num_bins - 1, groups)
            count += 1
        for t in range(num_tails[d] - 1, -1, -1):
            _write(pieces[d, count], tails[d, t, 0], tails[d, t, 1], groups)
            count += 1
        counts[d] = count


@njit(cache=True)
def _write(piece, end, x, groups):
    piece[END], piece[OWN], piece[HEADS], piece[ORDER] = end, 1, (1 << groups) - 1, 1
    piece[HOME] = x
    piece[BIN] = x


@njit(cache=True)
def _fill_area(low, high, weights, goal, load, tails, num_tails, x, noise, share):
    """Take whole documents from the largest on, or a suffix where one doesn't fit: the document cut last, or -1."""
    n = len(low)
    largest, most = -1, 0.0
    for d in range(n):
        pairs = weights[d] * _pairs(low[d], high[d])
        if high[d] > low[d] and pairs > most:
            largest, most = d, pairs
    light = np.zeros((n + 1, 2))
    at = 0
    for d in range(n - 1, -1, -1):
        if d != largest and high[d] > low[d]:
            at += 1
            light[at, 0] = light[at - 1, 0] + weights[d] * _pairs(low[d], high[d])
            light[at, 1] = light[at - 1, 1] + high[d] - low[d]
    light = light[: at + 1]
    if largest < 0:
        return -1
    room = goal[1] - high[largest] + low[largest]
    if room < 0 or most + _filler(light, room) > goal[0]:
        row = _start(low, high, weights, goal, load, light, largest, share)
        if low[largest] < row < high[largest]:
            _take_suffix(low, high, load, weights[largest], tails, num_tails, largest, row, x)
            return largest
    for d in range(n):
        width, pairs = high[d] - low[d], weights[d] * _pairs(low[d], high[d])
        room = goal[1] - load[1] - width
        if width > 0 and room >= 0 and load[0] + pairs + _filler(light, room) <= goal[0]:
            if d == largest or noise == 0 or (d * 7919 + x * 104729) % 97 / 97.0 >= noise * 0.3:
                _take_suffix(low, high, load, weights[d], tails, num_tails, d, low[d], x)
    if goal[0] - load[0] - _filler(light, goal[1] - load[1]) < 0.01 * goal[0]:
        return -1
    best, cost, row = -1, 1e18, 0
    for d in range(n):
        if high[d] - low[d] < 2:
            continue
        start = _start(low, high, weights, goal, load, light, d, share)
        if low[d] < start < high[d]:
            price = start * (1.0 + noise * ((d * 31 + x * 17) % 13 / 13.0))
            if price < cost:
                best, cost, row = d, price, start
    if best >= 0:
        _take_suffix(low, high, load, weights[best], tails, num_tails, best, row, x)
    return best


@njit(cache=True)
def _start(low, high, weights, goal, load, light, d, share):
    """First row of the suffix of document d that brings the area to its goal.

    The tokens that are missing then come from d's own prefix (a share, and what short documents can't give).
    """
    width = 0.0
    start = float(high[d])
    for _ in range(6):
        tokens = max(goal[1] - load[1] - width, 0.0)
        prefix = max(share * tokens, tokens - light[-1, 1])
        wanted = (goal[0] - load[0] - _filler(light, tokens - prefix)) / weights[d] - _pairs(low[d], low[d] + prefix)
        start = math.sqrt(max(high[d] * (high[d] + 1.0) - 2.0 * wanted, 0.0) + 0.25) - 0.5
        width = 0.5 * (width + high[d] - start) if width > 0 else high[d] - start
    width = high[d] - start
    if width > goal[1] - load[1]:
        start = high[d] - (goal[1] - load[1])
    return max(int(math.ceil(start)), low[d])


@njit(cache=True)
def _filler(light, tokens):
    """Pairs of the lightest documents that hold so many tokens. light: cumulated (pairs, tokens)."""
    if tokens <= 0:
        return 0.0
    at = np.searchsorted(light[:, 1], tokens)
    if at >= len(light):
        return light[-1, 0]
    below, above = light[at - 1], light[at]
    return below[0] + (above[0] - below[0]) * (tokens - below[1]) / max(above[1] - below[1], 1.0)


@njit(cache=True)
def _take_suffix(low, high, load, weight, tails, num_tails, d, row, x):
    load[0] += weight * _pairs(row, high[d])
    load[1] += high[d] - row
    tails[d, num_tails[d], 0] = high[d]
    tails[d, num_tails[d], 1] = x
    num_tails[d] += 1
    high[d] = row


@njit(cache=True)
def _take_prefix(low, high, load, weight, heads, num_heads, d, rows, x):
    load[0] += weight * _pairs(low[d], low[d] + rows)
    load[1] += rows
    low[d] += rows
    if num_heads[d] and heads[d, num_heads[d] - 1, 1] == x:
        heads[d, num_heads[d] - 1, 0] = low[d]
        return
    heads[d, num_heads[d], 0] = low[d]
    heads[d, num_heads[d], 1] = x
    num_heads[d] += 1


@njit(cache=True)
def _fill_tokens(low, high, weights, goal, caps, load, heads, num_heads, x, cut, share):
    """Take tokens until the goal: the cut document's prefix, short documents, a prefix again."""
    if cut >= 0 and share > 0:
        rows = min(int(share * (goal[1] - load[1])), high[cut] - low[cut])
        rows = _fitting(low[cut], rows, (caps[0] - load[0]) / weights[cut])
        if rows > 0:
            _take_prefix(low, high, load, weights[cut], heads, num_heads, cut, rows, x)
    for d in range(len(low) - 1, -1, -1):
        width = high[d] - low[d]
        if load[1] >= goal[1] or d == cut or width == 0:
            continue
        if load[1] + width <= caps[1] and load[0] + weights[d] * _pairs(low[d], high[d]) <= caps[0]:
            _take_prefix(low, high, load, weights[d], heads, num_heads, d, width, x)
    for d in range(-1, len(low)):
        missing = int(goal[1] - load[1])
        at = cut if d < 0 else d
        if missing <= 0 or at < 0:
            continue
        rows = _fitting(low[at], min(missing, high[at] - low[at]), (caps[0] - load[0]) / weights[at])
        if rows > 0:
            _take_prefix(low, high, load, weights[at], heads, num_heads, at, rows, x)


@njit(cache=True)
def _fitting(low, rows, pairs):
    """At most so many rows from low on that their pairs fit."""
    if rows <= 0 or pairs <= 0:
        return 0
    if _pairs(low, low + rows) <= pairs:
        return rows
    return int(math.sqrt(low * (low + 1.0) + 2.0 * pairs + 0.25) - 0.5) - low
