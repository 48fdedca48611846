"""Stream: one mask and direction of a plan with the derived columns that several rules read.

A rule is a function of a stream that yields what it found; on a sound plan it is a few whole-column operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hsap.ir.effects import Touches, touches
from hsap.ir.plan import Plan
from hsap.ir.program import Buffers, Op, Programs, Role
from hsap.ir.schedule import DIRECTIONS
from hsap.verify.placement import spans_of
from hsap.verify.report import Fault

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

    rank: int64 [n], rank of each instruction. buffer_rank: int64 [num_buffers]. touched: every (instruction, buffer)
    pair; only to be read once the operands are known to be sound.
    """

    plan: Plan
    mask: int
    direction: int
    rank: np.ndarray
    buffer_rank: np.ndarray
    slice_spans: tuple[np.ndarray, np.ndarray]
    touched: Touches | None = None

    @classmethod
    def both(cls, plan: Plan, mask: int) -> tuple[Stream, Stream]:
        """Give the forward and the backward stream of a mask."""
        sides = spans_of(plan.shards, plan.slices[mask])
        pair = enumerate(plan.programs[mask])
        forward, backward = (cls(plan, mask, d, p.rank, p.buffers.rank, sides) for d, p in pair)
        return forward, backward

    def with_touches(self) -> Stream:
        """Add what every instruction touches."""
        return replace(self, touched=touches(self.programs))

    @property
    def programs(self) -> Programs:
        return self.plan.programs[self.mask][self.direction]

    @property
    def buffers(self) -> Buffers:
        return self.programs.buffers

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
        index = buffer - int(b.offsets[self.buffer_rank[buffer]])
        first, stop = b.rows[buffer].tolist()
        return f"buffer %{index} ({role}{' accumulator' if b.acc[buffer] else ''}, spans {first}..{stop})"

    def toucher(self, buffer: int) -> int | None:
        """Give the first instruction that touches a buffer, for messages."""
        at = self.touched.at[self.touched.buffer == buffer]
        return int(at[0]) if len(at) else None


def same_rows(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether two tables agree, row by row: bool [n]. b may also be one row or one number.

    Column by column: NumPy is slow at reducing many short rows, as it is at picking them but for `take`.
    """
    agree = np.ones(len(a), bool)
    for left, right in zip(a.T, np.broadcast_to(b, a.shape).T):
        agree &= left == right
    return agree


def at(bad: np.ndarray, say: Callable[[int], str]) -> Iterator[Found]:
    """Object to instructions. bad: their indices; say: message for one of them."""
    for index in bad[:SHOWN].tolist():
        yield Found(say(index), index)


def at_buffers(stream: Stream, bad: np.ndarray, say: Callable[[int], str]) -> Iterator[Found]:
    """Object to buffers, at the first instruction that touches each."""
    for buffer in bad[:SHOWN].tolist():
        instruction = None if stream.touched is None else stream.toucher(buffer)
        yield Found(say(buffer), instruction, int(stream.buffer_rank[buffer]))


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
