"""Lower: one column's schedule as instructions and buffers, forward and backward from one description.

A column is the InterSP ranks of equal intra index. Everything here is in column terms: rank = InterSP rank, peers
likewise; `expand` turns it into the streams of all inter × intra ranks. Within a stage a rank first packs what it
sends, starts the rounds that leave in it, computes, waits for the rounds that end in it, and then folds what arrived:

    copy … | send recv launch … | attend … | wait … | merge, sum …

so that transfers run under the blocks of the stages that they last (`Transfers.stage` … `until`). Blocks are fused: all
those of a rank, stage and head group that read the same buffers are one kernel, be they home buffers or trays
(`hsap.compiler.trays`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.compiler.messages import messages, packed
from hsap.compiler.order import IS_OF_QUERIES
from hsap.compiler.travel import Travel
from hsap.compiler.trays import IS_RESULT, NEVER, SIDES, SpanTable, Trays
from hsap.ir.block import Shards
from hsap.ir.program import NONE, OPERANDS, Op, Role, Space
from hsap.ir.schedule import INPUTS, OUTPUTS, Schedule, Transfers
from hsap.ir.slice import K0, Q0
from hsap.ir.sort import distinct, order_of
from hsap.loops import loop

PACK, COMMUNICATE, COMPUTE, WAIT, FOLD = range(5)
"""Phases of a stage, in order."""

ALL = -1
"""Head group of a buffer or an instruction that covers the column's whole share."""

MAX_OPERANDS = max(len(operands) for operands in OPERANDS.values())
HELD = ("role", "space", "acc", "rank", "first", "stop", "group")
CODE = ("op", "rank", "stage", "phase", "place", "role", "peer", "round", "first", "stop", "slice", "last", "group")
_ROW = {name: row for row, name in enumerate(CODE)}
_RANK, _STAGE, _PHASE, _PLACE = (_ROW[name] for name in ("rank", "stage", "phase", "place"))
assert ALL == NONE, "columns that aren't given are filled with one number"


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A column's buffers and instructions before they are given to ranks and memory.

    buffers: int64 [len(HELD), n], rows as in `HELD`; first and stop are a range of the span table, NONE for all rows of
    the rank; group: ALL or a head group. code: int32 [len(CODE) + 5, n], rows as in `CODE` and then those of the
    operands, sorted by rank and then in order; slice and last: range of `index` that is attended. index: int32 [n] of
    slice indices, as in `Programs`. table: the span table with the rows of this draft's trays.
    """

    buffers: np.ndarray
    code: np.ndarray
    index: np.ndarray
    table: SpanTable


class _Buffers:
    """Grows the buffer table."""

    def __init__(self) -> None:
        self.columns: list[np.ndarray] = []
        self.count = 0

    def add(self, role, space, acc, rank, rows, group) -> np.ndarray:
        """Append buffers (arguments broadcast against `rank`); rows: first and stop. Returns their indices."""
        columns = np.empty((len(HELD), len(rank)), np.int64)
        for row, value in zip(columns, (role, space, acc, rank, *rows, group)):
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

    def emit(self, op: Op, rank, stage, phase, *, place=0, buf=(), rows=(), slices=(), **more) -> None:
        """Append instructions (arguments broadcast against `rank`); `place` orders them within a phase.

        rows, slices: first and stop. more: other columns of `CODE`, NONE (ALL for the group) where they aren't given.
        """
        given = {"op": op, "rank": rank, "stage": stage, "phase": phase, "place": place} | more
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
def _times(code):
    """Number of each instruction that rises with its rank, then with its place on the time axis: int64 [n]."""
    first, stages, places = code[_STAGE].min(), code[_STAGE].max() - code[_STAGE].min() + 1, code[_PLACE].max() + 1
    times = np.empty(code.shape[1], np.int64)
    for i in range(len(times)):
        stage = np.int64(code[_RANK, i]) * stages + code[_STAGE, i] - first
        times[i] = (stage * (FOLD + 1) + code[_PHASE, i]) * places + code[_PLACE, i]
    return times


NO_ROWS = (NONE, NONE)


def lower(
    table: SpanTable,
    schedule: Schedule,
    transfers: tuple[Transfers, Transfers],
    direction: str,
    num_ranks: int,
    num_groups: int,
    resharded: bool,
) -> Draft:
    """Lower one mask and direction of a strategy.

    table: the span table, to which trays add their rows. transfers: inputs and results that travel, as `order` gives
    them. resharded: whether AllToAll stands between the ranks' tensors and the column's (intra_sp > 1).
    """
    first_round = len(INPUTS[direction])
    travel = Travel.of(table, transfers, direction, num_ranks, num_groups, first_round)
    moved, rounds = travel.moved, travel.rounds
    first_stage = int(moved.stage.min(initial=0)) - 1
    last_stage = max(int(schedule.stage.max(initial=0)), int(moved.until.max(initial=0))) + 1
    buffers, code = _Buffers(), _Code()
    ends = _Ends(buffers, code, np.arange(num_ranks), resharded)
    homes = {role: ends.enter(role, direction, first_stage) for role in INPUTS[direction]}
    homes |= {role: buffers.add(role, Space.ARENA, 1, ends.ranks, NO_ROWS, ALL) for role in OUTPUTS[direction]}
    places = _Places(buffers, travel.table.shards, travel.trays, homes, direction)
    _exchange(buffers, code, places, travel, direction)
    index = _compute(code, places, schedule, direction)
    _launch(code, moved, rounds, num_ranks)
    for i, role in enumerate(OUTPUTS[direction]):
        ends.leave(role, homes[role], last_stage, int(rounds.max(initial=first_round - 1)) + 1 + i)
    return Draft(buffers.table(), code.streams(), index, travel.table)


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

    def _all_to_all(self, role: Role, source, target, stage: int, round: int) -> None:
        scratch = self.buffers.add(Role.NONE, Space.ARENA, 0, self.ranks, NO_ROWS, ALL)
        self.code.emit(Op.ALL_TO_ALL, self.ranks, stage, FOLD, place=round, role=role, round=round,
                       buf=(source, target, scratch))  # fmt: skip


class _Places:
    """Buffers of each role in every place (see `Trays.find`): the ranks' homes and the trays that have the role."""

    def __init__(self, buffers: _Buffers, shards: Shards, trays: Trays, homes: dict, direction: str) -> None:
        self.shards, self.trays, self.num_ranks = shards, trays, trays.num_ranks
        self.group = named_group(trays.group, trays.num_groups)
        self.buffers = np.full((len(trays.stage), trays.num_ranks + len(trays.rank)), NONE)
        for role, home in homes.items():
            self.buffers[role, : self.num_ranks] = home
        roles = SIDES[direction][SIDES[direction] != NONE]
        of_role, tray = np.nonzero(trays.stage[roles] != NEVER)
        role = roles[of_role]
        self.buffers[role, self.num_ranks + tray] = self.add(buffers, role, IS_RESULT[role], tray)

    def add(self, buffers: _Buffers, role, acc, tray: np.ndarray) -> np.ndarray:
        """Append a buffer for each of these trays."""
        rows = self.trays.rows[tray].T
        return buffers.add(role, Space.ARENA, acc, self.trays.rank[tray], rows, self.group[tray])

    def buffer(self, role, place: np.ndarray) -> np.ndarray:
        """Buffer of a role in each place."""
        found = self.buffers[role, place]
        assert found.min(initial=0) >= 0, "a rank uses a role of a shard that nobody sends to it"
        return found


def named_group(group: np.ndarray, num_groups: int) -> np.ndarray:
    """Head groups as buffers and instructions name them: ALL where there is just one."""
    return group if num_groups > 1 else np.full(len(group), ALL)


def _exchange(buffers, code, places: _Places, travel: Travel, direction: str) -> None:
    """Send rows from where they are (home, or a tray of a rank that got them before) to where they are needed.

    Messages are joined to their rounds at both ends; equal pairs keep one order at both.
    """
    moved, num_groups = travel.moved, places.trays.num_groups
    source, target = places.buffer(moved.role, travel.here), places.buffer(moved.role, travel.there)
    if num_groups > 1:
        _pack(buffers, code, places.shards, moved, source, np.flatnonzero(travel.here < places.num_ranks))
    group = named_group(moved.group, num_groups)
    m = messages(moved, group, travel.rounds, source, target, travel.rows, travel.to_rows)
    for role in OUTPUTS[direction]:
        _return(buffers, code, places, role, m)
    for op, place, (at, rank, peer, first, stop) in (
        (Op.SEND, 0, ("source", "src", "dst", "first", "stop")),
        (Op.RECV, 1, ("target", "dst", "src", "to_first", "to_stop")),
    ):
        code.emit(op, m[rank], m["stage"], COMMUNICATE, place=m["round"] * 3 + place, role=m["role"], peer=m[peer],
                  round=m["round"], buf=(m[at],), rows=(m[first], m[stop]), group=m["group"])  # fmt: skip


def _pack(buffers, code, shards, moved: Transfers, source: np.ndarray, mine: np.ndarray) -> None:
    """Copy what leaves home in one head group, and let it be sent from there; `mine` are such transfers.

    A home buffer has all heads of its rows side by side. Shards that lie side by side there are copied together.
    """
    if not len(mine):
        return
    lead, which, rows = packed(shards, moved, mine)
    role, rank, group, stage = (column[lead] for column in (moved.role, moved.src, moved.group, moved.stage))
    copy = buffers.add(role, Space.ARENA, 0, rank, rows, group)
    code.emit(Op.COPY, rank, stage, PACK, role=role, buf=(source[lead], copy), rows=rows, group=group)
    source[mine] = copy[which]


def _return(buffers, code, places: _Places, role: Role, m: dict[str, np.ndarray]) -> None:
    """Let partial results go home narrowed to the wire's dtype, a tray at a time, and fold them in where they arrive.

    A rank on the way folds them into its own partial result, which leaves it later; it may have no other reason to
    have one. m: all messages; those of the role get other buffers at both ends.
    """
    trays = places.trays
    full = np.flatnonzero(trays.stage[role] != NEVER)
    partial = places.buffers[role, places.num_ranks + full]
    packed = places.add(buffers, role, 0, full)
    code.emit(Op.COPY, trays.rank[full], trays.stage[role, full], PACK, role=role, buf=(partial, packed),
              rows=trays.rows[full].T, group=places.group[full])  # fmt: skip
    mine = slice(*np.searchsorted(m["role"], (role, role + 1)))
    dst, until, rounds, to_first, to_stop, group = (
        m[name][mine] for name in ("dst", "until", "round", "to_first", "to_stop", "group")
    )
    arrived = buffers.add(role, Space.ARENA, 0, dst, (to_first, to_stop), group)
    code.emit(Op.MERGE if role == Role.O else Op.SUM, dst, until, FOLD, place=rounds, role=role,
              buf=(arrived, m["target"][mine].copy()), rows=(to_first, to_stop), group=group)  # fmt: skip
    m["source"][mine] = packed[m["source"][mine] - partial[:1]]  # a role's buffers are numbered as its trays are
    m["target"][mine] = arrived


def _launch(code, table: Transfers, rounds, num_ranks: int) -> None:
    """Start each round where its stage begins and wait for it where its last stage ends."""
    if not len(table):
        return
    stage_of, until = np.zeros((2, int(rounds.max()) + 1), np.int64)
    stage_of[rounds], until[rounds] = table.stage, table.until
    joined = np.zeros((num_ranks, len(stage_of)), bool)
    joined[table.src, rounds] = joined[table.dst, rounds] = True
    rank, round_ = np.nonzero(joined)
    code.emit(Op.LAUNCH, rank, stage_of[round_], COMMUNICATE, place=round_ * 3 + 2, round=round_)
    code.emit(Op.WAIT, rank, until[round_], WAIT, place=round_, round=round_)


def _compute(code, places: _Places, schedule: Schedule, direction: str) -> np.ndarray:
    """Emit one fused kernel for all blocks of a rank, stage and head group that read the same two places.

    Returns the index of the slices that are attended, kernel by kernel.
    """
    q, kv, lead, borders, index = kernels(places.shards, schedule, places.trays)
    operands = [
        places.buffer(role, (q if IS_OF_QUERIES[role] else kv)[lead]) for role in INPUTS[direction] + OUTPUTS[direction]
    ]
    op = Op.ATTEND if direction == "forward" else Op.ATTEND_GRAD
    code.emit(op, schedule.rank[lead], schedule.stage[lead], COMPUTE, buf=operands,
              slices=(borders[:-1], borders[1:]), group=named_group(schedule.group[lead], places.trays.num_groups)
    )  # fmt: skip
    return index.astype(np.int32)


def kernels(shards: Shards, schedule: Schedule, trays: Trays) -> tuple[np.ndarray, ...]:
    """Fuse the entries of a rank, stage and head group that read the same two places.

    Returns (place of each entry's queries and of its keys, see `Trays.find`; an entry of each kernel; borders of what
    each attends, int64 [num_kernels + 1]; and that: indices of slices, int64 [n]).
    """
    blocks, rank, group = schedule.blocks, schedule.rank, schedule.group
    q, kv = (
        trays.find(shards, np.full(len(rank), role), rank, schedule.shard_of(role), group)[0]
        for role in (Role.Q, Role.KV)
    )
    num_stages, num_groups = int(schedule.stage.max(initial=0)) + 1, trays.num_groups
    num_places = trays.num_ranks + len(trays.rank)
    pair, num_pairs = q * num_places + kv, num_places * num_places
    if num_pairs >= (1 << 62) // (trays.num_ranks * num_stages * num_groups):
        pair, num_pairs = distinct(pair)[1], len(pair)
    key = ((rank * num_stages + schedule.stage) * num_groups + group) * num_pairs + pair
    in_order = order_of(key)
    lead, borders, index, kernel = _fuse(key, in_order, schedule.block, blocks.offsets)
    fused = np.flatnonzero(kernel != NONE)
    if len(fused):
        index[fused] = _row_by_row(shards, blocks.slices, kernel[fused], index[fused])
    return q, kv, lead, borders, index


@loop
def _fuse(key, in_order, block, offsets):
    """Make one kernel of entries with one key: first entry of each; borders of what each attends; and that.

    That are slices, int64 [n], and for those of a kernel of several blocks its number, NONE else.
    """
    total, count = 0, 0
    lead, starts = np.empty(len(key), np.int64), np.empty(len(key) + 1, np.int64)
    for at in range(len(key)):
        i = in_order[at]
        if at == 0 or key[i] != key[in_order[at - 1]]:
            lead[count], starts[count] = i, at
            count += 1
        total += offsets[block[i] + 1] - offsets[block[i]]
    starts[count] = len(key)
    borders, index, kernel = np.zeros(count + 1, np.int64), np.empty(total, np.int64), np.full(total, NONE)
    stop = 0
    for k in range(count):
        for at in range(starts[k], starts[k + 1]):
            for piece in range(offsets[block[in_order[at]]], offsets[block[in_order[at]] + 1]):
                index[stop] = piece
                if starts[k + 1] - starts[k] > 1:
                    kernel[stop] = k
                stop += 1
        borders[k + 1] = stop
    return lead[:count], borders, index, kernel


def _row_by_row(shards: Shards, slices: np.ndarray, kernel: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Order what each kernel attends by the span of its queries, then by its keys; kernels stay where they are.

    Slices that are parts of one then follow each other, so that `hsap.ir.slice.joined` finds them. A block's are so.
    """
    first_key = slices[index, K0]
    key = kernel * len(shards.spans) + _strips(slices[index, Q0], np.sort(shards.spans[:, 0]))
    return index[order_of(key * (int(first_key.max()) + 1) + first_key)]


@loop
def _strips(rows, starts):
    """Which of the spans that begin at `starts` each row is in: int64 [n]. Often that of the row before."""
    strips = np.empty_like(rows)
    strip = 0
    for i in range(len(rows)):
        if rows[i] < starts[strip] or (strip + 1 < len(starts) and rows[i] >= starts[strip + 1]):
            strip, behind = 0, len(starts)
            while strip < behind:
                middle = (strip + behind) // 2
                if starts[middle] <= rows[i]:
                    strip = middle + 1
                else:
                    behind = middle
            strip -= 1
        strips[i] = strip
    return strips
