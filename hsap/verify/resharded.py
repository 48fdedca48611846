"""Resharded: the rule on AllToAll, and its scratch in closed form. There are few of them: six a rank at most."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hsap.ir.heads import DTYPE_BYTES
from hsap.ir.precision import aligned
from hsap.ir.program import KV_ROLES, PARTIAL_ROLES, Op, Role, Space
from hsap.verify.stream import Found, Stream, at, same_rows

_PIECES_AT_ONCE = 1 << 20
"""Messages of AllToAlls that are sized together; bounds the memory for a plan of absurdly many ranks."""


def resharded(s: Stream) -> Iterator[Found]:
    """AllToAll turns the rank's own rows and all heads into the column's, or an accumulator back; scratch fits."""
    p, b, plan = s.programs, s.buffers, s.plan
    index = s.where(Op.ALL_TO_ALL)
    if not len(index):
        return
    if len(index) > len(Role) * plan.num_ranks:
        yield Found(f"{len(index)} ALL_TO_ALLs are more than there are inputs and outputs", int(index[-1]))
        return
    source, target, scratch = p.buf[index, :3].T
    outward = b.space[target] != Space.OUTPUT
    own, column = np.where(outward, source, target), np.where(outward, target, source)
    rank, intra = s.rank[index], plan.topology.intra_sp
    own_space = np.where(outward, Space.INPUT, Space.OUTPUT)
    sound = (intra > 1) & (b.space[own] == own_space) & ((b.space[source] == Space.INPUT) == outward)
    sound &= (b.acc[column] == ~outward) & same_rows(b.rows[own], plan.rank_rows[rank])
    sound &= same_rows(b.rows[column], plan.column_rows[rank // intra])
    share = _whole_share(s, rank)
    sound &= same_rows(b.heads[column], share) & same_rows(p.heads[index], share)
    sound &= same_rows(p.rows[index], b.rows[column])
    say = "ALL_TO_ALL from {} to {}: one must be the rank's own tensor, the other its column's"
    yield from at(index[~sound], lambda i: say.format(s.describe(p.buf[i, 0]), s.describe(p.buf[i, 1])))
    step = max(_PIECES_AT_ONCE // intra, 1)
    parts = [slice(i, i + step) for i in range(0, len(index), step)]
    wanted = np.concatenate([scratch_bytes(s, rank[i], p.role[index][i], outward[i]) for i in parts])
    bad = index[b.num_bytes[scratch] != wanted]
    yield from at(bad, lambda i: f"scratch has {int(b.num_bytes[p.buf[i, 2]])} bytes, not what the pieces take")


def _whole_share(s: Stream, rank: np.ndarray) -> np.ndarray:
    """Heads of each rank's column, numbered within it: int64 [n, 4]."""
    share = s.shares.copy()
    share[:, [0, 2]] = 0
    return share.take(rank % s.plan.topology.intra_sp, axis=0)


def scratch_bytes(s: Stream, rank: np.ndarray, role: np.ndarray, outward: np.ndarray) -> np.ndarray:
    """Scratch of AllToAlls in closed form: int64 [n].

    Outward: the rank's rows with each neighbour's heads. Back: each neighbour's rows with its own heads, and then its
    own rows with each neighbour's heads. What stays on the rank takes no scratch.
    """
    plan, intra = s.plan, s.plan.topology.intra_sp
    shares, tokens, home = s.shares, plan.tokens_per_rank, rank - rank % intra
    dim, partial = plan.problem.heads.head_dim, np.isin(role, PARTIAL_ROLES)
    element = np.where(partial, DTYPE_BYTES[plan.precision.wire], DTYPE_BYTES[plan.precision.io])
    stats = (1 * (role == Role.O) + 2 * (role == Role.DO)) * DTYPE_BYTES[plan.precision.stat]
    is_kv = np.isin(role, KV_ROLES)

    def bytes_of(rows: np.ndarray, q_heads: np.ndarray, kv_heads: np.ndarray) -> np.ndarray:
        """Bytes of pieces with a row of the table for each AllToAll and a column for each neighbour."""
        elements = np.where(is_kv[:, None], 2 * kv_heads, q_heads) * dim * element[:, None]
        return aligned(rows * elements) + aligned(rows * q_heads * stats[:, None])

    mine = shares[rank % intra]
    by_heads = bytes_of(tokens[rank][:, None], shares[None, :, 1], shares[None, :, 3])
    by_rows = bytes_of(tokens[home[:, None] + np.arange(intra)], mine[:, 1:2], mine[:, 3:4])
    others = np.arange(intra) != (rank % intra)[:, None]
    return (others * (by_heads + np.where(outward[:, None], 0, by_rows))).sum(axis=1)
