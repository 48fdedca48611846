"""Messages: moves whose rows follow each other at both ends are sent as one, and packed as one before.

Where rows are is said in places: see `Trays.find`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.compiler.widen import Moves
from hsap.ir.block import Shards
from hsap.ir.program import NONE
from hsap.ir.sort import distinct, order_of
from hsap.loops import loop


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """What is copied together where it leaves home without all of its heads: int64 [num_copies] each.

    first, stop: spans that are copied. stage, until: of the rounds that carry the copy.
    """

    role: np.ndarray
    run: np.ndarray
    rank: np.ndarray
    stage: np.ndarray
    until: np.ndarray
    first: np.ndarray
    stop: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """What goes from one rank to another in one piece: int64 [num_messages] each, in the order of roles.

    copy: which of the copies is sent, NONE where rows are sent from where they lie. source, target: places; first,
    stop, to_first, to_stop: spans there.
    """

    role: np.ndarray
    round: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    run: np.ndarray
    stage: np.ndarray
    until: np.ndarray
    copy: np.ndarray
    source: np.ndarray
    target: np.ndarray
    first: np.ndarray
    stop: np.ndarray
    to_first: np.ndarray
    to_stop: np.ndarray

    def of(self, role: int) -> slice:
        """Where the messages of a role are."""
        return slice(*np.searchsorted(self.role, (role, role + 1)))


_ROW = {name: row for row, name in enumerate(Messages.__slots__)}
_FIRST, _STOP, _TO_FIRST, _TO_STOP = (_ROW[name] for name in ("first", "stop", "to_first", "to_stop"))
_SAME = tuple(_ROW[name] for name in ("role", "round", "copy", "source", "target"))
"""What messages must have in common to be one; a round has a rank send once at most, so that it says both ends."""


def messages(
    moves: Moves,
    rounds: np.ndarray,
    copy: np.ndarray,
    here: tuple[np.ndarray, np.ndarray, np.ndarray],
    there: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> Messages:
    """Join moves between the same two buffers whose rows follow each other at both ends.

    rounds, copy: of each move, see `Messages`. here, there: (place, first and stop span) of each, as `Trays.find` says.
    """
    ends = (here[0], there[0], *here[1:], *there[1:])
    columns = np.stack([moves.role, rounds, moves.src, moves.dst, moves.run, moves.stage, moves.until, copy, *ends])
    num_rounds, num_ranks = int(rounds.max(initial=0)) + 1, int(moves.src.max(initial=0)) + 1
    num_runs, num_spans = int(moves.run.max(initial=0)) + 1, int(here[2].max(initial=0)) + 1
    key = (moves.role * num_rounds + rounds) * num_ranks + moves.src
    in_order = order_of((key * num_runs + moves.run) * num_spans + here[1])
    joined, count = _join(columns, in_order)
    return Messages(*joined[:, :count])


@loop
def _join(columns: np.ndarray, in_order: np.ndarray) -> tuple[np.ndarray, int]:
    """Let each message grow by those that follow it at both ends: (int64 [num_columns, n], how many are left)."""
    out = np.empty_like(columns)
    count = 0
    for at in range(len(in_order)):
        i, last = in_order[at], count - 1
        grows = count > 0 and columns[_FIRST, i] == out[_STOP, last] and columns[_TO_FIRST, i] == out[_TO_STOP, last]
        for row in _SAME:
            grows = grows and columns[row, i] == out[row, last]
        if grows:
            out[_STOP, last], out[_TO_STOP, last] = columns[_STOP, i], columns[_TO_STOP, i]
        else:
            for row in range(len(columns)):
                out[row, count] = columns[row, i]
            count += 1
    return out, count


def copies(shards: Shards, moves: Moves, mine: np.ndarray) -> tuple[Copies, np.ndarray]:
    """Find what is copied together before it leaves home: (the copies, which one each move is sent from, else NONE).

    mine: int64 [m], moves that must be copied; in one run of head groups, all that lies side by side there is one copy.
    """
    copy = np.full(len(moves), NONE, np.int64)
    num_ranks, num_runs, width = int(moves.src.max(initial=0)) + 1, int(moves.run.max(initial=0)) + 1, len(shards) + 1
    first = int(moves.stage.min(initial=0))
    key = moves.role[mine] * (int(moves.stage.max(initial=0)) - first + 1) + moves.stage[mine] - first
    key = ((key * num_ranks + moves.src[mine]) * num_runs + moves.run[mine]) * width + moves.shard[mine]
    keys, which = distinct(key)
    begins = np.ones(len(keys), bool)
    begins[1:] = keys[1:] != keys[:-1] + 1
    lead = np.flatnonzero(begins)
    last = np.append(lead[1:], len(keys))[: len(lead)] - 1
    copy[mine] = (np.cumsum(begins) - 1)[which]
    there = np.empty(len(keys), np.int64)
    there[which] = mine
    of = there[lead]
    rows = shards.offsets[keys[lead] % width], shards.offsets[keys[last] % width + 1]
    return Copies(moves.role[of], moves.run[of], moves.src[of], moves.stage[of], moves.until[of], *rows), copy
