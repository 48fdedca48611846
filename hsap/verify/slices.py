"""Slices: rules on the slice tables, and where their pairs live. A plan may have many times more than instructions."""

from __future__ import annotations

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.plan import Plan
from hsap.loops import loop
from hsap.verify.columns import slice_at
from hsap.verify.report import Fault


def check_tables(plan: Plan) -> list[Fault]:
    """Slices must be canonical and within the token positions. The placement must be sound."""
    total = plan.problem.layout.num_tokens
    for m, table in enumerate(plan.slices):
        if not _sound(np.ascontiguousarray(table.T), total):
            say = f"slices[{m}]: a slice isn't canonical or leaves the {total} token positions"
            return [Fault("structure.slice_tables", None, None, None, None, say)]
    return []


@loop
def _sound(columns: np.ndarray, total: int) -> bool:
    """Whether all slices are within the tokens and as `hsap.ir.slice.shrink` would leave them."""
    for i in range(columns.shape[1]):
        q0, q1, k0, k1, lo, hi = slice_at(columns, i)
        if min(q0, q1, k0, k1) < 0 or min(lo, hi) < -total or max(q0, q1, k0, k1, lo, hi) > total:
            return False
        # A row sees something iff [q + lo, q + hi] meets [k0, k1); then the same for columns.
        if q0 >= q1 or k0 >= k1 or lo > hi or q0 < k0 - hi or q1 > k1 - lo or k0 < q0 + lo or k1 > q1 + hi:
            return False
        if lo < k0 - q1 + 1 or hi > k1 - 1 - q0:
            return False
    return True


def spans_of(shards: Shards, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the shards' span that holds each slice's queries and keys, -1 where none holds them all."""
    order = np.argsort(shards.spans[:, 0], kind="stable")
    starts, stops = shards.spans[order].T
    place_of_token = np.repeat(np.arange(len(order), dtype=np.int32), stops - starts)
    queries, keys = np.empty((2, len(table)), np.int64)
    _look_up(np.ascontiguousarray(table.T), place_of_token, order, np.ascontiguousarray(stops), queries, keys)
    return queries, keys


@loop
def _look_up(
    columns: np.ndarray,
    place_of_token: np.ndarray,
    span: np.ndarray,
    stops: np.ndarray,
    queries: np.ndarray,
    keys: np.ndarray,
) -> None:
    """Fill what `spans_of` gives. place_of_token: which span it is in, by position; span, stops: by place.

    Needs sound tables.
    """
    for i in range(len(queries)):
        q, k = place_of_token[columns[0, i]], place_of_token[columns[2, i]]
        queries[i] = span[q] if columns[1, i] <= stops[q] else -1
        keys[i] = span[k] if columns[3, i] <= stops[k] else -1
