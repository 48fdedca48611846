"""Cost: seconds of every instruction on its rank's compute stream, and of every message on its link.

A kernel costs a fixed overhead, a little per slice, and its work over a rate. For attention the work is
4 · pairs · query heads · dim operations (backward 2.5 times that: five products instead of two), over the pairs of all
*tiles* that a slice touches: flash kernels compute whole tiles, so that small and ragged slices reach less of the
device. Slices of one kernel that make up one slice count as that one. What a kernel adds to its accumulators, and Copy,
Merge, Sum and AllToAll's reordering, are bytes over memory bandwidth. A message costs its link's latency and bytes over
the link's rate.

Not modelled: how many kernels a runtime makes of one instruction, devices left partly idle by few tiles, memory that
communication takes from compute, and contention inside switches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.effects import FLOPS_PER_PAIR, Flows
from hsap.ir.plan import Plan
from hsap.ir.precision import row_bytes
from hsap.ir.problem import Cluster
from hsap.ir.program import OPERANDS, Access, Op, Programs, Role, Space
from hsap.ir.slice import K0, K1, Q0, Q1, area, joined
from hsap.ir.span import ranges as span_ranges
from hsap.ir.span import row_starts

ADDED = {Op.ATTEND: (Role.O,), Op.ATTEND_GRAD: (Role.DQ, Role.DKV)}
"""Accumulators that an attention kernel folds its result into."""

_MOVES = {Access.READ: 1, Access.WRITE: 1, Access.ADD: 2}
"""How often an access touches memory; to add is to read and to write."""


def compute_seconds(plan: Plan, programs: Programs, slices: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Seconds that each instruction keeps its rank's compute stream: float64 [n].

    slices: the mask's slice table. Sends, receives, launches and waits take none of their own; AllToAll's are those of
    its reordering, what it waits for is the clock's to say.
    """
    seconds = np.zeros(len(programs))
    for op, efficiency in (
        (Op.ATTEND, cluster.attend_efficiency),
        (Op.ATTEND_GRAD, cluster.attend_grad_efficiency),
    ):
        index = np.flatnonzero(programs.op == op)
        if len(index):
            rate = cluster.flops_per_s * efficiency
            seconds[index] = _attention_seconds(plan, programs, index, slices, op, rate, cluster)
    num_bytes = _touched_bytes(plan, programs)
    moving = num_bytes > 0
    seconds[moving] = cluster.kernel_overhead_s + num_bytes[moving] / cluster.memory_bytes_per_s
    return seconds


def _attention_seconds(plan: Plan, programs: Programs, index, slices, op: Op, rate: float, cluster: Cluster):
    dim = plan.problem.heads.head_dim
    # The ranks of an intra group share a range of the index.
    ranges, which = np.unique(programs.slices[index], axis=0, return_inverse=True)
    owner, entry = span_ranges(*ranges.T.astype(np.int64))
    pieces, owner = joined(slices[programs.index[entry]], owner)
    count, pairs, q_rows, k_rows = (
        np.bincount(owner, column, len(ranges))[which]
        for column in (
            None,
            tiled_pairs(pieces, cluster.tile_tokens),
            pieces[:, Q1] - pieces[:, Q0],
            pieces[:, K1] - pieces[:, K0],
        )
    )
    heads = programs.heads[index]
    seconds = np.where(count > 0, cluster.kernel_overhead_s, 0.0) + count * cluster.slice_overhead_s
    seconds += FLOPS_PER_PAIR[op] * dim * heads[:, 1].astype(np.int64) * pairs / rate
    for role in ADDED[op]:
        # The part is written and read in the inputs' width, the accumulator read and written in its own.
        row = sum(sum(row_bytes(plan.precision, role, Space.OUTPUT, acc, heads, dim)) for acc in (False, True))
        rows = k_rows if role == Role.DKV else q_rows
        seconds += 2 * rows * row / cluster.memory_bytes_per_s
    return seconds


def tiled_pairs(slices: np.ndarray, tile: int) -> np.ndarray:
    """Pairs that a kernel computes for each canonical slice, in tiles of tile × tile: float64 [n], at least the area.

    An estimate in closed form: the area, widened as the rectangle's sides are to whole tiles, and half a tile for each
    row where the diagonal cuts; never more than the rectangle's tiles.
    """
    q0, q1, k0, k1, lo, hi = slices.T
    height, width = q1 - q0, k1 - k0
    tiles = (-(-height // tile) * tile) * (-(-width // tile) * tile).astype(np.float64)
    # Rows on which hi, and on which lo, hides a part of the rectangle.
    cut = np.clip(k1 - 1 - hi - q0, 0, height) + np.clip(q1 - (k0 - lo) - 1, 0, height)
    return np.minimum(area(slices) * (tiles / (height * width)) + cut * (tile / 2), tiles)


def _touched_bytes(plan: Plan, programs: Programs) -> np.ndarray:
    """Bytes that Copy, Merge, Sum and AllToAll read and write in the rank's own memory: int64 [n]."""
    total = np.zeros(len(programs), np.int64)
    buffers, starts = programs.buffers, row_starts(plan.spans)
    for op in (Op.COPY, Op.MERGE, Op.SUM):
        index = np.flatnonzero(programs.op == op)
        rows, heads = programs.rows[index], programs.heads[index]
        num_rows = starts[rows[:, 1]] - starts[rows[:, 0]]
        for operand, access in enumerate(OPERANDS[op]):
            held = programs.buf[index, operand]
            kind = (programs.role[index], buffers.space[held], buffers.acc[held])
            row, stat = row_bytes(plan.precision, *kind, heads, plan.problem.heads.head_dim)
            total[index] += _MOVES[access] * num_rows * (row + stat)
    index = np.flatnonzero(programs.op == Op.ALL_TO_ALL)
    source, target, scratch = programs.buf[index, :3].T
    # What travels is packed into scratch or unpacked from it.
    total[index] = buffers.num_bytes[source] + buffers.num_bytes[target] + 2 * buffers.num_bytes[scratch]
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Every message's link as columns, in the order of `Flows`: bool [n], and float64 [n] seconds.

    crosses: whether it leaves its node. transfer_s: how long it keeps the ports at both ends. latency_s: from the last
    byte's leaving to its arrival.
    """

    crosses: np.ndarray
    transfer_s: np.ndarray
    latency_s: np.ndarray

    @classmethod
    def of(cls, carried: Flows, node_of: np.ndarray, cluster: Cluster) -> Messages:
        """Price messages between ranks on these nodes."""
        crosses = node_of[carried.src] != node_of[carried.dst]
        rate = np.where(crosses, cluster.inter_bytes_per_s, cluster.intra_bytes_per_s)
        latency_s = np.where(crosses, cluster.inter_latency_s, cluster.intra_latency_s)
        return cls(crosses, carried.num_bytes / rate, latency_s)
