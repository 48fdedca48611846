"""Columns: a stream's instructions and buffers as two integer tables, for the loops that judge them.

A copy of what the plan holds, in one dtype and one order of memory: however a plan's columns came to be (read-only from
a file, strided, narrow), each loop is compiled just once, and no sum of two entries overflows.

The loops are jitted and don't check indices, so that a hostile file must not lead them astray. What they index by is
known to be in range when they run: operations, roles and spaces by `structure.enumerations`, operands by
`structure.operands`, ranks and borders by `placement`, rows and heads by the stage of rules before theirs. Each loop
names the rules that it stands on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hsap.ir.program import Buffers, Programs
from hsap.loops import inner

ROLE, RANK, ROWS, HEADS = 0, 1, 2, 4
"""Rows of both tables. `ROWS` is the first of two: range of spans. `HEADS` is the first of four: a `HeadRun`."""
OP, PEER, ROUND, SLICES, BUF = 8, 9, 10, 11, 13
"""Further rows of an instruction table. `SLICES` is the first of two, `BUF` of five."""
SPACE, ACC, NUM_BYTES, OFFSET = 8, 9, 10, 11
"""Further rows of a buffer table."""


def instruction_table(p: Programs) -> np.ndarray:
    """Give the columns of all instructions, with their rank: int64 [18, n]."""
    table = np.empty((BUF + 5, len(p)), np.int64)
    table[ROLE], table[RANK], table[OP], table[PEER], table[ROUND] = p.role, p.rank, p.op, p.peer, p.round
    table[ROWS : ROWS + 2], table[HEADS : HEADS + 4] = p.rows.T, p.heads.T
    table[SLICES : SLICES + 2], table[BUF : BUF + 5] = p.slices.T, p.buf.T
    return table


def buffer_table(b: Buffers) -> np.ndarray:
    """Give the columns of all buffers, with their rank: int64 [12, n]."""
    table = np.empty((OFFSET + 1, len(b)), np.int64)
    table[ROLE], table[RANK], table[SPACE] = b.role, b.rank, b.space
    table[ACC] = b.acc.view(np.uint8)  # a truth value read from a file may hold bytes other than 0 and 1
    table[ROWS : ROWS + 2], table[HEADS : HEADS + 4] = b.rows.T, b.heads.T
    table[NUM_BYTES], table[OFFSET] = b.num_bytes, b.offset
    return table


def plain(column: np.ndarray) -> np.ndarray:
    """Copy a column of a plan into the form that the loops take."""
    return np.array(column, np.int64, order="C")


@inner
def heads_sound(table: np.ndarray, i: int, share: Any, group: int) -> bool:
    """Whether heads numbered within a rank's column exist and its KV heads are those of its query heads.

    share: the column's `HeadRun` over all heads. group: query heads per KV head.
    """
    q_first, q_count, kv_first, kv_count = (
        table[HEADS, i],
        table[HEADS + 1, i],
        table[HEADS + 2, i],
        table[HEADS + 3, i],
    )
    if q_first < 0 or q_count < 0 or q_first + q_count > share[1]:
        return False
    if kv_first < 0 or kv_count < 0 or kv_first + kv_count > share[3]:
        return False
    if q_count == 0:
        return kv_count == 0
    first, kv = q_first + share[0], kv_first + share[2]
    return kv == first // group and kv + kv_count == (first + q_count - 1) // group + 1


@inner
def heads_inside(code: np.ndarray, i: int, held: np.ndarray, buffer: int) -> bool:
    """Whether an instruction's head runs lie inside a buffer's, query and KV heads alike."""
    for side in (HEADS, HEADS + 2):
        first, of = code[side, i], held[side, buffer]
        if first < of or first + code[side + 1, i] > of + held[side + 1, buffer]:
            return False
    return True


@inner
def rows_inside(code: np.ndarray, i: int, held: np.ndarray, buffer: int) -> bool:
    """Whether an instruction's range of spans is one and lies inside a buffer's."""
    first, stop = code[ROWS, i], code[ROWS + 1, i]
    return held[ROWS, buffer] <= first and first <= stop and stop <= held[ROWS + 1, buffer]


@inner
def same(a: np.ndarray, i: int, b: np.ndarray, j: int, first: int, count: int) -> bool:
    """Whether two columns agree in `count` rows of their tables."""
    agree = True
    for row in range(first, first + count):
        agree &= a[row, i] == b[row, j]
    return agree


@inner
def slice_at(columns: np.ndarray, i: int) -> tuple[int, int, int, int, int, int]:
    """Slice i of a slice table that was turned to columns, int64 [6, n]: (q0, q1, k0, k1, lo, hi)."""
    return columns[0, i], columns[1, i], columns[2, i], columns[3, i], columns[4, i], columns[5, i]
