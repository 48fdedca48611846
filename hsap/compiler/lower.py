"""Lower: one column's schedule as instructions and buffers, forward and backward from one description.

A column is the InterSP ranks of equal intra index. Everything here is in column terms: rank = InterSP rank, peers
likewise; `expand` turns it into the streams of all inter × intra ranks. Within a stage a rank first packs what it
sends, starts the stage's rounds, computes, waits, and then folds what arrived:

    copy … | send recv launch … | attend … | wait … | merge, sum …

so that a stage's transfers run under its blocks. Blocks are fused: all those of a rank, stage and head group that read
the same buffers are one kernel, be they home buffers or trays (`hsap.compiler.trays`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.compiler.messages import messages
from hsap.compiler.order import is_of_queries, shard_of
from hsap.compiler.rounds import assign_rounds
from hsap.compiler.trays import NEVER, SpanTable, Trays, lay_out
from hsap.ir.block import Shards
from hsap.ir.program import NONE, OPERANDS, Op, Role, Space
from hsap.ir.schedule import INPUTS, OUTPUTS, Schedule, Transfers
from hsap.ir.slice import K0, Q0
from hsap.ir.sort import distinct, order_of
from hsap.ir.span import ranges
from hsap.loops import loop

PACK, COMMUNICATE, COMPUTE, WAIT, FOLD = range(5)
"""Phases of a stage, in order."""

ALL = -1
"""Head group of a buffer or an instruction that covers the column's whole share."""

MAX_OPERANDS = max(len(operands) for operands in OPERANDS.values())
HELD = ("role", "space", "acc", "rank", "first", "stop", "group")
CODE = ("op", "rank", "stage", "phase", "place", "role", "peer", "round", "first", "stop", "slice", "last", "group")
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
        values = {CODE.index(name): value for name, value in given.items()}
        self.parts.append((len(rank), values | dict(enumerate(buf, len(CODE)))))

    def streams(self) -> np.ndarray:
        """Give the columns of all instructions, rank by rank in the order of execution."""
        code = np.full((len(CODE) + MAX_OPERANDS, sum(count for count, _ in self.parts)), NONE, np.int32)
        stop = 0
        for count, values in self.parts:
            start, stop = stop, stop + count
            for row, value in values.items():
                code[row, start:stop] = value
        rank, stage, phase, place = (
            code[CODE.index(name)].astype(np.int64) for name in ("rank", "stage", "phase", "place")
        )
        first = stage.min()
        key = rank * (int(stage.max() - first) + 1) + (stage - first)
        key = (key * (FOLD + 1) + phase) * (int(place.max()) + 1) + place
        return code.take(order_of(key), axis=1)


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
    arriving, leaving = transfers
    moved = Transfers.join(arriving, leaving)
    first_stage = int(moved.stage.min(initial=0)) - 1
    last_stage = int(np.maximum(schedule.stage.max(initial=0), moved.until.max(initial=0))) + 1
    first_round = len(INPUTS[direction])
    _, when = distinct((moved.stage - first_stage) * (last_stage - first_stage + 1) + moved.until - first_stage)
    rounds = assign_rounds(when, moved.src, moved.dst, num_ranks, first_round)
    buffers, code = _Buffers(), _Code()
    ends = _Ends(buffers, code, np.arange(num_ranks), resharded)
    homes = {role: ends.enter(role, direction, first_stage) for role in INPUTS[direction]}
    homes |= {role: buffers.add(role, Space.ARENA, 1, ends.ranks, NO_ROWS, ALL) for role in OUTPUTS[direction]}
    coming = {role: np.flatnonzero(arriving.role == role) for role in INPUTS[direction]}
    going = {role: np.flatnonzero(leaving.role == role) for role in OUTPUTS[direction]}
    sides = {}
    for of_queries in (True, False):
        ins, outs = (
            {role: of.take(mine) for role, mine in part.items() if is_of_queries(role) == of_queries}
            for of, part in ((arriving, coming), (leaving, going))
        )
        trays, table = lay_out(table, num_ranks, num_groups, ins, outs)
        sides[of_queries] = _Side(buffers, table, trays, {role: homes[role] for role in ins | outs}, set(outs))
    for role, mine in coming.items():
        _receive(buffers, code, sides[is_of_queries(role)], role, arriving.take(mine), rounds[mine])
    for role, mine in going.items():
        _return(buffers, code, sides[is_of_queries(role)], role, leaving.take(mine), rounds[len(arriving) + mine])
    index = _compute(code, sides, schedule, direction)
    _launch(code, moved, rounds, num_ranks)
    for i, role in enumerate(OUTPUTS[direction]):
        ends.leave(role, homes[role], last_stage, int(rounds.max(initial=first_round - 1)) + 1 + i)
    return Draft(buffers.table(), code.streams(), index, table)


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


class _Side:
    """Buffers of the roles of one side: the rank's home buffer of each, and one for each tray that has the role."""

    def __init__(self, buffers: _Buffers, table: SpanTable, trays: Trays, homes: dict, results: set[Role]) -> None:
        self.shards, self.trays, self.homes = table.shards, trays, homes
        self.group = named_group(trays.group, trays.num_groups)
        self.on_trays: dict[Role, np.ndarray] = {}
        for role, stage in trays.stage.items():
            self.on_trays[role] = np.full(len(stage), NONE)
            there = np.flatnonzero(stage != NEVER)
            self.on_trays[role][there] = self.add(buffers, role, int(role in results), there)

    def add(self, buffers: _Buffers, role: Role, acc: int, trays: np.ndarray) -> np.ndarray:
        """Append a buffer for each of these trays."""
        rows = self.trays.rows[trays].T
        return buffers.add(role, Space.ARENA, acc, self.trays.rank[trays], rows, self.group[trays])

    def find(self, rank, shard, group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `Trays.find`."""
        return self.trays.find(self.shards, rank, shard, group)

    def buffer(self, role: Role, rank: np.ndarray, tray: np.ndarray) -> np.ndarray:
        """Buffer of a role on each tray, or in each rank's home where there is none."""
        found = self.homes[role][rank]
        away = tray != NONE
        found[away] = self.on_trays[role][tray[away]]
        assert found.min(initial=0) >= 0, f"a rank uses {role.name} that nobody sends to it"
        return found


def named_group(group: np.ndarray, num_groups: int) -> np.ndarray:
    """Head groups as buffers and instructions name them: ALL where there is just one."""
    return group if num_groups > 1 else np.full(len(group), ALL)


def _receive(buffers, code, side: _Side, role: Role, table: Transfers, rounds) -> None:
    """Send input rows from where they are (home, or a tray of a rank that got them before) and receive them."""
    tray, *rows = side.find(table.src, table.shard, table.group)
    source = side.buffer(role, table.src, tray)
    if side.trays.num_groups > 1:
        _pack(buffers, code, side.shards, role, table, source, np.flatnonzero(tray == NONE))
    tray, *to_rows = side.find(table.dst, table.shard, table.group)
    target, group = side.buffer(role, table.dst, tray), named_group(table.group, side.trays.num_groups)
    _exchange(code, role, messages(table, group, rounds, source, target, rows, to_rows))


def _pack(buffers, code, shards, role: Role, table: Transfers, source: np.ndarray, mine: np.ndarray) -> None:
    """Copy what leaves home in one head group, and let it be sent from there; `mine` are such transfers.

    A home buffer has all heads of its rows side by side. Shards that lie side by side there are copied together.
    """
    if not len(mine):
        return
    num_ranks, num_groups, width = int(table.src.max()) + 1, int(table.group.max()) + 1, len(shards) + 1
    when = table.stage[mine] - table.stage[mine].min()
    key = ((when * num_ranks + table.src[mine]) * num_groups + table.group[mine]) * width + table.shard[mine]
    keys, which = distinct(key)
    begins = np.append(True, keys[1:] != keys[:-1] + 1)
    lead = np.flatnonzero(begins)
    last = np.append(lead[1:], len(keys)) - 1
    there = np.empty(len(keys), np.int64)
    there[which] = mine
    rank, group, stage = (column[there[lead]] for column in (table.src, table.group, table.stage))
    rows = shards.offsets[keys[lead] % width], shards.offsets[keys[last] % width + 1]
    copy = buffers.add(role, Space.ARENA, 0, rank, rows, group)
    code.emit(Op.COPY, rank, stage, PACK, role=role, buf=(source[there[lead]], copy), rows=rows, group=group)
    source[mine] = copy[(np.cumsum(begins) - 1)[which]]


def _return(buffers, code, side: _Side, role: Role, table: Transfers, rounds) -> None:
    """Send partial results home, narrowed to the wire's dtype a tray at a time, and fold them in there.

    A rank on the way folds them into its own partial result, which leaves it later; it may have no other reason to
    have one.
    """
    trays = side.trays
    full = np.flatnonzero(trays.stage[role] != NEVER)
    packed = np.full(len(trays.rank), NONE)
    packed[full] = side.add(buffers, role, 0, full)
    ends = side.on_trays[role][full], packed[full]
    code.emit(Op.COPY, trays.rank[full], trays.stage[role][full], PACK, role=role, buf=ends, rows=trays.rows[full].T,
              group=side.group[full])  # fmt: skip
    tray, *rows = side.find(table.src, table.shard, table.group)
    to_tray, *to_rows = side.find(table.dst, table.shard, table.group)
    target, group = side.buffer(role, table.dst, to_tray), named_group(table.group, trays.num_groups)
    m = messages(table, group, rounds, packed[tray], target, rows, to_rows)
    there = m["to_first"], m["to_stop"]
    arrived = buffers.add(role, Space.ARENA, 0, m["dst"], there, m["group"])
    _exchange(code, role, m | {"target": arrived})
    code.emit(Op.MERGE if role == Role.O else Op.SUM, m["dst"], m["until"], FOLD, place=m["round"], role=role,
              buf=(arrived, m["target"]), rows=there, group=m["group"])  # fmt: skip


def _exchange(code, role: Role, m: dict[str, np.ndarray]) -> None:
    """Join messages to their rounds at both ends; equal pairs keep one order at both."""
    rounds, group = m["round"], m["group"]
    code.emit(Op.SEND, m["src"], m["stage"], COMMUNICATE, place=rounds * 3, role=role, peer=m["dst"], round=rounds,
              buf=(m["source"],), rows=(m["first"], m["stop"]), group=group)  # fmt: skip
    code.emit(Op.RECV, m["dst"], m["stage"], COMMUNICATE, place=rounds * 3 + 1, role=role, peer=m["src"], round=rounds,
              buf=(m["target"],), rows=(m["to_first"], m["to_stop"]), group=group)  # fmt: skip


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


def _compute(code, sides: dict[bool, _Side], schedule: Schedule, direction: str) -> np.ndarray:
    """Emit one fused kernel for all blocks of a rank, stage and head group that read the same two places.

    Returns the index of the slices that are attended, kernel by kernel.
    """
    blocks, rank, group = schedule.blocks, schedule.rank, schedule.group
    on = {q: side.find(rank, shard_of(schedule, Role.Q if q else Role.KV), group)[0] for q, side in sides.items()}
    num_groups = sides[True].trays.num_groups
    _, pair = distinct(on[True] * (len(sides[False].trays.rank) + 1) + on[False])
    key = (rank * (int(schedule.stage.max(initial=0)) + 1) + schedule.stage) * num_groups + group
    key = key * (int(pair.max(initial=0)) + 1) + pair
    in_order = order_of(key)
    key = key[in_order]
    begins = np.append(True, key[1:] != key[:-1])[: len(key)]
    lead = in_order[begins]
    block = schedule.block[in_order]
    entry, index = ranges(blocks.offsets[block], blocks.offsets[block + 1])
    of_block = np.cumsum(begins) - 1
    kernel = of_block[entry]
    borders = np.searchsorted(kernel, np.arange(len(lead) + 1))
    fused = np.flatnonzero((np.bincount(of_block) > 1)[kernel])
    if len(fused):
        index[fused] = _row_by_row(sides[True].shards, blocks.slices, kernel[fused], index[fused])
    operands = [
        sides[is_of_queries(role)].buffer(role, rank[lead], on[is_of_queries(role)][lead])
        for role in INPUTS[direction] + OUTPUTS[direction]
    ]
    op = Op.ATTEND if direction == "forward" else Op.ATTEND_GRAD
    code.emit(op, rank[lead], schedule.stage[lead], COMPUTE, buf=operands, slices=(borders[:-1], borders[1:]),
              group=named_group(group[lead], num_groups))  # fmt: skip
    return index.astype(np.int32)


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
