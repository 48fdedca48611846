"""Fill: documents laid on ranks one after another, whole where they fit. Ours, for `flashcp`.

A document has a length and, from its two ends inwards, `RINGS` rings of rows with an area each: taking equally many
rows from both ends makes every part of a causal document alike. A rank is filled to the mean of what is left, in tokens
and in area at once. That always works out as long as what a rank still lacks has a density (area per token) between
those of the lightest and of the densest document left: then a share of each would make it up. So a whole document
is taken only where this stays so, and cuts are such pairs.
"""

from __future__ import annotations

import numpy as np

from hsap.loops import loop

RINGS = 16
"""Rings of a document: how finely its area is known. Causal and full documents are even, others nearly."""


@loop
def fill(lengths, rings, order, num_ranks, used, gap, fit):
    """Fill ranks with documents: (shares int64 [n, 4], KV rows that travel, excess of the busiest rank).

    lengths: int64 [n]. rings: float64 [n, RINGS] areas. order: documents, densest first. used, gap: how far a rank may
    go over the mean, and stay under what it should get, in means. fit: whether whole documents beside a cut one are
    chosen to come out. shares: (document, rank, first, stop), tokens counted from both ends in turn. KV rows are those
    of causal documents. The excess is that of area or tokens over the mean, whichever is larger.
    """
    area = rings.sum(axis=1)
    mean = np.array([lengths.sum() / num_ranks, max(area.sum() / num_ranks, 1e-9)])
    rest = np.array([float(lengths.sum()), area.sum()])
    taken = np.zeros(len(lengths), np.int64)
    shares = np.empty((len(lengths) + 10 * num_ranks, 4), np.int64)
    count, rows, excess = 0, 0.0, 0.0
    for rank in range(num_ranks):
        want = rest / (num_ranks - rank)
        # Where ranks before have left too much, no gap is left any more.
        spare = gap * mean if (want <= (1 + used / 2) * mean).all() else 0 * mean
        over = np.maximum((1 + used) * mean - want, 0)
        begin, lack = count, want.copy()
        order = order[taken[order] < lengths[order]]
        if rank == num_ranks - 1:
            count = _take_rest(lengths, rings, taken, order, rank, lack, shares, count)
        else:
            count = _fill_one(lengths, rings, area, taken, order, rank, lack, over, spare, fit, shares, count)
        rest -= want - lack
        excess = max(excess, ((want - lack) / mean).max() - 1)
        for i in range(begin, count):
            # A share needs its document's KV up to the share's last row, less its own.
            rows += lengths[shares[i, 0]] - shares[i, 2] / 2 - (shares[i, 3] - shares[i, 2])
    return shares[:count].copy(), rows, excess


@loop
def _fill_one(lengths, rings, area, taken, order, rank, lack, over, spare, fit, shares, count):
    """Fill one rank: first a document that has to be cut, then whole ones, then cuts for what is lacking."""
    density = area / lengths
    cut = _to_cut(lengths, area, taken, order, lack + over)
    if cut >= 0 and density[cut] * lack[0] >= lack[1]:
        count = _take_beside(lengths, area, rings, taken, order, cut, rank, lack, over, spare, fit, shares, count)
        lowest, _ = _range(density, lengths, taken, order, cut)
        stop = _part(lengths, rings, area, taken, order, cut, lowest, lack, over)
        count = _take(lengths, rings, taken, cut, stop, rank, lack, shares, count)
    for d in order:
        if taken[d] == 0 and lengths[d] <= lack[0] + over[0] and area[d] <= lack[1] + over[1]:
            lowest, highest = _range(density, lengths, taken, order, d)
            tokens, pairs = lack[0] - lengths[d], lack[1] - area[d]
            # What would then lack must be such that documents which are left can make it up.
            if lowest * tokens <= pairs + over[1] and pairs - over[1] <= highest * max(tokens, 0):
                count = _take(lengths, rings, taken, d, lengths[d], rank, lack, shares, count)
    for _ in range(4):
        if lack[0] < 1 or (lack <= spare).all():
            break
        dense, light = _around(density, lengths, taken, order, max(lack[1], 0.0) / lack[0])
        if light < 0:
            break
        first, stop = light, min(taken[light] + np.int64(round(lack[0])), lengths[light])
        if dense >= 0 and dense != light:
            part = _part(lengths, rings, area, taken, order, dense, density[light], lack, over)
            # A crumb would cost all of its document's KV.
            if part - taken[dense] >= max(over[0] / 4, 1):
                first, stop = dense, part
        count = _take(lengths, rings, taken, first, stop, rank, lack, shares, count)
    return count


@loop
def _to_cut(lengths, area, taken, order, most):
    """Densest document that has been cut and not finished, or else of those that are too large; -1: none."""
    large = -1
    for d in order:
        if 0 < taken[d] < lengths[d]:
            return d
        if large < 0 and taken[d] == 0 and (lengths[d] > most[0] or area[d] > most[1]):
            large = d
    return large


@loop
def _take_rest(lengths, rings, taken, order, rank, lack, shares, count):
    """Give a rank everything that is left."""
    for d in order:
        count = _take(lengths, rings, taken, d, lengths[d], rank, lack, shares, count)
    return count


@loop
def _take_beside(lengths, area, rings, taken, order, cut, rank, lack, over, spare, fit, shares, count):
    """Take whole documents, lighter than document `cut`, until the rest of the rank's tokens may all be its own.

    The lightest first; with `fit`, at once one that makes it come out, if there is one: looked for only when the
    document that relieves most (`reach`) can do it.
    """
    density = area[cut] / lengths[cut]
    reach, at = np.inf if fit else -np.inf, len(order) - 1
    while lack[0] * density > lack[1] + over[1]:
        excess = lack[0] * density - lack[1]
        best = -1
        if excess - reach <= over[1]:
            best_off, reach = np.inf, 0.0
            for d in order[::-1]:
                if area[d] >= density * lengths[d]:
                    break
                if taken[d] == 0 and lengths[d] <= lack[0]:
                    off = excess - (lengths[d] * density - area[d])
                    reach = max(reach, excess - off)
                    if -spare[1] <= off <= over[1] and abs(off) < best_off:
                        best, best_off = d, abs(off)
        if best < 0:
            while at >= 0 and taken[order[at]] > 0:
                at -= 1
            best = order[at]
            relief = lengths[best] * density - area[best]
            if at < 0 or relief <= 0 or relief >= excess or lengths[best] > lack[0]:
                break
        count = _take(lengths, rings, taken, best, lengths[best], rank, lack, shares, count)
    return count


@loop
def _range(density, lengths, taken, order, without):
    """Lowest and highest density of the documents that are left, one left out."""
    lowest = highest = density[without]
    for d in order:
        if d != without and taken[d] < lengths[d]:
            highest = density[d]
            break
    for d in order[::-1]:
        if d != without and taken[d] < lengths[d]:
            lowest = density[d]
            break
    return lowest, highest


@loop
def _lightest(lengths, area, taken, order, without, tokens):
    """Mean density of so many of the lightest tokens that are left, one document left out; 0: there is no other.

    Where there are fewer, the last document is taken to be longer.
    """
    wanted = max(tokens, 1.0)
    pairs, left, last = 0.0, wanted, 0.0
    for d in order[::-1]:
        if d != without and taken[d] < lengths[d] and left > 0:
            part, last = min(left, float(lengths[d] - taken[d])), area[d] / lengths[d]
            pairs += part * last
            left -= part
    return (pairs + left * last) / wanted


@loop
def _around(density, lengths, taken, order, ratio):
    """Documents left with densities next to a ratio, begun ones first: (at least it, below it), -1: there is none.

    Where none is below the ratio, the lightest stands in.
    """
    dense, light, lightest = -1, -1, -1
    for d in order:
        if taken[d] < lengths[d]:
            lightest = d
            if density[d] >= ratio:
                if dense < 0 or taken[dense] == 0:
                    dense = d
            elif light < 0 or (taken[d] > 0 and taken[light] == 0):
                light = d
    return dense, light if light >= 0 else lightest


@loop
def _part(lengths, rings, area, taken, order, d, other, lack, over):
    """Up to which token a rank should take a document: all of it if that fits, else so that area comes out.

    other: density (area per token) of what will make up the tokens, where the lightest documents left have as many; if
    this document's isn't above it, the document is to make up all tokens that lack.
    """
    stop = _part_beside(lengths, rings, area, taken, d, other, lack, over)
    for _ in range(2):  # the less it takes, the more the others have to make up, and the denser they are
        light = _lightest(lengths, area, taken, order, d, lack[0] - (stop - taken[d]))
        stop = _part_beside(lengths, rings, area, taken, d, max(other, light), lack, over)
    return stop


@loop
def _part_beside(lengths, rings, area, taken, d, other, lack, over):
    """As `_part`, where all that makes up the tokens has the density `other`."""
    left = np.array([float(lengths[d] - taken[d]), area[d] - _area(lengths, rings, d, taken[d])])
    if (left <= lack + over).all() and other * max(lack[0] - left[0], 0.0) <= lack[1] - left[1] + over[1]:
        return lengths[d]
    density, tokens = left[1] / left[0], max(lack[0], 0.0)
    if density > other and density * tokens > lack[1] + over[1]:
        tokens = min(max((lack[1] - other * tokens) / (density - other), 0.0), tokens)
    return min(taken[d] + np.int64(round(tokens)), lengths[d])


@loop
def _take(lengths, rings, taken, d, stop, rank, lack, shares, count):
    """Give a rank the tokens of a document from the first that is left up to `stop`."""
    if stop <= taken[d]:
        return count
    lack[0] -= stop - taken[d]
    lack[1] -= _area(lengths, rings, d, stop) - _area(lengths, rings, d, taken[d])
    if count and shares[count - 1, 0] == d and shares[count - 1, 1] == rank:
        shares[count - 1, 3] = stop
    else:
        shares[count] = np.array([d, rank, taken[d], stop])
        count += 1
    taken[d] = stop
    return count


@loop
def _area(lengths, rings, d, stop):
    """Area of a document's first `stop` tokens, counted from both ends in turn."""
    at = stop * rings.shape[1] / lengths[d]
    whole = int(at)
    total = rings[d, :whole].sum()
    return total + (at - whole) * rings[d, whole] if whole < rings.shape[1] else total
