"""Spans: half-open ranges of token positions, kept as int64 arrays of shape [n, 2].

A *span table* is such an array in which order matters (it is a row order); a *span set* is sorted and disjoint.
"""

from __future__ import annotations

import numpy as np


def row_starts(table: np.ndarray) -> np.ndarray:
    """Rows before each span in row order, and at last all of them: int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(table[:, 1] - table[:, 0])])


def coalesce(table: np.ndarray) -> np.ndarray:
    """Join neighbours that continue each other and drop empty spans; the token order stays as it is."""
    table = table[table[:, 1] > table[:, 0]]
    if len(table) < 2:
        return table
    first = np.r_[True, table[1:, 0] != table[:-1, 1]]
    last = np.r_[first[1:], True]
    return np.stack([table[first, 0], table[last, 1]], axis=1)


def positions(table: np.ndarray) -> np.ndarray:
    """List the token positions of a span table in row order: int64 [num_tokens]."""
    lengths = table[:, 1] - table[:, 0]
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(table[:, 0] - (ends - lengths), lengths)


def ranges(lo: np.ndarray, hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Enumerate many integer ranges at once: (owner, value), both [sum(hi - lo)].

    `owner[i]` says which range the i-th value belongs to. The vectorised form of two nested loops.
    """
    counts = np.maximum(hi - lo, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(counts)
    value = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts) + np.repeat(lo, counts)
    return owner, value
