"""Effects: what instructions read and write, and for how long. The one truth for buffers, verifier and simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.plan import Plan
from hsap.ir.precision import row_bytes
from hsap.ir.program import OPERANDS, Op, Programs, Role, Space
from hsap.ir.reshard import exchanged_bytes
from hsap.ir.slice import area
from hsap.ir.sort import order_of
from hsap.ir.span import ranges, row_starts


@dataclass(frozen=True, slots=True, eq=False)
class Touches:
    """Every (instruction, buffer) pair as columns, in instruction order: int64 [n] each.

    at: instruction index. buffer: buffer index. access: `Access`. operand: which operand it is.
    begin, end: first and last instruction index (inclusive) during which the buffer must be left alone: for sends and
    receives the time until their round's wait, else the instruction itself.
    """

    at: np.ndarray
    buffer: np.ndarray
    access: np.ndarray
    operand: np.ndarray
    begin: np.ndarray
    end: np.ndarray


FLOPS_PER_PAIR = {Op.ATTEND: 4, Op.ATTEND_GRAD: 10}
"""Operations per visible pair, query head and element of the head dimension: two products forward, five backward."""

ACCESS = np.full((len(Op), 5), -1, np.int8)
"""`Access` of each op's operands, -1 beyond the last one."""
for _op, _operands in OPERANDS.items():
    ACCESS[_op, : len(_operands)] = _operands


NUM_OPERANDS = (ACCESS >= 0).sum(axis=1)
"""Operands of each op."""


def touches(programs: Programs) -> Touches:
    """List what every instruction touches."""
    num_operands = NUM_OPERANDS[programs.op]
    at, operand = ranges(np.zeros_like(num_operands), num_operands)
    buffer = programs.buf.ravel()[at * programs.buf.shape[1] + operand].astype(np.int64)
    until = wait_of(programs)[at]
    return Touches(at, buffer, ACCESS[programs.op[at], operand], operand, at, np.where(until >= 0, until, at))


def wait_of(programs: Programs) -> np.ndarray:
    """Index of the wait that ends each send and receive, -1 elsewhere (and where no wait follows): int64 [n]."""
    op = programs.op
    out = np.full(len(programs), -1, np.int64)
    waits, moved = np.flatnonzero(op == Op.WAIT), np.flatnonzero((op == Op.SEND) | (op == Op.RECV))
    if len(waits) and len(moved):
        num_rounds = int(np.maximum.reduce(programs.round)) + 1
        keys = programs.rank
        keys *= num_rounds
        keys += programs.round
        wait_keys, keys = keys[waits], keys[moved]
        if num_rounds * programs.num_ranks <= 8 * len(programs):
            table = np.full(num_rounds * programs.num_ranks, -1, np.int64)
            table[wait_keys[::-1]] = waits[::-1]  # the first wait counts, and the last assignment
            out[moved] = table[keys]
        else:
            by_key = order_of(wait_keys)
            waits, wait_keys = waits[by_key], wait_keys[by_key]
            place = np.minimum(np.searchsorted(wait_keys, keys), len(waits) - 1)
            found = wait_keys[place] == keys
            out[moved[found]] = waits[place[found]]
    return out


def partners(programs: Programs) -> np.ndarray:
    """Index of the receive that a send meets, and of the send that a receive meets: int64 [n], -1 elsewhere.

    Between two ranks the transfers of a round meet in the order in which either side lists them. Of what is no half of
    a pair nothing is said; the verifier, which judges that, finds pairs in a way of its own.
    """
    out = np.full(len(programs), -1, np.int64)
    sends, receives = (np.flatnonzero(programs.op == op) for op in (Op.SEND, Op.RECV))
    rank, peer, round_ = programs.rank, programs.peer.astype(np.int64), programs.round

    def ordered(index: np.ndarray, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys = (src[index] * programs.num_ranks + dst[index]) << 31 | round_[index]
        order = order_of(keys)
        return keys[order], index[order]

    keys, sends = ordered(sends, rank, peer)
    wanted, receives = ordered(receives, peer, rank)
    place = np.arange(len(keys)) - np.searchsorted(keys, keys) + np.searchsorted(wanted, keys)
    met = place < np.searchsorted(wanted, keys, side="right")
    sends, receives = sends[met], receives[place[met]]
    out[sends], out[receives] = receives, sends
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """Every message between two ranks as columns, in instruction order: int64 [n] each.

    at: index of the instruction that sends it. src, dst: ranks, never the same for an AllToAll: what stays is no
    message. num_bytes: rows and statistics, without alignment.
    """

    at: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    num_bytes: np.ndarray

    def received(self, num_ranks: int) -> np.ndarray:
        """Bytes that each rank receives: int64 [num_ranks]."""
        total = np.zeros(num_ranks, np.int64)
        np.add.at(total, self.dst, self.num_bytes)
        return total

    def between_nodes(self, node_of: np.ndarray) -> int:
        """Bytes that leave their node; node_of: node of each rank."""
        return int(self.num_bytes[node_of[self.src] != node_of[self.dst]].sum())


def flows(plan: Plan, programs: Programs) -> Flows:
    """List what sends and AllToAlls carry."""
    send = np.flatnonzero(programs.op == Op.SEND)
    buffers, held = programs.buffers, programs.buf[send, 0]
    kind = (buffers.role[held], buffers.space[held], buffers.acc[held])
    row, stat = row_bytes(plan.precision, *kind, programs.heads[send], plan.problem.heads.head_dim)
    ends = row_starts(plan.spans)
    num_rows = ends[programs.rows[send, 1]] - ends[programs.rows[send, 0]]
    sent = np.stack([send, programs.rank[send], programs.peer[send].astype(np.int64), num_rows * (row + stat)])
    table = np.concatenate([sent, _exchanged(plan, programs)], axis=1)
    return Flows(*table[:, np.argsort(table[0], kind="stable")])


def _exchanged(plan: Plan, programs: Programs) -> np.ndarray:
    """Messages of all AllToAlls, as `reshard` lays them out: int64 [4, n], the columns of `Flows`."""
    at = np.flatnonzero(programs.op == Op.ALL_TO_ALL)
    src, role, intra = programs.rank[at], programs.role[at], plan.topology.intra_sp
    dst = (src - src % intra)[:, None] + np.arange(intra)
    to_column = programs.buffers.space[programs.buf[at, 1]] != Space.OUTPUT
    tokens, num_bytes = plan.tokens_per_rank.reshape(-1, intra), np.zeros(dst.shape, np.int64)
    for kind in sorted(set(zip(role.tolist(), to_column.tolist()))):
        mine = (role == kind[0]) & (to_column == kind[1])
        sent = exchanged_bytes(Role(kind[0]), kind[1], plan.problem.heads, plan.precision, tokens)
        num_bytes[mine] = sent.reshape(-1, intra)[src[mine]]
    table = np.stack(np.broadcast_arrays(at[:, None], src[:, None], dst, num_bytes))
    return table[:, src[:, None] != dst]


def attended_pairs(programs: Programs, slices: np.ndarray) -> np.ndarray:
    """Visible pairs times query heads that each instruction computes: int64 [n]. slices: the mask's slice table."""
    ends = np.concatenate([[0], np.cumsum(area(slices)[programs.index])])
    computes = (programs.op == Op.ATTEND) | (programs.op == Op.ATTEND_GRAD)
    lo, hi = np.where(computes[:, None], programs.slices, 0).T
    return (ends[hi] - ends[lo]) * programs.heads[:, 1].astype(np.int64)
