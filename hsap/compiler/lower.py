"""Lower: one column's schedule as instructions and buffers, forward and backward from one description.

A column is the InterSP ranks of equal intra index. Everything here is in column terms: rank = InterSP rank, peers
likewise; `expand` turns it into the streams of all inter × intra ranks. Within a stage a rank first packs what it
sends, starts the rounds that leave in it, computes, waits for the rounds that end in it, and then folds what arrived:

    copy … | send recv launch … | attend … | wait … | merge, sum …

so that transfers run under the blocks of the stages that they last (`Transfers.stage` … `until`). What travels together
and what is one kernel has been said before (`hsap.compiler.lay`); here it gets buffers, in home and on trays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hsap.compiler.lay import Laid
from hsap.compiler.messages import Messages
from hsap.compiler.order import IS_OF_QUERIES, IS_RESULT
from hsap.compiler.trays import NEVER, SIDES, SpanTable, Trays
from hsap.compiler.widen import Runs
from hsap.ir.program import NONE, OPERANDS, Op, Role, Space
from hsap.ir.schedule import INPUTS, OUTPUTS
from hsap.ir.sort import order_of
from hsap.loops import loop

PACK, COMMUNICATE, COMPUTE, WAIT, FOLD = range(5)
"""Phases of a stage, in order."""

ALL = -1
"""Run of head groups of a buffer or an instruction that covers the column's whole share."""

MAX_OPERANDS = max(len(operands) for operands in OPERANDS.values())
HELD = ("role", "space", "acc", "rank", "first", "stop", "run")
CODE = ("op", "rank", "stage", "phase", "place", "role", "peer", "round", "first", "stop", "slice", "last", "run")
_ROW = {name: row for row, name in enumerate(CODE)}
_RANK, _STAGE, _PHASE, _PLACE = (_ROW[name] for name in ("rank", "stage", "phase", "place"))
assert ALL == NONE, "columns that aren't given are filled with one number"


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A column's buffers and instructions before they are given to ranks and memory.

    buffers: int64 [len(HELD), n], rows as in `HELD`; first and stop are a range of the span table, NONE for all rows of
    the rank; run: ALL or an index of `runs`. code: int32 [len(CODE) + 5, n], rows as in `CODE` and then those of the
    operands, sorted by rank and then in order; slice and last: range of `index` that is attended. index: int32 [n] of
    slice indices, as in `Programs`. table: the span table with the rows of this draft's trays. runs: of head groups.
    """

    buffers: np.ndarray
    code: np.ndarray
    index: np.ndarray
    table: SpanTable
    runs: Runs


class _Buffers:
    """Grows the buffer table."""

    def __init__(self) -> None:
        self.columns: list[np.ndarray] = []
        self.count = 0

    def add(
        self,
        role: Role | np.ndarray,
        space: Space,
        acc: int | np.ndarray,
        rank: np.ndarray,
        rows: np.ndarray | tuple[Any, Any],
        run: int | np.ndarray,
    ) -> np.ndarray:
        """Append buffers (arguments broadcast against `rank`); rows: first and stop. Returns their indices."""
        columns = np.empty((len(HELD), len(rank)), np.int64)
        for row, value in zip(columns, (role, space, acc, rank, *rows, run)):
            row[:] = value
        self.columns.append(columns)
        first, self.count = self.count, self.count + len(rank)
        return np.arange(first, self.count)

    def table(self) -> np.ndarray:
        return np.concatenate(self.columns, axis=1)


class _Code:
    """Collects instructions with their place on the time axis, and sorts them into streams."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, dict[int, np.ndarray | int]]] = []

    def emit(
        self,
        op: Op,
        rank: np.ndarray,
        stage: int | np.ndarray,
        phase: int,
        *,
        place: int | np.ndarray = 0,
        buf: list[np.ndarray] | tuple[Any, ...] = (),
        rows: np.ndarray | tuple[Any, ...] = (),
        slices: tuple[Any, ...] = (),
        **more: Any,
    ) -> None:
        """Append instructions (arguments broadcast against `rank`); `place` orders them within a phase.

        rows, slices: first and stop. more: other columns of `CODE`, NONE (ALL for the run) where they aren't given.
        """
        given: dict[str, Any] = {"op": op, "rank": rank, "stage": stage, "phase": phase, "place": place} | more
        given |= dict(zip(("first", "stop"), rows)) | dict(zip(("slice", "last"), slices))
        values = {_ROW[name]: value for name, value in given.items()}
        self.parts.append((len(rank), values | dict(enumerate(buf, len(CODE)))))

    def streams(self) -> np.ndarray:
        """Give the columns of all instructions, rank by rank in the order of execution."""
        code = np.full((len(CODE) + MAX_OPERANDS, sum(count for count, _ in self.parts)), NONE, np.int32)
        stop = 0
        for count, values in self.parts:
            start, stop = stop, stop + count
            for row, value in values.items():
                code[row, start:stop] = value
        return code.take(order_of(_times(code)), axis=1)


@loop
def _times(code: np.ndarray) -> np.ndarray:
    """Number of each instruction that rises with its rank, then with its place on the time axis: int64 [n]."""
    first, stages, places = code[_STAGE].min(), code[_STAGE].max() - code[_STAGE].min() + 1, code[_PLACE].max() + 1
    times = np.empty(code.shape[1], np.int64)
    for i in range(len(times)):
        stage = np.int64(code[_RANK, i]) * stages + code[_STAGE, i] - first
        times[i] = (stage * (FOLD + 1) + code[_PHASE, i]) * places + code[_PLACE, i]
    return times


NO_ROWS = (NONE, NONE)


def lower(laid: Laid, resharded: bool) -> Draft:
    """Lower one mask and direction of a strategy.

    resharded: whether AllToAll stands between the ranks' tensors and the column's (intra_sp > 1).
    """
    direction, trays = laid.direction, laid.trays
    buffers, code = _Buffers(), _Code()
    ends = _Ends(buffers, code, np.arange(trays.num_ranks), resharded)
    homes = {role: ends.enter(role, direction, laid.first_stage - 1) for role in INPUTS[direction]}
    homes |= {role: buffers.add(role, Space.ARENA, 1, ends.ranks, NO_ROWS, ALL) for role in OUTPUTS[direction]}
    places = _Places(buffers, trays, homes, direction)
    first_round = len(INPUTS[direction])  # before these come the rounds of AllToAll
    _exchange(buffers, code, places, laid, first_round)
    _compute(code, places, laid)
    _launch(code, laid, first_round)
    next_round = first_round + int(laid.rounds.max(initial=-1)) + 1
    for i, role in enumerate(OUTPUTS[direction]):
        ends.leave(role, homes[role], laid.last_stage + 1, next_round + i)
    return Draft(buffers.table(), code.streams(), laid.kernels.index.astype(np.int32), laid.table, trays.runs)


class _Ends:
    """The two ends of a stream: the ranks' own tensors become the column's, and the column's become results."""

    def __init__(self, buffers: _Buffers, code: _Code, ranks: np.ndarray, resharded: bool) -> None:
        self.buffers, self.code, self.ranks, self.resharded = buffers, code, ranks, resharded

    def enter(self, role: Role, direction: str, stage: int) -> np.ndarray:
        """Give the column's home buffer of an input role on each rank."""
        ranks = self.ranks
        column = self.buffers.add(role, Space.INPUT, 0, ranks, NO_ROWS, ALL)
        if not self.resharded or (direction == "backward" and role in (Role.Q, Role.KV)):
            return column
        space = Space.KEPT if direction == "forward" else Space.ARENA
        target = self.buffers.add(role, space, 0, ranks, NO_ROWS, ALL)
        self._all_to_all(role, column, target, stage, INPUTS[direction].index(role))
        return target

    def leave(self, role: Role, column: np.ndarray, stage: int, round: int) -> None:
        """Bring the accumulated result home, in the caller's dtype."""
        result = self.buffers.add(role, Space.OUTPUT, 0, self.ranks, NO_ROWS, ALL)
        if self.resharded:
            self._all_to_all(role, column, result, stage, round)
        else:
            self.code.emit(Op.COPY, self.ranks, stage, FOLD, place=round, role=role, buf=(column, result))

    def _all_to_all(self, role: Role, source: np.ndarray, target: np.ndarray, stage: int, round: int) -> None:
        scratch = self.buffers.add(Role.NONE, Space.ARENA, 0, self.ranks, NO_ROWS, ALL)
        self.code.emit(Op.ALL_TO_ALL, self.ranks, stage, FOLD, place=round, role=role, round=round,
                       buf=(source, target, scratch))  # fmt: skip


class _Places:
    """Buffers of each role in every place (see `Trays.find`): the ranks' homes and the trays that have the role."""

    def __init__(self, buffers: _Buffers, trays: Trays, homes: dict[Role, np.ndarray], direction: str) -> None:
        self.trays, self.num_ranks = trays, trays.num_ranks
        self.buffers = np.full((len(trays.stage), trays.num_ranks + len(trays.rank)), NONE)
        for role, home in homes.items():
            self.buffers[role, : self.num_ranks] = home
        roles = SIDES[direction][SIDES[direction] != NONE]
        of_role, tray = np.nonzero(trays.stage[roles] != NEVER)
        role = roles[of_role]
        self.buffers[role, self.num_ranks + tray] = self.add(buffers, role, IS_RESULT[role], tray)

    def add(self, buffers: _Buffers, role: Role | np.ndarray, acc: int | np.ndarray, tray: np.ndarray) -> np.ndarray:
        """Append a buffer for each of these trays."""
        rows = self.trays.rows[tray].T
        return buffers.add(role, Space.ARENA, acc, self.trays.rank[tray], rows, self.trays.run[tray])

    def buffer(self, role: Role | np.ndarray, place: np.ndarray) -> np.ndarray:
        """Buffer of a role in each place."""
        found = self.buffers[role, place]
        assert found.min(initial=0) >= 0, "a rank uses a role of a shard that nobody sends to it"
        return found


def _exchange(buffers: _Buffers, code: _Code, places: _Places, laid: Laid, first_round: int) -> None:
    """Send rows from where they are (home, or a tray of a rank that got them before) to where they are needed.

    What leaves home without all of its heads is copied, and sent from there. Messages are joined to their rounds at
    both ends; equal pairs keep one order at both.
    """
    m, c = laid.messages, laid.copies
    packed = buffers.add(c.role, Space.ARENA, 0, c.rank, (c.first, c.stop), c.run)
    code.emit(Op.COPY, c.rank, c.stage, PACK, role=c.role, buf=(places.buffer(c.role, c.rank), packed),
              rows=(c.first, c.stop), run=c.run)  # fmt: skip
    source, target = places.buffer(m.role, m.source), places.buffer(m.role, m.target)
    copied = m.copy != NONE
    source[copied] = packed[m.copy[copied]]
    for role in OUTPUTS[laid.direction]:
        _return(buffers, code, places, role, m, source, target)
    round_ = first_round + m.round
    for op, place, buffer, rank, peer, rows in (
        (Op.SEND, 0, source, m.src, m.dst, (m.first, m.stop)),
        (Op.RECV, 1, target, m.dst, m.src, (m.to_first, m.to_stop)),
    ):
        code.emit(op, rank, m.stage, COMMUNICATE, place=round_ * 3 + place, role=m.role, peer=peer, round=round_,
                  buf=(buffer,), rows=rows, run=m.run)  # fmt: skip


def _return(
    buffers: _Buffers, code: _Code, places: _Places, role: Role, m: Messages, source: np.ndarray, target: np.ndarray
) -> None:
    """Let partial results go home narrowed to the wire's dtype, a tray at a time, and fold them in where they arrive.

    A rank on the way folds them into its own partial result, which leaves it later; it may have no other reason to
    have one. source, target: buffers of all messages; those of the role get others at both ends.
    """
    trays = places.trays
    full = np.flatnonzero(trays.stage[role] != NEVER)
    there = places.num_ranks + full
    packed = np.full(places.buffers.shape[1], NONE)
    packed[there] = places.add(buffers, role, 0, full)
    operands = places.buffers[role, there], packed[there]
    code.emit(Op.COPY, trays.rank[full], trays.stage[role, full], PACK, role=role, buf=operands,
              rows=trays.rows[full].T, run=trays.run[full])  # fmt: skip
    mine = m.of(role)
    rows, run = (m.to_first[mine], m.to_stop[mine]), m.run[mine]
    arrived = buffers.add(role, Space.ARENA, 0, m.dst[mine], rows, run)
    code.emit(Op.MERGE if role == Role.O else Op.SUM, m.dst[mine], m.until[mine], FOLD, place=m.round[mine], role=role,
              buf=(arrived, target[mine].copy()), rows=rows, run=run)  # fmt: skip
    source[mine], target[mine] = packed[m.source[mine]], arrived


def _launch(code: _Code, laid: Laid, first_round: int) -> None:
    """Start each round where its stage begins and wait for it where its last stage ends."""
    moves, rounds = laid.moves, laid.rounds
    if not len(moves):
        return
    stage_of, until = np.zeros((2, int(rounds.max()) + 1), np.int64)
    stage_of[rounds], until[rounds] = moves.stage, moves.until
    joined = np.zeros((laid.trays.num_ranks, len(stage_of)), bool)
    joined[moves.src, rounds] = joined[moves.dst, rounds] = True
    rank, which = np.nonzero(joined)
    round_ = first_round + which
    code.emit(Op.LAUNCH, rank, stage_of[which], COMMUNICATE, place=round_ * 3 + 2, round=round_)
    code.emit(Op.WAIT, rank, until[which], WAIT, place=round_, round=round_)


def _compute(code: _Code, places: _Places, laid: Laid) -> None:
    """Emit the kernels."""
    kernels, entries, direction = laid.kernels, laid.entries, laid.direction
    lead = kernels.lead
    operands = [
        places.buffer(role, (kernels.on_q if IS_OF_QUERIES[role] else kernels.on_kv)[lead])
        for role in INPUTS[direction] + OUTPUTS[direction]
    ]
    op = Op.ATTEND if direction == "forward" else Op.ATTEND_GRAD
    code.emit(op, entries.rank[lead], entries.stage[lead], COMPUTE, buf=operands,
              slices=(kernels.borders[:-1], kernels.borders[1:]), run=entries.run[lead])  # fmt: skip
