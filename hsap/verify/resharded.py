"""Resharded: the rule on AllToAll, and its scratch in closed form. There are few of them: six a rank at most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hsap.ir.precision import ALIGNMENT, unit_bytes
from hsap.ir.program import KV_ROLES, Op, Role, Space
from hsap.loops import inner, loop
from hsap.verify.columns import ACC, BUF, HEADS, NUM_BYTES, RANK, ROLE, ROWS, SPACE, plain, same
from hsap.verify.stream import Found, Stream, at

_IS_KV = np.isin(np.arange(-1, len(Role) - 1), KV_ROLES)
"""Table over all roles, to be indexed by role + 1."""


def resharded(s: Stream) -> Iterator[Found]:
    """AllToAll turns the rank's own rows and all heads into the column's, or an accumulator back; scratch fits."""
    p, b, plan = s.programs, s.buffers, s.plan
    index = s.where(Op.ALL_TO_ALL)
    if not len(index):
        return
    if len(index) > len(Role) * plan.num_ranks:
        yield Found(f"{len(index)} ALL_TO_ALLs are more than there are inputs and outputs", int(index[-1]))
        return
    shares, rank_rows, column_rows = s.shares, plain(plan.rank_rows), plain(plan.column_rows)
    bad = index[_unlike(s.code, s.held, index, rank_rows, column_rows, shares)]
    say = "ALL_TO_ALL from {} to {}: one must be the rank's own tensor, the other its column's"
    yield from at(bad, lambda i: say.format(s.describe(p.buf[i, 0]), s.describe(p.buf[i, 1])))
    target, scratch = s.code[BUF + 1 : BUF + 3, index]
    unit = unit_bytes(plan.precision, plan.problem.heads.head_dim)
    wanted = scratch_bytes(s.rank[index], s.code[ROLE, index], s.held[SPACE, target] != Space.OUTPUT,
                           plan.tokens_per_rank, shares, unit)  # fmt: skip
    bad = index[s.held[NUM_BYTES, scratch] != wanted]
    yield from at(bad, lambda i: f"scratch has {int(b.num_bytes[p.buf[i, 2]])} bytes, not what the pieces take")


@loop
def _unlike(
    code: np.ndarray,
    held: np.ndarray,
    index: np.ndarray,
    rank_rows: np.ndarray,
    column_rows: np.ndarray,
    shares: np.ndarray,
) -> np.ndarray:
    """Whether an AllToAll isn't between the rank's own rows and its share's heads of its column's rows: bool [n]."""
    unlike = np.zeros(len(index), np.bool_)
    intra = len(shares)
    for n in range(len(index)):
        i = index[n]
        rank, source, target = code[RANK, i], code[BUF, i], code[BUF + 1, i]
        outward = held[SPACE, target] != Space.OUTPUT
        own, column = (source, target) if outward else (target, source)
        share, rows, mine = shares[rank % intra], column_rows[rank // intra], rank_rows[rank]
        sound = intra > 1 and held[SPACE, own] == (Space.INPUT if outward else Space.OUTPUT)
        sound &= (held[SPACE, source] == Space.INPUT) == outward and held[ACC, column] == (0 if outward else 1)
        sound &= held[ROWS, own] == mine[0] and held[ROWS + 1, own] == mine[1]
        sound &= held[ROWS, column] == rows[0] and held[ROWS + 1, column] == rows[1]
        sound &= held[HEADS, column] == 0 and held[HEADS + 1, column] == share[1]
        sound &= held[HEADS + 2, column] == 0 and held[HEADS + 3, column] == share[3]
        unlike[n] = not (sound and same(code, i, held, column, ROWS, 2) and same(code, i, held, column, HEADS, 4))
    return unlike


@loop
def scratch_bytes(
    rank: np.ndarray, role: Any, outward: Any, tokens: np.ndarray, shares: np.ndarray, unit: np.ndarray
) -> np.ndarray:
    """Scratch of AllToAlls in closed form: int64 [n].

    Outward: the rank's rows with each neighbour's heads. Back: each neighbour's rows with its own heads, and then its
    own rows with each neighbour's heads. What stays on the rank takes no scratch. unit: of `unit_bytes`.
    """
    total = np.zeros(len(rank), np.int64)
    intra = len(shares)
    for i in range(len(rank)):
        row, stat = unit[0, role[i] + 1, Space.ARENA, 0], unit[1, role[i] + 1, Space.ARENA, 0]
        mine, kv = rank[i] % intra, _IS_KV[role[i] + 1]
        for other in range(intra):
            if other != mine:
                total[i] += _piece_bytes(tokens[rank[i]], shares[other], row, stat, kv)
                if not outward[i]:
                    total[i] += _piece_bytes(tokens[rank[i] - mine + other], shares[mine], row, stat, kv)
    return total


@inner
def _piece_bytes(rows: int, share: Any, row: Any, stat: Any, kv: Any) -> int:
    """Bytes of rows with a share of the heads, and of their statistics, each aligned."""
    elements, stats = rows * row * (share[3] if kv else share[1]), rows * stat * share[1]
    return -(-elements // ALIGNMENT) * ALIGNMENT + -(-stats // ALIGNMENT) * ALIGNMENT
