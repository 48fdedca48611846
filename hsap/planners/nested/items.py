"""Items: the row intervals of documents that a level's bins have to place, as `peel` consumes them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hsap.loops import inner
from hsap.planners.nested.cost import END, HEADS, ORDER, OWN, area_before

ZERO = np.array([0])
"""A zero that isn't known when functions are compiled: they would be compiled twice, for the constant too."""


class Items(NamedTuple):
    """Items by falling area.

    document, place: int64 [n], which piece of which document's template an item is. low, high: int64 [n], rows that are
    left, consumed from both ends. part: float64 [n], of the document's pairs (head groups). own: int64 [n], 1 where its
    tokens are to be placed too.
    """

    document: np.ndarray
    place: np.ndarray
    low: np.ndarray
    high: np.ndarray
    part: np.ndarray
    own: np.ndarray


@inner
def items_of(pieces, counts, documents, groups):
    """List what a template leaves to be placed."""
    num = 0
    for d in range(len(counts)):
        for i in range(counts[d]):
            num += pieces[d, i, ORDER] == 1
    document, place, own = np.zeros(num, np.int64), np.zeros(num, np.int64), np.zeros(num, np.int64)
    low, high = np.zeros(num, np.int64), np.zeros(num, np.int64)
    part, pairs = np.zeros(num), np.zeros(num)
    num = 0
    for d in range(len(counts)):
        begin = ZERO[0]
        for i in range(counts[d]):
            end = pieces[d, i, END]
            if pieces[d, i, ORDER] == 1:
                here = 0
                for g in range(groups):
                    here += pieces[d, i, HEADS] >> g & 1
                share = here / groups
                size = share * (area_before(documents, d, end) - area_before(documents, d, begin))
                # Documents come by falling area, so that few items have far to go.
                at = num
                while at > 0 and pairs[at - 1] < size:
                    document[at], place[at], own[at] = document[at - 1], place[at - 1], own[at - 1]
                    low[at], high[at], part[at], pairs[at] = low[at - 1], high[at - 1], part[at - 1], pairs[at - 1]
                    at -= 1
                document[at], place[at], own[at] = d, i, pieces[d, i, OWN]
                low[at], high[at], part[at], pairs[at] = begin, end, share, size
                num += 1
            begin = end
    return Items(document, place, low, high, part, own)


@inner
def pairs_of(items, documents, t, begin, end):
    """Pairs of the rows [begin, end) of item t."""
    d = items.document[t]
    return items.part[t] * (area_before(documents, d, end) - area_before(documents, d, begin))


@inner
def tokens_of(items, t):
    """Tokens of what is left of item t."""
    return (items.high[t] - items.low[t]) * items.own[t]
