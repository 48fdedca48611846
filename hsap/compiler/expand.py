"""Expand: a column's draft becomes the streams of all inter × intra ranks.

Columns differ in their peers, in the size of their head share and in the rows that each rank calls its own, nothing
else; so one lowering serves them all.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np

from hsap.compiler.lower import CODE, HELD, MAX_OPERANDS, Draft
from hsap.compiler.widen import Runs
from hsap.ir.block import Shards
from hsap.ir.heads import HeadShape
from hsap.ir.precision import ALIGNMENT, Precision, unit_bytes
from hsap.ir.problem import Problem
from hsap.ir.program import KV_ROLES, NONE, Buffers, Op, Programs, Role, Space
from hsap.ir.reshard import scratch_bytes
from hsap.ir.sort import order_of
from hsap.ir.span import row_starts
from hsap.loops import loop

_OP, _RANK, _STAGE, _ROLE = (CODE.index(name) for name in ("op", "rank", "stage", "role"))
_PEER, _ROUND, _FIRST, _SLICE, _RUN = (CODE.index(name) for name in ("peer", "round", "first", "slice", "run"))
_BUF = len(CODE)
_HELD_ROLE, _HELD_SPACE, _HELD_ACC, _HELD_RANK, _HELD_FIRST, _HELD_STOP, _HELD_RUN = range(len(HELD))
_IS_KV = np.isin(np.arange(-1, len(Role) - 1), KV_ROLES)


def place_rows(problem: Problem, shards: Shards) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give (span table, column rows [inter_sp, 2], rank rows [num_ranks, 2]); see `Plan`.

    An InterSP shard is split evenly over its intra ranks, in row order, ± 1 token.
    """
    inter, intra = problem.topology.inter_sp, problem.topology.intra_sp
    borders = shards.offsets[np.searchsorted(shards.home, np.arange(inter + 1))]
    column_rows = np.stack([borders[:-1], borders[1:]], axis=1)
    if intra == 1:
        return shards.spans, column_rows, column_rows
    parts, rank_rows = _deal_rows(shards.spans, column_rows, intra)
    return np.concatenate([shards.spans, parts]), column_rows, rank_rows


@loop
def _deal_rows(spans: np.ndarray, column_rows: np.ndarray, intra: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the rows of each column evenly: (spans of all ranks [n, 2], the range of each rank's [num_ranks, 2]).

    Ranges count from the beginning of the span table, where the shards' spans are.
    """
    parts = np.empty((len(spans) + len(column_rows) * intra, 2), np.int64)
    rank_rows = np.empty((len(column_rows) * intra, 2), np.int64)
    count = 0
    for column in range(len(column_rows)):
        first, stop = column_rows[column]
        total = 0
        for i in range(first, stop):
            total += spans[i, 1] - spans[i, 0]
        row, i = 0, first  # row: of the column, where span i begins
        for j in range(intra):
            begin, end = total * j // intra, total * (j + 1) // intra
            rank_rows[column * intra + j, 0] = len(spans) + count
            while begin < end:
                length = spans[i, 1] - spans[i, 0]
                upto = min(end - row, length)
                parts[count, 0], parts[count, 1] = spans[i, 0] + begin - row, spans[i, 0] + upto
                begin, count = row + upto, count + 1
                if upto == length:
                    row, i = row + length, i + 1
            rank_rows[column * intra + j, 1] = len(spans) + count
    return parts[:count], rank_rows


def expand(problem: Problem, draft: Draft, column_rows: np.ndarray, rank_rows: np.ndarray, direction: str) -> Programs:
    """Give every rank its instructions and (unplaced) buffers. column_rows, rank_rows: as `place_rows` gave them."""
    intra, num_columns = problem.topology.intra_sp, problem.topology.inter_sp
    by_rank = order_of(draft.buffers[_HELD_RANK])
    held = draft.buffers.take(by_rank, axis=1)
    new_index = np.empty_like(by_rank)
    new_index[by_rank] = np.arange(len(by_rank))
    numbers = np.arange(num_columns + 1)
    of_column = (np.searchsorted(held[_HELD_RANK], numbers), np.searchsorted(draft.code[_RANK], numbers))
    offsets, code_offsets = (_repeat(borders, intra) for borders in of_column)
    heads = _head_table(problem.heads, intra, draft.runs)
    starts = row_starts(draft.table.spans)
    buffers = _buffers(problem, held, of_column[0], offsets, (starts, column_rows, rank_rows), heads, direction)
    columns = _instructions(draft.code, of_column[1], int(code_offsets[-1]), new_index, of_column[0], offsets,
                            column_rows, heads)  # fmt: skip
    op, role, peer, round_, buf, rows, slices, of_heads, stage = columns
    programs = Programs(code_offsets, op, role, peer, round_, buf, rows, slices, of_heads, stage, draft.index, buffers)
    if intra > 1:
        _size_scratch(problem, starts[rank_rows[:, 1]] - starts[rank_rows[:, 0]], programs)
    return programs


def _repeat(borders: np.ndarray, intra: int) -> np.ndarray:
    """Borders of ranks from those of columns, of which every rank has a copy."""
    if intra == 1:
        return borders
    return np.concatenate([[0], np.cumsum(np.repeat(np.diff(borders), intra))])


@loop
def _instructions(
    code: np.ndarray,
    of_column: np.ndarray,
    total: int,
    new_index: np.ndarray,
    held_of_column: np.ndarray,
    offsets: np.ndarray,
    column_rows: np.ndarray,
    heads: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Columns of all ranks' instructions, in the order and with the dtypes of `Programs`.

    code: the draft's. of_column, held_of_column: borders of the columns' instructions and buffers. new_index: place of
    each of the draft's buffers in rank order. offsets: of the ranks' buffers. heads: of `_head_table`.
    """
    op, role, stage = np.empty(total, np.int8), np.empty(total, np.int8), np.empty(total, np.int32)
    peer, round_ = np.empty(total, np.int32), np.empty(total, np.int32)
    buf, run = np.full((total, MAX_OPERANDS), NONE, np.int32), np.empty((total, 4), np.int16)
    rows, slices = np.empty((total, 2), np.int32), np.empty((total, 2), np.int32)
    intra, num_runs = heads.shape[0], heads.shape[1]
    i = 0
    for rank in range(len(offsets) - 1):
        column, index = rank // intra, rank % intra
        shift = offsets[rank] - held_of_column[column]
        for c in range(of_column[column], of_column[column + 1]):
            op[i], role[i], stage[i], round_[i] = code[_OP, c], code[_ROLE, c], code[_STAGE, c], code[_ROUND, c]
            peer[i] = code[_PEER, c] * intra + index if code[_PEER, c] >= 0 else NONE
            for k in range(MAX_OPERANDS):
                if code[_BUF + k, c] >= 0:
                    buf[i, k] = new_index[code[_BUF + k, c]] + shift
            rows[i, 0], rows[i, 1] = code[_FIRST, c], code[_FIRST + 1, c]
            if rows[i, 0] < 0 and (op[i] == Op.COPY or op[i] == Op.ALL_TO_ALL):
                rows[i, 0], rows[i, 1] = column_rows[column, 0], column_rows[column, 1]
            slices[i, 0], slices[i, 1] = code[_SLICE, c], code[_SLICE + 1, c]
            for k in range(4):
                run[i, k] = heads[index, code[_RUN, c] % num_runs, k]
            i += 1
    return op, role, peer, round_, buf, rows, slices, run, stage


@lru_cache(maxsize=64)
def _head_table(heads: HeadShape, intra: int, runs: Runs) -> np.ndarray:
    """Heads of each intra index and run of head groups, numbered within the share; the last entry is the whole share.

    That is ALL.
    """
    return np.array([runs.heads(heads, share) for share in heads.shares(intra)], np.int64)


def _buffers(
    problem: Problem,
    held: np.ndarray,
    of_column: np.ndarray,
    offsets: np.ndarray,
    rows: tuple[np.ndarray, np.ndarray, np.ndarray],
    heads: np.ndarray,
    direction: str,
) -> Buffers:
    """Give every rank its buffers, not placed yet. held: the draft's, by rank; of_column: their borders."""
    starts, column_rows, rank_rows = rows
    precision = Precision.of(problem.heads.dtype, problem.wire_dtype)
    unit = unit_bytes(precision, problem.heads.head_dim)
    all_heads = np.array(problem.heads.all_heads, np.int64)
    columns = _fill_buffers(held, of_column, offsets, column_rows, rank_rows, heads, all_heads,
                            direction == "backward", starts, unit, _IS_KV)  # fmt: skip
    role, space, acc, of_rows, of_heads, num_bytes = columns
    return Buffers(offsets, role, space, acc, of_rows, of_heads, num_bytes, np.full(offsets[-1], NONE))


@loop
def _fill_buffers(
    held: np.ndarray,
    of_column: np.ndarray,
    offsets: np.ndarray,
    column_rows: np.ndarray,
    rank_rows: np.ndarray,
    heads: np.ndarray,
    all_heads: np.ndarray,
    backward: bool,
    starts: np.ndarray,
    unit: np.ndarray,
    is_kv: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Columns of all ranks' buffers but their places, in the order and with the dtypes of `Buffers`.

    A rank's own tensors differ from its column's only if heads are resharded. starts: rows before each span.
    """
    total = offsets[-1]
    roles, spaces, accs = np.empty(total, np.int8), np.empty(total, np.int8), np.empty(total, np.bool_)
    rows, run, num_bytes = np.empty((total, 2), np.int32), np.empty((total, 4), np.int16), np.empty(total, np.int64)
    intra, num_runs = heads.shape[0], heads.shape[1]
    i = 0
    for rank in range(len(offsets) - 1):
        column, index = rank // intra, rank % intra
        for b in range(of_column[column], of_column[column + 1]):
            role, space, acc = held[_HELD_ROLE, b], held[_HELD_SPACE, b], held[_HELD_ACC, b]
            roles[i], spaces[i], accs[i] = role, space, acc == 1
            outer = space == Space.INPUT or space == Space.OUTPUT
            own = intra > 1 and outer and not (backward and (role == Role.Q or role == Role.KV))
            h = all_heads if own else heads[index, held[_HELD_RUN, b] % num_runs]
            first, stop = held[_HELD_FIRST, b], held[_HELD_STOP, b]
            if first < 0:
                first = rank_rows[rank, 0] if own else column_rows[column, 0]
                stop = rank_rows[rank, 1] if own else column_rows[column, 1]
            rows[i, 0], rows[i, 1] = first, stop
            for k in range(4):
                run[i, k] = h[k]
            count = starts[stop] - starts[first]
            row = unit[0, role + 1, space, acc] * (h[3] if is_kv[role + 1] else h[1])
            stat = unit[1, role + 1, space, acc] * h[1]
            num_bytes[i] = count * row
            if stat > 0:
                num_bytes[i] = -(-count * row // ALIGNMENT) * ALIGNMENT + count * stat
            i += 1
    return roles, spaces, accs, rows, run, num_bytes


def _size_scratch(problem: Problem, tokens: np.ndarray, programs: Programs) -> None:
    """Size the scratch buffers of AllToAll, and strip them of rows and heads. tokens: of each rank, int64."""
    buffers, tokens = programs.buffers, tokens.reshape(-1, problem.topology.intra_sp)
    precision = Precision.of(problem.heads.dtype, problem.wire_dtype)
    exchanges = np.flatnonzero(programs.op == Op.ALL_TO_ALL)
    rank = programs.rank[exchanges]
    _, target, scratch = programs.buf[exchanges, :3].T
    outward = buffers.space[target] != Space.OUTPUT
    for role, to_column in itertools.product(Role, (True, False)):
        mine = np.flatnonzero((programs.role[exchanges] == role) & (outward == to_column))
        if len(mine):
            num_bytes = scratch_bytes(role, to_column, problem.heads, precision, tokens).ravel()
            buffers.num_bytes[scratch[mine]] = num_bytes[rank[mine]]
    buffers.rows[scratch] = NONE
    buffers.heads[scratch] = 0
