"""Stream: one mask and direction of a plan with the derived columns that several rules read.

A rule is a function of a stream that yields what it found; on a sound plan it is one loop over instructions or buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hsap.ir.effects import NUM_OPERANDS, wait_of
from hsap.ir.plan import Plan
from hsap.ir.program import Buffers, Op, Programs, Role
from hsap.ir.schedule import DIRECTIONS
from hsap.loops import loop
from hsap.verify.columns import BUF, OP, RANK, buffer_table, instruction_table, plain
from hsap.verify.placement import origins
from hsap.verify.report import Fault
from hsap.verify.slices import spans_of

SHOWN = 3
"""Faults that a rule reports at most: the first ones tell the story."""


@dataclass(frozen=True, slots=True)
class Found:
    """Something a rule objects to. instruction: index over all ranks; rank only where there is no instruction."""

    message: str
    instruction: int | None = None
    rank: int | None = None


Rule = Callable[["Stream"], Iterable[Found]]


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A program of a plan whose columns have the right shapes and whose rank borders are sound.

    code, held: the instruction and the buffer table, see `columns`. slice_spans: which of the shards' spans holds each
    slice's queries and keys, int64 [num_slices] each. shares: int64 [intra_sp, 4], head share of each intra index, a
    `HeadRun` over all heads. index: int64 [m], the program's. origin: int64 [spans of the table], which of the shards'
    spans each one is. Only once operands are known to be sound, None before: until: int64 [n], last instruction during
    which an instruction's operands must be left alone (its wait for transfers, else itself); first, last: int64
    [num_buffers], first and last instruction at which a buffer must exist, (n, -1) if untouched.
    """

    plan: Plan
    mask: int
    direction: int
    code: np.ndarray
    held: np.ndarray
    slice_spans: tuple[np.ndarray, np.ndarray]
    shares: np.ndarray
    index: np.ndarray
    origin: np.ndarray
    until: np.ndarray | None = None
    first: np.ndarray | None = None
    last: np.ndarray | None = None

    @classmethod
    def both(cls, plan: Plan, mask: int) -> tuple[Stream, Stream]:
        """Give the forward and the backward stream of a mask."""
        sides = spans_of(plan.shards, plan.slices[mask])
        shares = np.array(plan.problem.heads.shares(plan.topology.intra_sp), np.int64)
        origin = origins(plan)
        forward, backward = (
            cls(plan, mask, d, instruction_table(p), buffer_table(p.buffers), sides, shares, plain(p.index), origin)
            for d, p in enumerate(plan.programs[mask])
        )
        return forward, backward

    def with_lives(self) -> Stream:
        """Add until when instructions last, and from when to when buffers are alive."""
        until = wait_of(self.programs)
        first, last = _lives(self.code, self.held.shape[1], until, NUM_OPERANDS)
        return replace(self, until=until, first=first, last=last)

    @property
    def programs(self) -> Programs:
        return self.plan.programs[self.mask][self.direction]

    @property
    def buffers(self) -> Buffers:
        return self.programs.buffers

    @property
    def rank(self) -> np.ndarray:
        """Rank of each instruction: int64 [n]."""
        return self.code[RANK]

    @property
    def slices(self) -> np.ndarray:
        return self.plan.slices[self.mask]

    def where(self, *ops: Op) -> np.ndarray:
        """Indices of the instructions with one of the ops, in order."""
        mask = self.programs.op == ops[0]
        for op in ops[1:]:
            mask |= self.programs.op == op
        return np.flatnonzero(mask)

    def describe(self, buffer: int) -> str:
        """Name a buffer for a message."""
        b = self.buffers
        role = Role(int(b.role[buffer])).name.lower()
        index = buffer - int(b.offsets[self.held[RANK, buffer]])
        first, stop = b.rows[buffer].tolist()
        return f"buffer %{index} ({role}{' accumulator' if b.acc[buffer] else ''}, spans {first}..{stop})"

    def toucher(self, buffer: int) -> int | None:
        """Give the first instruction that touches a buffer, for messages; None too while operands may be unsound."""
        if self.first is None or self.first[buffer] == len(self.programs):
            return None
        return int(self.first[buffer])


@loop
def _lives(
    code: np.ndarray, num_buffers: int, until: np.ndarray, num_operands: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """First and last instruction at which each buffer must exist, (n, -1) if untouched; needs `structure.operands`.

    until: of `wait_of`; where that is no instruction, the instruction itself is put in.
    """
    first, last = np.full(num_buffers, code.shape[1]), np.full(num_buffers, -1)
    for i in range(code.shape[1]):
        if until[i] < 0:
            until[i] = i
        for k in range(num_operands[code[OP, i]]):
            buffer = code[BUF + k, i]
            first[buffer], last[buffer] = min(first[buffer], i), max(last[buffer], until[i])
    return first, last


def at(bad: np.ndarray, say: Callable[[int], str]) -> Iterator[Found]:
    """Object to instructions. bad: their indices; say: message for one of them."""
    for index in bad[:SHOWN].tolist():
        yield Found(say(index), index)


def at_buffers(stream: Stream, bad: np.ndarray, say: Callable[[int], str]) -> Iterator[Found]:
    """Object to buffers, at the first instruction that touches each."""
    for buffer in bad[:SHOWN].tolist():
        yield Found(say(buffer), stream.toucher(buffer), int(stream.held[RANK, buffer]))


def apply(family: str, rules: Iterable[Rule], stream: Stream) -> list[Fault]:
    """Run rules on a stream and give their findings as faults; a rule's name is its function's."""
    faults = []
    for rule in rules:
        for number, found in enumerate(rule(stream)):
            if number == SHOWN:
                break
            name = f"{family}.{rule.__name__}"
            rank, index = found.rank, found.instruction
            if index is not None:
                rank = int(stream.rank[index])
                index -= int(stream.programs.offsets[rank])
            faults.append(Fault(name, stream.mask, DIRECTIONS[stream.direction], rank, index, found.message))
    return faults
