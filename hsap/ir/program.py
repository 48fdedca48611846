"""Programs: the instructions of all ranks, as NumPy columns.

Instructions follow the paper's Table 1 (HSAP §3.1); Launch and Wait are ours: they say when a batched point-to-point
group (a round) starts and when its results may be touched. What each operand means is in `OPERANDS`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hsap.ir.heads import HeadRun


class Op(IntEnum):
    """What an instruction does; see `OPERANDS` for its buffers."""

    SEND = 0
    RECV = 1
    LAUNCH = 2
    WAIT = 3
    ATTEND = 4
    ATTEND_GRAD = 5
    MERGE = 6
    SUM = 7
    COPY = 8
    ALL_TO_ALL = 9


class Role(IntEnum):
    """What a buffer's rows are. o carries lse; do carries lse and delta = rowsum(do · o)."""

    NONE = -1
    Q = 0
    KV = 1
    O = 2  # noqa: E741
    DO = 3
    DQ = 4
    DKV = 5


KV_ROLES = (Role.KV, Role.DKV)
"""Roles whose rows hold keys then values of KV heads; the others hold query heads."""

PARTIAL_ROLES = (Role.O, Role.DQ, Role.DKV)
"""Roles that are results: they may be spread over ranks as partial sums, and travel in the wire's dtype."""


class Space(IntEnum):
    """Where a buffer lives."""

    INPUT = 0
    """The caller's tensor: q, kv of the rank in forward; kept q, kv and do in backward."""
    OUTPUT = 1
    """The result handed to the caller: o, or dq and dkv."""
    KEPT = 2
    """Head-resharded q and kv, made in forward and given to backward as input; there only if intra_sp > 1."""
    ARENA = 3
    """The run's one communication buffer."""


class Access(IntEnum):
    """How an instruction touches a buffer. ADD folds into an accumulator, which is empty when first touched."""

    READ = 0
    WRITE = 1
    ADD = 2


OPERANDS: dict[Op, tuple[Access, ...]] = {
    Op.SEND: (Access.READ,),  # rows go to `peer`, joined to `round`
    Op.RECV: (Access.WRITE,),  # rows come from `peer`, joined to `round`
    Op.LAUNCH: (),  # start all sends and receives joined to `round`
    Op.WAIT: (),  # the round is over: sent buffers may be reused, received ones read
    Op.ATTEND: (Access.READ, Access.READ, Access.ADD),  # q, kv, o
    Op.ATTEND_GRAD: (Access.READ, Access.READ, Access.READ, Access.ADD, Access.ADD),  # q, kv, do, dq, dkv
    Op.MERGE: (Access.READ, Access.ADD),  # partial o, o: online softmax
    Op.SUM: (Access.READ, Access.ADD),  # partial gradient, gradient
    Op.COPY: (Access.READ, Access.WRITE),  # rows and heads, with change of dtype
    Op.ALL_TO_ALL: (Access.READ, Access.WRITE, Access.WRITE),  # sequence-sharded to head-sharded or back; scratch
}
"""Operands of each op in order: how buffer `buf[0]`, `buf[1]`, … is touched."""

NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Buffers of all ranks as columns, those of rank r at [offsets[r], offsets[r + 1]).

    role, space: int8 [n]. acc: bool [n], accumulator precision. rows: int32 [n, 2], range of the plan's span table;
    the buffer holds these token positions in that order. heads: int16 [n, 4], a `HeadRun` numbered within the rank's
    column (over all heads for sequence-sharded inputs and outputs of intra_sp > 1). num_bytes: int64 [n].
    offset: int64 [n], place in the arena, NONE elsewhere. role NONE is scratch.
    """

    offsets: np.ndarray
    role: np.ndarray
    space: np.ndarray
    acc: np.ndarray
    rows: np.ndarray
    heads: np.ndarray
    num_bytes: np.ndarray
    offset: np.ndarray

    def __len__(self) -> int:
        return len(self.role)

    @property
    def rank(self) -> np.ndarray:
        """Rank of each buffer: int64 [n]."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


class Instruction(NamedTuple):
    """One instruction as a small frozen view, for `match`, tests and printing. Buffers are indices into `Buffers`."""

    op: Op
    role: Role
    peer: int
    round: int
    buf: tuple[int, ...]
    rows: tuple[int, int]
    slices: tuple[int, int]
    heads: HeadRun


@dataclass(frozen=True, slots=True, eq=False)
class Programs:
    """Instruction streams of all ranks for one mask and direction, rank r's at [offsets[r], offsets[r + 1]).

    op, role: int8 [n]. peer, round: int32 [n]. buf: int32 [n, 5] indices into `buffers`. rows: int32 [n, 2], range of
    the plan's span table that is moved. slices: int32 [n, 2], range of `index` that is attended. heads: int16 [n, 4], a
    `HeadRun` numbered within the column. NONE where an op has no such operand. stage: int32 [n], for people and for the
    viewer, without meaning for execution.
    index: int32 [m], indices into the mask's slice table: a kernel attends the slices of many blocks, and the two
    directions fuse different ones. The same instruction on all ranks of one intra group has the same range.
    """

    offsets: np.ndarray
    op: np.ndarray
    role: np.ndarray
    peer: np.ndarray
    round: np.ndarray
    buf: np.ndarray
    rows: np.ndarray
    slices: np.ndarray
    heads: np.ndarray
    stage: np.ndarray
    index: np.ndarray
    buffers: Buffers

    def __len__(self) -> int:
        return len(self.op)

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def rank(self) -> np.ndarray:
        """Rank of each instruction: int64 [n]."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.offsets))

    def __getitem__(self, rank: int) -> list[Instruction]:
        """One rank's stream as instruction views."""
        lo, hi = self.offsets[rank], self.offsets[rank + 1]
        return [self.instruction(i) for i in range(lo, hi)]

    def instruction(self, index: int) -> Instruction:
        """View of the instruction at `index` (over all ranks)."""
        op = Op(int(self.op[index]))
        return Instruction(
            op,
            Role(int(self.role[index])),
            int(self.peer[index]),
            int(self.round[index]),
            tuple(int(b) for b in self.buf[index, : len(OPERANDS[op])]),
            (int(self.rows[index, 0]), int(self.rows[index, 1])),
            (int(self.slices[index, 0]), int(self.slices[index, 1])),
            HeadRun(*(int(h) for h in self.heads[index])),
        )

    def arena_bytes(self) -> np.ndarray:
        """Bytes of arena that each rank uses: int64 [num_ranks]."""
        top = np.where(self.buffers.offset >= 0, self.buffers.offset + self.buffers.num_bytes, 0)
        used = np.zeros(self.num_ranks, np.int64)
        np.maximum.at(used, self.buffers.rank, top)
        return used


COLUMN_DTYPES = {
    "offsets": np.int64,
    "op": np.int8,
    "role": np.int8,
    "space": np.int8,
    "acc": np.bool_,
    "peer": np.int32,
    "round": np.int32,
    "buf": np.int32,
    "rows": np.int32,
    "slices": np.int32,
    "index": np.int32,
    "heads": np.int16,
    "stage": np.int32,
    "num_bytes": np.int64,
    "offset": np.int64,
}
"""Stored dtype of every column of `Programs` and `Buffers`."""

COLUMN_WIDTHS = {"buf": 5, "rows": 2, "slices": 2, "heads": 4}
"""Second dimension of the columns that have one."""


Columns = TypeVar("Columns", Buffers, Programs)


def typed(columns: Columns) -> Columns:
    """Bring the columns of a `Programs` or `Buffers` to their stored dtypes, contiguous in memory."""
    names = [f.name for f in fields(columns) if f.name in COLUMN_DTYPES]
    arrays: dict[str, Any] = {n: np.ascontiguousarray(getattr(columns, n), COLUMN_DTYPES[n]) for n in names}
    return replace(columns, **arrays)
