"""Position: where a rank is, as a few numbers that others can read while it hangs, is stopped, or after its end.

A machine writes one number an instruction, the loop a few numbers a step; that is all it costs. Where the numbers lie
in shared memory, other processes of the machine read them themselves; they need no answer of the rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from hsap.ir.program import Op, Role


class Word(IntEnum):
    """Where in the record a number stands; all are int64.

    AT: `code` of the instruction, 0 between streams. STREAM: streams begun since the start. WAIT, PEER: what is waited
    for and the rank it comes from, written by whoever watches. BEAT_NS, MOVED_NS: when the rank was last heard of and
    last seen to move, by the monotonic clock of its machine. PLANNING, PLAN, PLANNER: what the thread that prepares
    steps does, for which micro-batch, and the rank that plans it. DONE: steps that are through.
    """

    AT = 0
    STREAM = 1
    PHASE = 2
    STEP = 3
    MICRO = 4
    LAYER = 5
    DIRECTION = 6
    TICKS = 7
    DONE = 8
    PLANNING = 9
    PLAN = 10
    PLANNER = 11
    BEAT_NS = 12
    MOVED_NS = 13
    CPU_NS = 14
    WAIT = 15
    PEER = 16


NUM_WORDS = 32
NUM_BYTES = 8 * NUM_WORDS

_MOVES = [Word.AT, Word.STREAM, Word.PHASE, Word.STEP, Word.MICRO, Word.TICKS, Word.DONE, Word.PLANNING, Word.PLAN]


class Phase(IntEnum):
    """What the loop is at, in the order of a step."""

    START = 0
    JOIN = 1
    DATA = 2
    AGREE = 3
    FORWARD = 4
    BACKWARD = 5
    JUDGE = 6
    UPDATE = 7
    WEIGHTS = 8
    FIGURES = 9
    EVALUATE = 10
    SAVE = 11
    SAVED = 12
    END = 13
    LEFT = 14


class Planning(IntEnum):
    """What the thread that prepares steps is at."""

    NOTHING = 0
    READS = 1
    PLANS = 2
    AWAITS = 3


class Wait(IntEnum):
    """What a rank waits for."""

    NOTHING = 0
    RECV = 1
    SEND = 2
    ALL = 3
    PLAN = 4


class Code(NamedTuple):
    """An instruction of a stream. op None: an accumulator is emptied."""

    number: int
    op: Op | None
    role: Role

    def __str__(self) -> str:
        if self.op is None:
            return "empty"
        role = "" if self.role == Role.NONE else f" {self.role.name.lower()}"
        return f"#{self.number} {self.op.name.lower()}{role}"


_EMPTY = 255


def encode(index: int, op: Op | None, role: Role) -> int:
    """Give an instruction as one number, never 0."""
    return (index + 1) << 16 | (_EMPTY if op is None else int(op)) << 8 | (int(role) + 1)


def decode(number: int) -> Code | None:
    """Give the instruction of a number; None between streams."""
    if number <= 0:
        return None
    op = number >> 8 & 255
    return Code((number >> 16) - 1, None if op == _EMPTY else Op(op), Role((number & 255) - 1))


class Position:
    """The record of one rank. memory: NUM_BYTES that others read too; None: of its own.

    transport: of the stream that runs, for whoever wants to know what it waits for.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self.words = memoryview(array("q", bytes(NUM_BYTES))) if memory is None else memory.cast("q")
        self.transport: object = None

    def enter(self, direction: int, layer: int, transport: object) -> memoryview:
        """Begin a stream; gives the words, in the first of which the machine writes where it is."""
        words = self.words
        words[Word.STREAM] += 1
        words[Word.DIRECTION], words[Word.LAYER], self.transport = direction, layer, transport
        return words

    def leave(self) -> None:
        """End a stream."""
        self.words[Word.AT] = 0

    def phase(self, phase: Phase, step: int | None = None) -> None:
        """Note what the loop is at from now on."""
        self.words[Word.PHASE] = phase
        if step is not None:
            self.words[Word.STEP] = step

    def micro(self, micro: int) -> None:
        """Note which micro-batch is next."""
        self.words[Word.MICRO] = micro

    def tick(self) -> None:
        """Note that work goes on where no other number would show it."""
        self.words[Word.TICKS] += 1

    def done(self) -> None:
        """Note that a step is through."""
        self.words[Word.DONE] += 1

    def planning(self, planning: Planning, number: int = -1, planner: int = -1) -> None:
        """Note what the thread that prepares steps is at: a micro-batch's running number, the rank that plans it."""
        words = self.words
        words[Word.PLAN], words[Word.PLANNER], words[Word.PLANNING] = number, planner, planning


def moves(words: Sequence[int]) -> tuple[int, ...]:
    """The numbers of a record that change as long as a rank moves."""
    return tuple(words[word] for word in _MOVES)
