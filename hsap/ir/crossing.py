"""Crossing: the bytes between nodes that would remain if nothing crossed twice for the same node.

Inputs (q, kv, do) need to reach a node once, however many of its ranks read them: a relay inside the node can pass them
on. Partial results (o, dq, dkv) need to leave a node once, however many of its ranks computed a part: they can be
merged inside it first. Neither need cross for the node their rows live on.
"""

from __future__ import annotations

import numpy as np

from hsap.ir.effects import Flows, flows
from hsap.ir.plan import Plan
from hsap.ir.program import KV_ROLES, PARTIAL_ROLES, Op, Programs, Space
from hsap.ir.span import ranges


def once_per_node_bytes(plan: Plan, programs: Programs) -> int:
    """Count what a mask and direction sends between nodes, every row and head once per node.

    Of inputs: once per node that receives them; of partial results: once per node that sends them; the node where a
    row is at home counts for neither. Never more than `Flows.between_nodes`; equal where nothing crosses twice.
    """
    nodes, sent = plan.problem.node_of, flows(plan, programs)
    between = np.flatnonzero((nodes[sent.src] != nodes[sent.dst]) & (sent.num_bytes > 0))
    rows, heads = _carried(plan, programs, sent, between)
    at, src, dst, num_bytes = (column[between] for column in (sent.at, sent.src, sent.dst, sent.num_bytes))
    role = programs.role[at].astype(np.int64)
    entry, part, part_heads = _head_parts(heads)
    width = num_bytes // (_num_rows(plan, rows) * heads[:, 1])
    node = nodes[np.where(np.isin(role, PARTIAL_ROLES), src, dst)]
    # Rows are told apart by role, width of a row and head (a role may travel in two dtypes), heads, and node.
    kinds, kind = _distinct(role[entry], width[entry], part, node[entry])
    messages, _ = _distinct(kind, *rows[entry].T)
    spans = _spans(plan, messages[:, 1:], messages[:, 0])
    first, stop = (np.searchsorted(nodes, kinds[:, 3], side=side) for side in ("left", "right"))
    owner, rank = ranges(first, stop)
    home = _spans(plan, plan.rank_rows[rank], owner)
    new_rows = _union(np.concatenate([home, spans]), len(kinds)) - _union(home, len(kinds))
    return int((new_rows * kinds[:, 1] * part_heads[kinds[:, 2]]).sum())


def _carried(plan: Plan, programs: Programs, sent: Flows, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and heads of messages: ranges of the span table int64 [n, 2]; first and count over all heads int64 [n, 2].

    Heads are KV heads for roles that hold keys and values, else query heads.
    """
    at, src, dst = sent.at[index], sent.src[index], sent.dst[index]
    shares = np.array(plan.problem.heads.shares(plan.topology.intra_sp), np.int64)
    exchanged = programs.op[at] == Op.ALL_TO_ALL
    to_column = programs.buffers.space[programs.buf[at, 1]] != Space.OUTPUT
    # An AllToAll moves the rows of the rank that has them at home, for the heads of the other one.
    home, away = np.where(to_column, src, dst), np.where(to_column, dst, src)
    rows = np.where(exchanged[:, None], plan.rank_rows[home], programs.rows[at])
    share = shares[np.where(exchanged, away, src) % len(shares)]
    column = np.where(np.isin(programs.role[at], KV_ROLES), 2, 0)
    each = np.arange(len(at))
    first = share[each, column] + np.where(exchanged, 0, programs.heads[at, column])
    count = np.where(exchanged, share[each, column + 1], programs.heads[at, column + 1])
    return rows.astype(np.int64), np.stack([first, count], axis=1)


def _head_parts(heads: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut head ranges at each other's borders: (message, part) of every piece, and the heads that each part has."""
    borders = np.unique(np.concatenate([heads[:, 0], heads.sum(axis=1)]))
    entry, part = ranges(*(np.searchsorted(borders, at) for at in (heads[:, 0], heads.sum(axis=1))))
    return entry, part, np.diff(borders)


def _distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort out equal rows of a table given by column: the distinct rows int64 [m, columns], and which each is [n]."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, index = np.unique(column, return_inverse=True)
        key = key * max(len(values), 1) + index
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return np.stack(columns, axis=1)[first], which


def _num_rows(plan: Plan, rows: np.ndarray) -> np.ndarray:
    ends = np.concatenate([[0], np.cumsum(plan.spans[:, 1] - plan.spans[:, 0])])
    return ends[rows[:, 1]] - ends[rows[:, 0]]


def _spans(plan: Plan, rows: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """List the spans of many row ranges as (kind, start, stop): int64 [n, 3]."""
    owner, span = ranges(rows[:, 0], rows[:, 1])
    return np.column_stack([kind[owner], plan.spans[span]])


def _union(spans: np.ndarray, num_kinds: int) -> np.ndarray:
    """Count the token positions that the spans of each kind cover: int64 [num_kinds]."""
    reach = int(spans[:, 2].max(initial=0)) + 1
    start, stop = spans[:, 0] * reach + spans[:, 1], spans[:, 0] * reach + spans[:, 2]
    order = np.argsort(start)
    start, stop = start[order], np.maximum.accumulate(stop[order])
    covered = np.maximum(stop - np.maximum(start, np.concatenate([[0], stop[:-1]])), 0)
    total = np.zeros(num_kinds, np.int64)
    np.add.at(total, spans[order, 0], covered)
    return total
