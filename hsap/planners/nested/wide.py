"""Wide rows: few rows that see far more than the others of their document, as the last blocks of `blockwise` do.

Whoever computes such a row receives all that it sees, and where their pairs are more than a bin may compute, several
do. So they stay out of the pieces: a piece's bin computes, beside the piece's other rows, all wide rows of the document
against the keys that the piece owns. Their queries travel to every bin and partial results travel home, which is little
as they are few; keys stay where they are. To the search a row of the document then has the pairs of its query, where
that isn't wide, and those of its key with the wide queries: the areas of `documents` say so, and nothing else changes.
"""

from __future__ import annotations

import numpy as np

from hsap.ir.problem import Problem
from hsap.ir.slice import Q0, Q1, UNBOUNDED, area, cut
from hsap.ir.span import coalesce, ranges
from hsap.planners.nested.levels import Table

FAR_ABOVE = 4.0
"""Times the mean of their document that wide rows' pairs are, at least."""
EVERYTHING = np.array([[0, UNBOUNDED]])


def wide_rows(problem: Problem, other: np.ndarray) -> np.ndarray:
    """Find the wide rows of the documents `other` (indices): spans int64 [n, 2], sorted, each within one document.

    A document's wide rows are as many as cost less on their way to all bins (as q and o) than the keys that they see
    would (as kv) on theirs to the bins that it takes to compute them, at least one.
    """
    starts, stops = problem.layout.document_spans[other].T
    tables = [problem.slices(mask) for mask in range(len(problem.masks))]
    ends = np.unique(np.concatenate([starts, stops, *(table[:, side] for table in tables for side in (Q0, Q1))]))
    spans = np.stack([ends[:-1], ends[1:]], axis=1)
    document = np.searchsorted(starts, spans[:, 0], side="right") - 1
    inside = (document >= 0) & (spans[:, 0] < np.append(stops, 0)[document])
    layers = sum(count for _, count in problem.masks)
    pairs, total = np.zeros(len(spans)), 0.0
    for table, (_, count) in zip(tables, problem.masks, strict=True):
        pieces, span, _ = cut(table, spans, EVERYTHING)
        pairs += np.bincount(span, weights=area(pieces), minlength=len(spans)) * count / layers
        total += float(area(table).sum()) * count / layers
    spans, pairs, document = spans[inside], pairs[inside], document[inside]
    rows = spans[:, 1] - spans[:, 0]
    mean = np.bincount(document, weights=pairs, minlength=len(other)) / (stops - starts)
    wide = pairs > FAR_ABOVE * mean[document] * rows
    num_rows = np.bincount(document, weights=rows * wide, minlength=len(other))
    bins = np.bincount(document, weights=pairs * wide, minlength=len(other)) * problem.topology.inter_sp / max(total, 1)
    tokens = problem.layout.num_tokens / problem.topology.inter_sp
    few = num_rows * (problem.heads.num_q_heads / problem.heads.num_kv_heads) < tokens * np.maximum(bins, 1)
    few &= stops - starts > tokens
    kept = wide & few[document]
    joined = [coalesce(spans[kept & (document == d)]) for d in np.unique(document[kept])]
    return np.concatenate(joined) if joined else np.zeros((0, 2), np.int64)


def split(slices: np.ndarray, wide: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split slices by their rows: (those of other rows, those of wide rows)."""
    if not len(wide):
        return slices, slices[:0]
    borders = np.concatenate([[0], wide.ravel(), [UNBOUNDED]])
    pieces, span, _ = cut(slices, np.stack([borders[:-1], borders[1:]], axis=1), EVERYTHING)
    return pieces[span % 2 == 0], pieces[span % 2 == 1]


def spread(table: Table, wide: np.ndarray) -> Table:
    """Take wide rows out of the cells, and give them to the cells' ranks against the cells' rows as keys."""
    if not len(wide):
        return table
    cells, borders = table.cells, np.concatenate([[0], wide.ravel(), [UNBOUNDED]])
    first, stop = borders[::2], borders[1::2]
    cell, gap = ranges(np.searchsorted(stop, cells[:, 0], side="right"), np.searchsorted(first, cells[:, 1]))
    others = cells[cell]
    others[:, 0], others[:, 1] = np.maximum(others[:, 0], first[gap]), np.minimum(others[:, 1], stop[gap])
    # A cell may see all keys of its document where that has wide rows: they are in between.
    cell, row = ranges(*(np.searchsorted(wide[:, 0], cells[:, side]) for side in (2, 3)))
    columns = cells[cell]
    columns[:, 2:4], columns[:, :2], columns[:, 6] = cells[cell, :2], wide[row], 1
    return Table(table.homes, np.concatenate([others[others[:, 0] < others[:, 1]], columns]))
