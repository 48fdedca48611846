"""Expand: a column's draft becomes the streams of all inter × intra ranks.

Columns differ in their peers, in the size of their head share and in the rows that each rank calls its own, nothing
else; so one lowering serves them all.
"""

from __future__ import annotations

import itertools

import numpy as np

from hsap.compiler.lower import Draft
from hsap.ir.block import Blocks, Shards
from hsap.ir.heads import HeadRun
from hsap.ir.precision import Precision, buffer_bytes, row_bytes
from hsap.ir.problem import Problem
from hsap.ir.program import NONE, Buffers, Op, Programs, Role, Space, typed
from hsap.ir.reshard import scratch_bytes
from hsap.ir.span import ranges, row_starts, take_rows


def place_rows(problem: Problem, shards: Shards) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give (span table, column rows [inter_sp, 2], rank rows [num_ranks, 2]); see `Plan`.

    An InterSP shard is split evenly over its intra ranks, in row order, ± 1 token.
    """
    inter, intra = problem.topology.inter_sp, problem.topology.intra_sp
    column_rows = np.array([shards.of_rank(i) for i in range(inter)], dtype=np.int64).reshape(inter, 2)
    if intra == 1:
        return shards.spans, column_rows, column_rows
    tables, rank_rows, count = [shards.spans], [], len(shards.spans)
    for lo, hi in column_rows:
        table = shards.spans[lo:hi]
        total = int((table[:, 1] - table[:, 0]).sum())
        for j in range(intra):
            part = take_rows(table, total * j // intra, total * (j + 1) // intra)
            tables.append(part)
            rank_rows.append((count, count + len(part)))
            count += len(part)
    return np.concatenate(tables), column_rows, np.array(rank_rows, dtype=np.int64)


def expand(problem: Problem, shards: Shards, blocks: Blocks, draft: Draft, rows, num_groups: int, direction: str):
    """Give every rank its instructions and (unplaced) buffers. rows: what `place_rows` returned."""
    intra = problem.topology.intra_sp
    num_columns, num_ranks = problem.topology.inter_sp, problem.num_ranks
    inter_of = np.arange(num_ranks) // intra
    by_rank = np.argsort(draft.buffers["rank"], kind="stable")
    new_index = np.empty_like(by_rank)
    new_index[by_rank] = np.arange(len(by_rank))
    buffer_starts = np.searchsorted(draft.buffers["rank"][by_rank], np.arange(num_columns + 1))
    code_starts = np.searchsorted(draft.code["rank"], np.arange(num_columns + 1))

    rank_of_buffer, b = ranges(buffer_starts[inter_of], buffer_starts[inter_of + 1])
    table = {name: column[by_rank][b] for name, column in draft.buffers.items()}
    rank_of_code, c = ranges(code_starts[inter_of], code_starts[inter_of + 1])
    code = {name: column[c] for name, column in draft.code.items()}

    offsets = np.searchsorted(rank_of_buffer, np.arange(num_ranks + 1))
    shift = (offsets[:-1] - buffer_starts[inter_of])[rank_of_code]
    buf = np.stack([np.where(operand >= 0, new_index[operand] + shift, NONE) for operand in code["buf"].T], axis=1)
    heads = _head_table(problem, num_groups)
    buffers = _buffers(problem, shards, table, rank_of_buffer, offsets, rows, heads, direction)
    buffers = _with_scratch(problem, rows, buffers, code, rank_of_code, buf)
    whole = (code["op"] == Op.COPY) | (code["op"] == Op.ALL_TO_ALL)
    # Rows of a table whose last one is NONE, so that -1 finds it.
    places = np.concatenate([_borders(shards.offsets), rows[1], [[NONE, NONE]]])
    column = np.where(whole, len(shards) + rank_of_code // intra, -1)
    moved = np.where(code["shard"] >= 0, code["shard"], column)
    slices = np.concatenate([_borders(blocks.offsets), [[NONE, NONE]]])
    return typed(
        Programs(
            np.searchsorted(rank_of_code, np.arange(num_ranks + 1)),
            code["op"],
            code["role"],
            np.where(code["peer"] >= 0, code["peer"] * intra + rank_of_code % intra, NONE),
            code["round"],
            buf,
            places.take(moved, axis=0),
            slices.take(code["block"], axis=0),
            _pick(heads, rank_of_code % intra, code["group"]),
            code["stage"],
            typed(buffers),
        )
    )


def _head_table(problem: Problem, num_groups: int) -> np.ndarray:
    """Heads of each intra index and head group, numbered within the share; the last entry (ALL) is the whole share."""
    table = np.zeros((problem.topology.intra_sp, num_groups + 1, 4), np.int64)
    for j, share in enumerate(problem.heads.shares(problem.topology.intra_sp)):
        runs = [*problem.heads.groups(share, num_groups), HeadRun(0, share.q_count, 0, share.kv_count)]
        table[j] = runs
    return table


def _pick(heads: np.ndarray, intra_index: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Heads of each (intra index, head group or ALL): int64 [n, 4]."""
    num_entries = heads.shape[1]
    return heads.reshape(-1, 4).take(intra_index * num_entries + group % num_entries, axis=0)


def _borders(offsets: np.ndarray) -> np.ndarray:
    """Ranges as rows (first, stop): int64 [n, 2]."""
    return np.stack([offsets[:-1], offsets[1:]], axis=1)


def _buffers(problem, shards, table, rank, offsets, rows, heads, direction) -> Buffers:
    spans, column_rows, rank_rows = rows
    intra = problem.topology.intra_sp
    own = (table["space"] == Space.INPUT) | (table["space"] == Space.OUTPUT)
    if direction == "backward":
        own &= (table["role"] != Role.Q) & (table["role"] != Role.KV)
    own &= intra > 1
    places = np.concatenate([_borders(shards.offsets), column_rows, rank_rows])
    home = len(shards) + np.where(own, len(column_rows) + rank, rank // intra)
    held = places.take(np.where(table["shard"] >= 0, table["shard"], home), axis=0)
    held_heads = _pick(heads, rank % intra, table["group"])
    held_heads[own] = problem.heads.all_heads
    precision = Precision.of(problem.heads.dtype, problem.wire_dtype)
    row, stat = row_bytes(precision, table["role"], table["space"], table["acc"], held_heads, problem.heads.head_dim)
    ends = row_starts(spans)
    num_rows = ends[held[:, 1]] - ends[held[:, 0]]
    return Buffers(
        offsets,
        table["role"],
        table["space"],
        table["acc"],
        held,
        held_heads,
        buffer_bytes(num_rows, row, stat),
        np.full(len(num_rows), NONE),
    )


def _with_scratch(problem, rows, buffers: Buffers, code, rank_of_code, buf) -> Buffers:
    """Size the scratch buffers of AllToAll, and strip them of rows and heads."""
    spans, _, rank_rows = rows
    ends = row_starts(spans)
    tokens = (ends[rank_rows[:, 1]] - ends[rank_rows[:, 0]]).reshape(-1, problem.topology.intra_sp)
    precision = Precision.of(problem.heads.dtype, problem.wire_dtype)
    exchanges = np.flatnonzero(code["op"] == Op.ALL_TO_ALL)
    _, target, scratch = buf[exchanges, :3].T
    outward = buffers.space[target] != Space.OUTPUT
    for role, to_column in itertools.product(Role, (True, False)):
        mine = np.flatnonzero((code["role"][exchanges] == role) & (outward == to_column))
        if len(mine):
            num_bytes = scratch_bytes(role, to_column, problem.heads, precision, tokens).ravel()
            buffers.num_bytes[scratch[mine]] = num_bytes[rank_of_code[exchanges[mine]]]
    buffers.rows[scratch] = NONE
    buffers.heads[scratch] = 0
    return buffers
