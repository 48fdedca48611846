"""Cells: the memory of the oracle's model machine, and what the values in it are."""

from __future__ import annotations

import numpy as np

from hsap.ir.heads import HeadRun
from hsap.ir.program import Role, Space
from hsap.ir.span import positions

POISON = np.uint64(0x9E3779B97F4A7C15)
CELL = 8


class Wrong(Exception):
    """The plan can't be run, or gives a wrong answer."""


class Cells:
    """Memory of all ranks for one program: an arena each, shared by offsets, and tensors of their own for the ends."""

    def __init__(self, plan, mask: int, direction: int) -> None:
        self.plan, self.direction, self.heads = plan, direction, plan.problem.heads
        self.b = plan.programs[mask][direction].buffers
        self.intra, self.num_ranks = plan.topology.intra_sp, plan.num_ranks
        self.tokens = [positions(plan.spans[lo:hi]) for lo, hi in plan.rank_rows.tolist()]
        sizes = self.b.num_bytes.astype(object)
        ends = [o + n for o, n, space in zip(self.b.offset, sizes, self.b.space) if space == Space.ARENA]
        if max([*ends, *sizes, 0]) > 1 << 24 or min([*sizes, 0]) < 0:
            raise Wrong("memory too large for the model, or negative")
        self.arena = [np.full(max([*ends, 0]) // CELL + 1, POISON) for _ in range(self.num_ranks)]
        outside = np.flatnonzero(self.b.space != Space.ARENA).tolist()
        self.own = {b: np.full(int(sizes[b]) // CELL + 1, POISON) for b in outside}
        self.begun: set[int] = set()
        self.kv = np.isin(self.b.role, (Role.KV, Role.DKV)).tolist()
        self.places: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.rows_of: dict[int, np.ndarray] = {}

    def rank_of(self, b: int) -> int:
        return int(np.searchsorted(self.b.offsets, b, side="right")) - 1

    def rows(self, b: int) -> np.ndarray:
        """Token positions of a buffer's rows."""
        if b not in self.rows_of:
            lo, hi = self.b.rows[b].tolist()
            if not 0 <= lo <= hi <= len(self.plan.spans):
                raise Wrong("rows")
            self.rows_of[b] = positions(self.plan.spans[lo:hi])
        return self.rows_of[b]

    def is_kv(self, b: int) -> bool:
        return self.kv[b]

    def outer(self, b: int) -> bool:
        """Whether the buffer is a rank's own tensor with all heads, not its column's."""
        role, space = self.b.role[b], self.b.space[b]
        plain = space in (Space.INPUT, Space.OUTPUT) and self.intra > 1
        return plain and not (self.direction == 1 and role in (Role.Q, Role.KV))

    def home_rows(self, b: int) -> np.ndarray:
        """Token positions that an input or result of the buffer's rank must have."""
        rank = self.rank_of(b)
        if self.outer(b) or self.intra == 1:
            return self.tokens[rank]
        first = rank - rank % self.intra
        return np.concatenate(self.tokens[first : first + self.intra])

    def home_heads(self, b: int) -> slice:
        """Heads of the buffer, numbered over all heads."""
        q_first, q_count, kv_first, kv_count = self.b.heads[b].tolist()
        share = HeadRun(0, 0, 0, 0) if self.outer(b) else self.heads.shares(self.intra)[self.rank_of(b) % self.intra]
        if self.is_kv(b):
            return slice(share.kv_first + kv_first, share.kv_first + kv_first + kv_count)
        return slice(share.q_first + q_first, share.q_first + q_first + q_count)

    def _places(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of a buffer's elements [rows, heads, parts] and statistics [rows, heads, statistics] in memory."""
        if b in self.places:
            return self.places[b]
        rows, count = len(self.rows(b)), int(self.b.heads[b, 3 if self.is_kv(b) else 1])
        parts, stats = (2, 0) if self.is_kv(b) else (1, {Role.O: 1, Role.DO: 2}.get(int(self.b.role[b]), 0))
        body = rows * count * parts
        lead = -(-body * CELL // 256) * 256 // CELL if stats else body
        if count < 0 or (lead + rows * count * stats) * CELL > self.b.num_bytes[b]:
            raise Wrong("a buffer is smaller than what is in it")
        first, memory = 0, self.own.get(b)
        if memory is None:
            offset = int(self.b.offset[b])
            if offset < 0 or offset % 256:
                raise Wrong("offset")
            first, memory = offset // CELL, self.arena[self.rank_of(b)]
        elements = memory[first : first + body].reshape(rows, count, parts)
        behind = memory[first + lead : first + lead + rows * count * stats].reshape(rows, count, stats)
        self.places[b] = elements, behind
        return elements, behind

    def load(self, b: int) -> np.ndarray:
        """Values of a buffer, elements then statistics: uint64 [rows, heads, parts]."""
        return np.concatenate(self._places(b), axis=2)

    def store(self, b: int, values: np.ndarray) -> None:
        """Write all values of a buffer."""
        elements, stats = self._places(b)
        elements[:] = values[:, :, : elements.shape[2]]
        stats[:] = values[:, :, elements.shape[2] :]

    def begin(self, b: int) -> None:
        """An accumulator is empty when first touched."""
        if self.b.acc[b] and b not in self.begun:
            self.begun.add(b)
            self.store(b, np.zeros_like(self.load(b)))

    def ruin(self, b: int, size: int) -> None:
        """Leave scratch bytes in a state that nobody may rely on."""
        offset = int(self.b.offset[b])
        if self.b.space[b] != Space.ARENA or offset < 0 or offset % 256 or size > self.b.num_bytes[b]:
            raise Wrong("scratch")
        self.arena[self.rank_of(b)][offset // CELL : (offset + size) // CELL] = POISON

    def head_range(self, b: int, heads: HeadRun) -> slice:
        """Place of heads inside a buffer."""
        kv, (q_first, q_count, kv_first, kv_count) = self.is_kv(b), self.b.heads[b].tolist()
        a, n = (heads.kv_first, heads.kv_count) if kv else (heads.q_first, heads.q_count)
        first, count = (kv_first, kv_count) if kv else (q_first, q_count)
        if not first <= a <= a + n <= first + count:
            raise Wrong("heads leave the buffer")
        return slice(a - first, a - first + n)

    def window(self, b: int, rows: tuple[int, int], heads: HeadRun) -> tuple[slice, slice]:
        """Place of span rows and heads inside a buffer."""
        lo, hi = self.b.rows[b].tolist()
        if not lo <= rows[0] <= rows[1] <= hi:
            raise Wrong("rows leave the buffer")
        lengths = self.plan.spans[:, 1] - self.plan.spans[:, 0]
        first = int(lengths[lo : rows[0]].sum())
        return slice(first, first + int(lengths[rows[0] : rows[1]].sum())), self.head_range(b, heads)

    def get(self, b: int, rows, heads) -> np.ndarray:
        return self.load(b)[self.window(b, rows, heads)]

    def put(self, b: int, rows, heads, values: np.ndarray) -> None:
        whole = self.load(b)
        whole[self.window(b, rows, heads)] = values
        self.store(b, whole)


def row_index(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Row of each wanted token position."""
    order = np.argsort(rows, kind="stable")
    place = np.minimum(np.searchsorted(rows[order], wanted), max(len(rows) - 1, 0))
    if len(wanted) and (not len(rows) or (rows[order][place] != wanted).any()):
        raise Wrong("slices leave the buffers")
    return order[place]


def forward(pairs, q, kv) -> np.ndarray:
    """o and lse of the model: q [T, H, 1], kv [S, H, 2] -> [T, H, 2]."""
    o = np.einsum("ts,th,sh,sh->th", pairs, q[:, :, 0], kv[:, :, 0], kv[:, :, 1])
    lse = np.einsum("ts,th,sh->th", pairs, q[:, :, 0], kv[:, :, 0])
    return np.stack([o, lse], axis=2)


def backward(pairs, q, kv, do) -> tuple[np.ndarray, np.ndarray]:
    """dq [T, H, 1] and dk, dv [S, H, 2] of the model; do [T, H, 3] is do, lse, delta."""
    g = do[:, :, 0] * (do[:, :, 1] + np.uint64(3) * do[:, :, 2]) * q[:, :, 0]
    dq = np.einsum("ts,th,sh,sh->th", pairs, g, kv[:, :, 0], kv[:, :, 1])
    dk = np.einsum("ts,th,sh->sh", pairs, g, kv[:, :, 1])
    dv = np.einsum("ts,th,sh->sh", pairs, g * q[:, :, 0], kv[:, :, 0])
    return dq[:, :, None], np.stack([dk, dv], axis=2)
