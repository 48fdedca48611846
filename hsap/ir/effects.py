"""Effects: what instructions read and write, and for how long. The one truth for buffers, verifier and simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.program import OPERANDS, Access, Op, Programs


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


_ACCESS = np.full((len(Op), 5), -1, np.int8)
for _op, _operands in OPERANDS.items():
    _ACCESS[_op, : len(_operands)] = _operands


def touches(programs: Programs) -> Touches:
    """List what every instruction touches."""
    access = _ACCESS[programs.op]
    at, operand = np.nonzero(access >= 0)
    until = wait_of(programs)
    end = np.where(until[at] >= 0, until[at], at)
    return Touches(at, programs.buf[at, operand].astype(np.int64), access[at, operand], operand, at, end)


def wait_of(programs: Programs) -> np.ndarray:
    """Index of the wait that ends each send and receive, -1 elsewhere (and where no wait follows): int64 [n]."""
    is_wait = programs.op == Op.WAIT
    is_moved = (programs.op == Op.SEND) | (programs.op == Op.RECV)
    out = np.full(len(programs), -1, np.int64)
    waits, moved = np.flatnonzero(is_wait), np.flatnonzero(is_moved)
    if len(waits) and len(moved):
        num_rounds = int(programs.round.max()) + 1
        key = programs.rank * num_rounds + programs.round
        order = np.argsort(key[waits], kind="stable")
        place = np.searchsorted(key[waits][order], key[moved])
        place = np.minimum(place, len(waits) - 1)
        found = key[waits][order][place] == key[moved]
        out[moved[found]] = waits[order][place[found]]
    return out


def live_ranges(programs: Programs) -> tuple[np.ndarray, np.ndarray]:
    """First and last instruction index at which each buffer must exist: int64 [num_buffers]; (n, -1) if untouched."""
    touched = touches(programs)
    first = np.full(len(programs.buffers), len(programs), np.int64)
    last = np.full(len(programs.buffers), -1, np.int64)
    np.minimum.at(first, touched.buffer, touched.begin)
    np.maximum.at(last, touched.buffer, touched.end)
    return first, last


def is_accumulator(access: np.ndarray) -> np.ndarray:
    """Whether a touch folds into its buffer."""
    return access == Access.ADD
