"""Documents: what the search has to know of each: how area grows with its rows, and which keys a row interval needs.

A causal document has closed forms. Any other is described by a table of cells, row intervals that end where its slices
do and at even steps between: the area before each, and for its first and last row the span of keys that they see. Keys
that begin at the document's first token and lie apart from the rest (a sink, a shared question) are counted by
themselves. Within a cell what rows see is linear: exact for windows and all that follows the diagonal, near for
others; what the plan does comes from the slices themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hsap.ir.mask import Mask
from hsap.ir.problem import Problem
from hsap.ir.slice import K0, K1, Q0, Q1, area, cut, shrink
from hsap.ir.span import ranges
from hsap.planners.nested.cost import (
    FIRST_HIGH,
    FIRST_LOW,
    LAST_HIGH,
    LAST_LOW,
    PAIRS,
    POSITION,
    SEEN,
    SEEN_ROWS,
    SINK_SHARE,
    SLOPE,
    Documents,
)
from hsap.planners.nested.wide import EVERYTHING, split, wide_rows


def documents_of(problem: Problem, num_steps: int) -> tuple[Documents, np.ndarray, np.ndarray]:
    """Describe documents by falling area: (documents, first token of each int64 [n], spans of wide rows).

    num_steps: even steps of a document's table, and the most ends of slices that are added to them.
    """
    length = np.array(problem.layout.lengths, np.int64)
    starts = problem.layout.cu_seqlens[:-1]
    layers = np.array([count for _, count in problem.masks], np.float64)
    share = layers / layers.sum()
    table = np.full(len(length), -1)
    other = np.flatnonzero(~_causal(problem))
    table[other] = np.arange(len(other))
    wide = wide_rows(problem, other) if len(other) else np.zeros((0, 2), np.int64)
    position, cells = _cells(problem, other, wide, num_steps)
    curves = np.zeros((len(other), SEEN + SEEN_ROWS * len(share), position.shape[1]))
    curves[:, POSITION] = position
    pairs, slope = curves[:, PAIRS], curves[:, SLOPE, :-1]
    begin, stop = np.repeat(problem.layout.document_spans[other], slope.shape[1], axis=0).T
    # Empty cells have rows too: some of their own document.
    first_row, last_row = np.minimum(cells[:, 0], stop - 1), np.maximum(cells[:, 1] - 1, begin)
    for mask in range(len(share)) if len(other) else ():
        slices, far = split(problem.slices(mask), wide)
        grown = _pairs(slices, cells) + _pairs(far, cells, by_key=True)
        pairs[:, 1:] += share[mask] * np.cumsum(grown.reshape(slope.shape), axis=1)
        begins = _pairs_of_one(slices, first_row) + _pairs_of_one(far, first_row, by_key=True)
        slope += share[mask] * begins.reshape(slope.shape)
        seen = curves[:, SEEN + SEEN_ROWS * mask : SEEN + SEEN_ROWS * (mask + 1)]
        _read_keys(seen, share[mask], *(_seen(slices, rows, begin) for rows in (first_row, last_row)))
    total = np.where(table < 0, length * (length + 1) / 2, pairs[table, -1] if len(other) else 0)
    order = np.argsort(-total, kind="stable")
    return Documents(length[order], table[order], curves), starts[order], wide


def _causal(problem: Problem) -> np.ndarray:
    """Whether each document is causal in every mask: bool [n]."""
    out = np.ones(problem.layout.num_documents, bool)
    for mask, _ in problem.masks:
        names = (mask,) if isinstance(mask, Mask) else mask
        out &= np.array([m == Mask() for m in names], bool) if len(out) else out
    return out


def _cells(problem: Problem, other: np.ndarray, wide: np.ndarray, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents into cells, equally many each: (borders from a document's start [n, c + 1], spans [n · c, 2]).

    Documents with fewer rows than cells end in empty ones.
    """
    starts, stops = problem.layout.document_spans[other].T
    step = np.arange(num_steps + 1)
    borders = [(stops - starts)[:, None] * step // num_steps]
    for mask in range(len(problem.masks)) if len(other) else ():
        slices = problem.slices(mask)
        ends = np.unique(np.concatenate([slices[:, Q0], slices[:, Q1]]))
        lo, hi = np.searchsorted(ends, starts, side="right"), np.searchsorted(ends, stops)
        # The first and the last always: there the densest rows may be.
        pick = lo[:, None] + (hi - lo - 1)[:, None] * step[:-1] // (num_steps - 1)
        known = np.append(ends, 0)[np.where(hi[:, None] > lo[:, None], pick, len(ends))]
        borders.append(np.where(hi[:, None] > lo[:, None], known - starts[:, None], 0))
    if len(wide):
        first, stop = (np.searchsorted(wide[:, 0], side) for side in (starts, stops))
        at = first[:, None] + np.arange(min((stop - first).max(), num_steps))
        ends = np.append(wide, [[0, 0]], axis=0)[np.where(at < stop[:, None], at, len(wide))] - starts[:, None, None]
        borders.append(np.maximum(ends, 0).reshape(len(other), -1))
    position = np.sort(np.concatenate(borders, axis=1), axis=1)
    spans = np.stack([position[:, :-1], position[:, 1:]], axis=2) + starts[:, None, None]
    return position, spans.reshape(-1, 2)


def _pairs(slices: np.ndarray, spans: np.ndarray, by_key: bool = False) -> np.ndarray:
    """Count the pairs of spans of rows, or of keys: float64 [n]."""
    pieces, *which = cut(slices, EVERYTHING, spans) if by_key else cut(slices, spans, EVERYTHING)
    return np.bincount(which[by_key], weights=area(pieces), minlength=len(spans))


def _pairs_of_one(slices: np.ndarray, at: np.ndarray, by_key: bool = False) -> np.ndarray:
    """Count the keys that single rows see, or the rows that see single keys: float64 [n]."""
    distinct, which = np.unique(at, return_inverse=True)
    return _pairs(slices, np.stack([distinct, distinct + 1], axis=1), by_key)[which]


def exact_areas(problem: Problem, cells: np.ndarray, groups: int) -> np.ndarray:
    """Count the pairs that ranks compute, from the slices: float64 [inter_sp], all heads = 1. cells: see `Table`."""
    total = np.zeros(problem.topology.inter_sp)
    layers = sum(count for _, count in problem.masks)
    rows, which = np.unique(cells[:, :2], axis=0, return_inverse=True)
    by_rows = np.argsort(which.ravel(), kind="stable")
    borders = np.searchsorted(which.ravel()[by_rows], np.arange(len(rows) + 1))
    for mask, (_, count) in enumerate(problem.masks):
        strips, row, _ = cut(problem.slices(mask), rows, EVERYTHING)
        strip, at = ranges(borders[row], borders[row + 1])
        cell, pieces = by_rows[at], strips[strip]
        pieces[:, K0], pieces[:, K1] = (
            np.maximum(pieces[:, K0], cells[cell, 2]),
            np.minimum(pieces[:, K1], cells[cell, 3]),
        )
        pieces, kept = shrink(pieces)
        total += np.bincount(cells[cell[kept], 5], area(pieces), len(total)) * count / layers / groups
    return total


def _seen(slices: np.ndarray, rows: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Say what single rows see, from their document's start: (low, high, sink), each int64 [n].

    low, high: span of the keys that are not the sink's; sink: keys from the start that lie apart from the others.
    """
    distinct, which = np.unique(rows, return_inverse=True)
    pieces, row, _ = cut(slices, np.stack([distinct, distinct + 1], axis=1), EVERYTHING)
    start_of = np.zeros(len(distinct), np.int64)
    start_of[which] = starts
    rows_of = distinct - start_of
    first, stop = pieces[:, K0] - start_of[row], pieces[:, K1] - start_of[row]
    beyond = np.full(len(distinct), 1 << 60)
    np.minimum.at(beyond, row[first > 0], first[first > 0])
    sink = np.zeros(len(distinct), np.int64)
    apart = (first == 0) & (stop < beyond[row]) & (beyond[row] < 1 << 60)
    np.maximum.at(sink, row[apart], stop[apart])
    low, high = np.full(len(distinct), 1 << 60), np.zeros(len(distinct), np.int64)
    np.minimum.at(low, row[~apart], first[~apart])
    np.maximum.at(high, row[~apart], stop[~apart])
    # A row that sees nothing needs no key: only what it has itself.
    low, high = (np.where(high == 0, rows_of, side) for side in (low, high))
    return low[which], high[which], sink[which]


def _read_keys(seen: np.ndarray, share: float, first: Sequence[np.ndarray], last: Sequence[np.ndarray]) -> None:
    """Fill one mask's rows. seen: float64 [n, SEEN_ROWS, c + 1]; first, last: see `_seen`, [n · c]."""
    shape = (len(seen), seen.shape[2] - 1)
    seen[:, FIRST_LOW, :-1], seen[:, FIRST_HIGH, :-1] = first[0].reshape(shape), first[1].reshape(shape)
    seen[:, LAST_LOW, :-1], seen[:, LAST_HIGH, :-1] = last[0].reshape(shape), last[1].reshape(shape)
    seen[:, SINK_SHARE, 0] = np.maximum(first[2].reshape(shape).max(axis=1), last[2].reshape(shape).max(axis=1))
    seen[:, SINK_SHARE, 1] = share
