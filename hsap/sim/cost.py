"""Cost: seconds of every instruction on its rank's compute stream, and of every message on its link.

A kernel costs a fixed overhead, a little per piece, and its work over a rate. For attention the work is
4 · pairs · query heads · dim operations (backward 2.5 times that: five products instead of two), over the pairs of all
*tiles* that a slice touches: flash kernels compute whole tiles, so that small and ragged slices reach less of the
device. The rate falls for pieces of few rows as `Cluster.rows_efficiency` says, and where a kernel has fewer tiles of
rows than the device has processors. Slices of one kernel that make up one slice count as that one; kernels that know
only rectangles and squares cut what is left into these. What a kernel adds to its accumulators, and Copy, Merge, Sum
and AllToAll's reordering, are bytes over memory bandwidth. A message costs its link's latency and bytes over the link's
rate, and its ends a little of their compute streams when it is launched.

Not modelled: how many calls a varlen kernel makes of slices with different windows, the last and partly empty wave of
tiles, and caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.cluster import Cluster
from hsap.ir.effects import FLOPS_PER_PAIR, Flows, flows
from hsap.ir.plan import Plan
from hsap.ir.precision import Precision, row_bytes
from hsap.ir.program import OPERANDS, Access, Op, Programs, Role, Space
from hsap.ir.slice import HI, K0, K1, LO, Q0, Q1, Kind, area, joined, kinds, squares, strips
from hsap.ir.span import ranges as span_ranges
from hsap.ir.span import row_starts

ADDED = {Op.ATTEND: (Role.O,), Op.ATTEND_GRAD: (Role.DQ, Role.DKV)}
"""Accumulators that an attention kernel folds its result into."""

_MOVES = {Access.READ: 1, Access.WRITE: 1, Access.ADD: 2}
"""How often an access touches memory; to add is to read and to write."""


def compute_seconds(plan: Plan, programs: Programs, slices: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Seconds that each instruction keeps its rank's compute stream: float64 [n].

    slices: the mask's slice table. Sends, receives and waits take none of their own, launches what their messages cost;
    AllToAll's are those of its reordering, what it waits for is the clock's to say.
    """
    seconds = np.zeros(len(programs))
    for op in ADDED:
        index = np.flatnonzero(programs.op == op)
        if len(index):
            seconds[index] = _attention_seconds(plan, programs, index, slices, op, cluster)
    num_bytes = _touched_bytes(plan, programs)
    for op in (Op.COPY, Op.MERGE, Op.SUM, Op.ALL_TO_ALL):
        index = np.flatnonzero(programs.op == op)
        seconds[index] = moving_seconds(cluster, op, num_bytes[index])
    if cluster.message_overhead_s:
        seconds += cluster.message_overhead_s * _launched(plan, programs)
    return seconds


def moving_seconds(cluster: Cluster, op: Op, num_bytes: np.ndarray) -> np.ndarray:
    """Seconds of kernels that read and write so many bytes of a rank's own memory: float64 [n].

    What has none isn't started. op: COPY, MERGE, SUM or ALL_TO_ALL, which then is its reordering.
    """
    own = {Op.MERGE: cluster.merge_bytes_per_s, Op.ALL_TO_ALL: cluster.exchange_bytes_per_s}.get(op)
    return np.where(num_bytes > 0, cluster.kernel_overhead_s + num_bytes / (own or cluster.memory_bytes_per_s), 0.0)


def opening_seconds(plan: Plan, programs: Programs, cluster: Cluster) -> np.ndarray:
    """Seconds that each rank spends before its stream: float64 [num_ranks].

    Forward lays keys and values side by side. Backward sums do · o over each row and head: both are read, widened to
    the accumulator's width, and multiplied there, which is a gradient's kind of work.
    """
    buffers, starts = programs.buffers, row_starts(plan.spans)
    inputs = buffers.space == Space.INPUT
    index = np.flatnonzero(inputs & (buffers.role == Role.DO))
    is_backward = len(index) > 0
    if not is_backward:
        index = np.flatnonzero(inputs & (buffers.role == Role.KV))
    heads, dim = buffers.heads[index], plan.problem.heads.head_dim
    a_row = opening_row_seconds(cluster, plan.precision, is_backward, heads, dim)
    rows = starts[buffers.rows[index, 1]] - starts[buffers.rows[index, 0]]
    return np.bincount(buffers.rank[index], rows * a_row, programs.num_ranks)


def opening_row_seconds(
    cluster: Cluster, precision: Precision, is_backward: bool, heads: np.ndarray, head_dim: int
) -> np.ndarray:
    """Seconds of `opening_seconds` for one row of a rank's own tensors: float64 [n]. heads: [n, 4]."""
    role = Role.DO if is_backward else Role.KV
    own, wide = (row_bytes(precision, role, Space.INPUT, acc, heads, head_dim)[0].astype(float) for acc in (0, 1))
    if is_backward:
        return (2 * own + 6 * wide) / fold_rate(cluster, Op.ATTEND_GRAD)
    return 2 * own / cluster.memory_bytes_per_s


def fold_rate(cluster: Cluster, op: Op) -> float:
    """Bytes per second at which a kernel's result goes into its accumulators."""
    own = cluster.attend_bytes_per_s if op == Op.ATTEND else cluster.attend_grad_bytes_per_s
    return own or cluster.memory_bytes_per_s


def _attention_seconds(
    plan: Plan, programs: Programs, index: np.ndarray, slices: np.ndarray, op: Op, cluster: Cluster
) -> np.ndarray:
    # The ranks of an intra group share a range of the index.
    ranges, which = np.unique(programs.slices[index], axis=0, return_inverse=True)
    owner, entry = span_ranges(*ranges.T.astype(np.int64))
    work = Kernels.of(slices[programs.index[entry]], owner, len(ranges), cluster)
    return work.seconds(which, op, programs.heads[index], plan.problem.heads.head_dim, plan.precision, cluster)


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """What attention kernels have to do for each head, as columns: float64 [n].

    pieces: how many there are. pairs: those of the tiles that are computed, more of them where a piece reaches less
    than the kernel's rate. q_rows, k_rows: of all pieces. tiles: of query rows.
    """

    pieces: np.ndarray
    pairs: np.ndarray
    q_rows: np.ndarray
    k_rows: np.ndarray
    tiles: np.ndarray

    @classmethod
    def of(cls, slices: np.ndarray, owner: np.ndarray, num_kernels: int, cluster: Cluster) -> Kernels:
        """Look at canonical slices, int64 [m, 6]. owner: int64 [m], each one's kernel, ascending."""
        pieces, owner = kernel_pieces(*joined(slices, owner), cluster.narrow_tokens)
        q_rows, k_rows = pieces[:, Q1] - pieces[:, Q0], pieces[:, K1] - pieces[:, K0]
        pairs = tiled_pairs(pieces, cluster.tile_tokens, cluster.diagonal_tokens) / part_of_rate(q_rows, cluster)
        tiles = -(-q_rows // cluster.tile_tokens)
        columns = (None, pairs, q_rows, k_rows, tiles)
        return cls(*(np.bincount(owner, column, num_kernels) for column in columns))

    def terms(
        self, which: np.ndarray, op: Op, heads: np.ndarray, head_dim: int, precision: Precision, cluster: Cluster
    ) -> np.ndarray:
        """What the seconds of kernels `which`, int64 [n], are sums of, each at a price of its own: float64 [n, 4].

        Columns: 1 where anything is computed, else 0; pieces; bytes on their way into accumulators; operations, more of
        them where less than the kernel's rate is reached. heads: [n, 4].
        """
        count, pairs, tiles = self.pieces[which], self.pairs[which], self.tiles[which]
        num_heads = heads[:, 1].astype(np.int64)
        if cluster.num_units is not None:
            pairs = pairs * np.maximum(cluster.num_units / np.maximum(tiles * num_heads, 1), 1.0)
        work = FLOPS_PER_PAIR[op] * head_dim * num_heads * pairs
        folded = np.zeros(len(which))
        for role in ADDED[op]:
            rows = (self.k_rows if role == Role.DKV else self.q_rows)[which]
            folded += rows * added_bytes(precision, role, heads, head_dim)
        return np.stack([(count > 0).astype(float), count, folded, work], axis=1)

    def seconds(
        self, which: np.ndarray, op: Op, heads: np.ndarray, head_dim: int, precision: Precision, cluster: Cluster
    ) -> np.ndarray:
        """Seconds of kernels `which`, int64 [n], for these heads, [n, 4], with what they add to accumulators."""
        kernel, pieces, folded, work = self.terms(which, op, heads, head_dim, precision, cluster).T
        a_piece = cluster.grad_slice_overhead_s if op == Op.ATTEND_GRAD else None
        efficiency = cluster.attend_efficiency if op == Op.ATTEND else cluster.attend_grad_efficiency
        seconds = kernel * cluster.kernel_overhead_s
        seconds += pieces * (cluster.slice_overhead_s if a_piece is None else a_piece)
        return seconds + folded / fold_rate(cluster, op) + work / (cluster.flops_per_s * efficiency)


def added_bytes(precision: Precision, role: int, heads: np.ndarray, head_dim: int) -> np.ndarray:
    """Bytes that a row of a kernel's result moves on its way into an accumulator: int64 [n]. heads: [n, 4].

    The result is written and read in the inputs' width, the accumulator read and written in its own.
    """
    parts = (row_bytes(precision, role, Space.OUTPUT, acc, heads, head_dim) for acc in (False, True))
    return 2 * np.sum([part for pair in parts for part in pair], axis=0)


def kernel_pieces(slices: np.ndarray, owner: np.ndarray, narrow: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Cut canonical slices into what kernels know: (canonical [m, 6], owners [m]); see `Cluster.narrow_tokens`.

    owner: int64 [n], whose a slice is, ascending. Strips of a narrow band come as the rectangles that are computed.
    """
    if narrow is None:
        return slices, owner
    pieces, source = squares(slices, narrow)
    owner = owner[source]
    banded = kinds(pieces) == Kind.BAND
    bands, source = strips(pieces[banded], np.full(np.count_nonzero(banded), max(narrow // 2, 1)))
    bands[:, LO], bands[:, HI] = bands[:, K0] - bands[:, Q1] + 1, bands[:, K1] - 1 - bands[:, Q0]
    return np.concatenate([pieces[~banded], bands]), np.concatenate([owner[~banded], owner[banded][source]])


def part_of_rate(rows: np.ndarray, cluster: Cluster) -> np.ndarray:
    """Part of the kernel's rate that pieces of so many query rows reach: float64 [n], between `rows_efficiency`."""
    if not cluster.rows_efficiency:
        return np.ones(len(rows))
    known, part = np.array(cluster.rows_efficiency).T
    return np.interp(np.log2(np.maximum(rows, 1)), np.log2(known), part)


def tiled_pairs(slices: np.ndarray, tile: int, diagonal: int | None = None) -> np.ndarray:
    """Pairs that a kernel computes for each canonical slice, in tiles of tile × tile: float64 [n], at least the area.

    An estimate in closed form: the area, widened as the rectangle's sides are to whole tiles, and half a tile (of
    `diagonal` tokens where that is given) for each row where the diagonal cuts; never more than the rectangle's tiles.
    """
    q0, q1, k0, k1, lo, hi = slices.T
    height, width = q1 - q0, k1 - k0
    tiles = (-(-height // tile) * tile) * (-(-width // tile) * tile).astype(np.float64)
    # Rows on which hi, and on which lo, hides a part of the rectangle.
    cut = np.clip(k1 - 1 - hi - q0, 0, height) + np.clip(q1 - (k0 - lo) - 1, 0, height)
    return np.minimum(area(slices) * (tiles / (height * width)) + cut * ((diagonal or tile) / 2), tiles)


def _launched(plan: Plan, programs: Programs) -> np.ndarray:
    """Count the messages, of both directions, that each Launch and AllToAll starts: float64 [n]."""
    halves = np.flatnonzero((programs.op == Op.SEND) | (programs.op == Op.RECV))
    launches = np.flatnonzero(programs.op == Op.LAUNCH)
    keys = np.sort(programs.rank[halves] << 31 | programs.round[halves])
    wanted = programs.rank[launches] << 31 | programs.round[launches]
    count = np.zeros(len(programs))
    count[launches] = np.searchsorted(keys, wanted, "right") - np.searchsorted(keys, wanted, "left")
    carried = flows(plan, programs)
    exchanged = carried.at[(programs.op[carried.at] == Op.ALL_TO_ALL) & (carried.num_bytes > 0)]
    # What a rank sends in an exchange it also receives, in number.
    return count + 2.0 * np.bincount(exchanged, minlength=len(programs))


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
        rate, latency_s = cluster.link(crosses)
        return cls(crosses, carried.num_bytes / rate, latency_s)
