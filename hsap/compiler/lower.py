"""Lower: one column's schedule as instructions and buffers, forward and backward from one description.

A column is the InterSP ranks of equal intra index. Everything here is in column terms: rank = InterSP rank, peers
likewise; `expand` turns it into the streams of all inter × intra ranks. Within a stage a rank first packs what it
sends, starts the stage's rounds, computes, waits, and then folds what arrived:

    copy … | send recv launch … | attend … | wait … | merge, sum …

so that a stage's transfers run under its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.compiler.order import shard_of
from hsap.compiler.rounds import assign_rounds
from hsap.ir.block import Shards
from hsap.ir.program import NONE, OPERANDS, Op, Role, Space
from hsap.ir.schedule import INPUTS, OUTPUTS, Schedule, Transfers
from hsap.ir.sort import order_of
from hsap.loops import loop

PACK, COMMUNICATE, COMPUTE, WAIT, FOLD = range(5)
"""Phases of a stage, in order."""

ALL = -1
"""Head group of a buffer or an instruction that covers the column's whole share."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A column's buffers and instructions before they are given to ranks and memory.

    buffers: int64 [len(HELD), n], rows as in `HELD`; shard NONE: all rows of the rank; group: ALL or a head group.
    code: int32 [len(CODE) + 5, n], rows as in `CODE` and then those of the operands, sorted by rank and then in order.
    """

    buffers: np.ndarray
    code: np.ndarray


class _Buffers:
    """Grows the buffer table and finds the buffer that holds a rank's (role, shard, group)."""

    def __init__(self, num_ranks: int, num_shards: int, num_groups: int) -> None:
        self.sizes = (num_ranks, num_shards, num_groups)
        self.columns: list[np.ndarray] = []
        self.count = 0
        self.lookup: dict[Role, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def add(self, role, space, acc, rank, shard, group) -> np.ndarray:
        """Append buffers (arguments broadcast against `rank`); returns their indices."""
        columns = np.empty((len(HELD), len(rank)), np.int64)
        for row, value in zip(columns, (role, space, acc, rank, shard, group)):
            row[:] = value
        self.columns.append(columns)
        first, self.count = self.count, self.count + len(rank)
        return np.arange(first, self.count)

    def index(self, role: Role, home, away, shard, group, rank: np.ndarray) -> None:
        """Remember where a role lives: `home[rank]` for the rank's own shards, `away` for what else it has."""
        key = self._key(rank, shard, group)
        by_key = order_of(key)
        key = key[by_key]
        assert (key[1:] != key[:-1]).all(), f"a rank gets the same {role.name} twice"
        self.lookup[role] = (home, key, away[by_key])

    def find(self, role: Role, shards: Shards, rank, shard, group) -> np.ndarray:
        """Buffer that holds (role, shard, group) on `rank`: its home buffer or the one it was sent to."""
        home, keys, away = self.lookup[role]
        found = home[rank]
        _find(self._key(rank, shard, group), shards.home[shard] == rank, keys, away, found)
        assert found.min(initial=0) >= 0, f"a rank reads {role.name} that nobody sends to it"
        return found

    def _key(self, rank, shard, group) -> np.ndarray:
        _, num_shards, num_groups = self.sizes
        return (rank * num_shards + shard) * num_groups + group

    def table(self) -> np.ndarray:
        return np.concatenate(self.columns, axis=1)


@loop
def _find(wanted, at_home, keys, away, found):
    """Where a row isn't at home, set the entry of `away` whose key (rising) is wanted, NONE without one."""
    for i in range(len(wanted)):
        if not at_home[i]:
            place, stop = 0, len(keys)
            while place < stop:
                middle = (place + stop) // 2
                if keys[middle] < wanted[i]:
                    place = middle + 1
                else:
                    stop = middle
            found[i] = away[place] if place < len(keys) and keys[place] == wanted[i] else NONE


class _Code:
    """Collects instructions with their place on the time axis, and sorts them into streams."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, dict[int, np.ndarray | int]]] = []

    def emit(self, op: Op, rank, stage, phase, *, place=0, buf=(), **more) -> None:
        """Append instructions (arguments broadcast against `rank`); `place` orders them within a phase.

        more: other columns of `CODE`, NONE (and ALL for the group) where they aren't given.
        """
        given = {"op": op, "rank": rank, "stage": stage, "phase": phase, "place": place} | more
        values = {CODE.index(name): value for name, value in given.items()}
        self.parts.append((len(rank), values | dict(enumerate(buf, len(CODE)))))

    def streams(self) -> np.ndarray:
        """Give the columns of all instructions, rank by rank in the order of execution."""
        code = np.full((len(CODE) + NUM_OPERANDS, sum(count for count, _ in self.parts)), NONE, np.int32)
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


NUM_OPERANDS = max(len(operands) for operands in OPERANDS.values())
HELD = ("role", "space", "acc", "rank", "shard", "group")
CODE = ("op", "rank", "stage", "phase", "place", "role", "peer", "round", "shard", "block", "group")
assert ALL == NONE, "columns that aren't given are filled with one number"


def lower(
    shards: Shards,
    schedule: Schedule,
    transfers: tuple[Transfers, Transfers],
    direction: str,
    num_ranks: int,
    num_groups: int,
    resharded: bool,
) -> Draft:
    """Lower one mask and direction of a strategy.

    transfers: inputs and results that travel, as `order` gives them. resharded: whether AllToAll stands between the
    ranks' tensors and the column's (intra_sp > 1).
    """
    arriving, leaving = transfers
    moved = Transfers.join(arriving, leaving)
    first_stage = int(moved.stage.min(initial=0)) - 1
    last_stage = int(np.maximum(schedule.stage.max(initial=0), moved.stage.max(initial=0))) + 1
    first_round = len(INPUTS[direction])
    rounds = assign_rounds(moved.stage, moved.src, moved.dst, num_ranks, first_round)
    buffers = _Buffers(num_ranks, len(shards), num_groups)
    code = _Code()
    ends = _Ends(buffers, code, np.arange(num_ranks), resharded)
    homes = {role: ends.enter(role, direction, first_stage) for role in INPUTS[direction]}
    homes |= {role: buffers.add(role, Space.ARENA, 1, np.arange(num_ranks), NONE, ALL) for role in OUTPUTS[direction]}
    _receive(shards, buffers, code, arriving, rounds[: len(arriving)], homes, direction, num_groups)
    _return(shards, buffers, code, leaving, rounds[len(arriving) :], homes, direction)
    _compute(shards, buffers, code, schedule, direction)
    _launch(code, moved, rounds, num_ranks)
    for i, role in enumerate(OUTPUTS[direction]):
        ends.leave(role, homes[role], last_stage, int(rounds.max(initial=first_round - 1)) + 1 + i)
    return Draft(buffers.table(), code.streams())


class _Ends:
    """The two ends of a stream: the ranks' own tensors become the column's, and the column's become results."""

    def __init__(self, buffers: _Buffers, code: _Code, ranks: np.ndarray, resharded: bool) -> None:
        self.buffers, self.code, self.ranks, self.resharded = buffers, code, ranks, resharded

    def enter(self, role: Role, direction: str, stage: int) -> np.ndarray:
        """Give the column's home buffer of an input role on each rank."""
        ranks = self.ranks
        column = self.buffers.add(role, Space.INPUT, 0, ranks, NONE, ALL)
        if not self.resharded or (direction == "backward" and role in (Role.Q, Role.KV)):
            return column
        space = Space.KEPT if direction == "forward" else Space.ARENA
        target = self.buffers.add(role, space, 0, ranks, NONE, ALL)
        self._all_to_all(role, column, target, stage, INPUTS[direction].index(role))
        return target

    def leave(self, role: Role, column: np.ndarray, stage: int, round: int) -> None:
        """Bring the accumulated result home, in the caller's dtype."""
        result = self.buffers.add(role, Space.OUTPUT, 0, self.ranks, NONE, ALL)
        if self.resharded:
            self._all_to_all(role, column, result, stage, round)
        else:
            self.code.emit(Op.COPY, self.ranks, stage, FOLD, place=round, role=role, buf=(column, result))

    def _all_to_all(self, role: Role, source, target, stage: int, round: int) -> None:
        scratch = self.buffers.add(Role.NONE, Space.ARENA, 0, self.ranks, NONE, ALL)
        self.code.emit(Op.ALL_TO_ALL, self.ranks, stage, FOLD, place=round, role=role, round=round,
                       buf=(source, target, scratch))  # fmt: skip


def _receive(shards, buffers, code, table: Transfers, rounds, homes, direction, num_groups) -> None:
    """Send input rows from where they are (home, or a rank that got them before) and receive them."""
    group = table.group if num_groups > 1 else np.full(len(table), ALL)
    there = buffers.add(table.role, Space.ARENA, 0, table.dst, table.shard, group)
    for role in INPUTS[direction]:
        mine = np.flatnonzero(table.role == role)
        buffers.index(role, homes[role], there[mine], table.shard[mine], table.group[mine], table.dst[mine])
    source = np.zeros(len(table), np.int64)
    for role in INPUTS[direction]:
        mine = np.flatnonzero(table.role == role)
        source[mine] = buffers.find(role, shards, table.src[mine], table.shard[mine], table.group[mine])
    # A home buffer has all heads of its rows side by side: sending some of them needs a packed copy first.
    packed = np.flatnonzero((shards.home[table.shard] == table.src) & (num_groups > 1))
    if len(packed):
        copy = buffers.add(table.role[packed], Space.ARENA, 0, table.src[packed], table.shard[packed], group[packed])
        code.emit(Op.COPY, table.src[packed], table.stage[packed], PACK, role=table.role[packed],
                  buf=(source[packed], copy), shard=table.shard[packed], group=group[packed])  # fmt: skip
        source[packed] = copy
    _exchange(code, table, rounds, source, there, group)


def _return(shards, buffers, code, table: Transfers, rounds, homes, direction) -> None:
    """Send partial results home, narrowed to the wire's dtype, and fold them in there.

    A rank on the way folds them into its own partial result, which leaves it later; it may have no other reason to
    have one.
    """
    for role in OUTPUTS[direction]:
        mine = np.flatnonzero(table.role == role)
        part = table.take(mine)
        shard, src, dst, stage = part.shard, part.src, part.dst, part.stage
        group = part.group if buffers.sizes[2] > 1 else np.full(len(part), ALL)
        partial = buffers.add(role, Space.ARENA, 1, src, shard, group)
        packed = buffers.add(role, Space.ARENA, 0, src, shard, group)
        arrived = buffers.add(role, Space.ARENA, 0, dst, shard, group)
        buffers.index(role, homes[role], partial, shard, part.group, src)
        target = buffers.find(role, shards, dst, shard, part.group)
        code.emit(Op.COPY, src, stage, PACK, role=role, buf=(partial, packed), shard=shard, group=group)
        _exchange(code, part, rounds[mine], packed, arrived, group)
        fold = Op.MERGE if role == Role.O else Op.SUM
        code.emit(fold, dst, stage, FOLD, place=rounds[mine], role=role, buf=(arrived, target), shard=shard,
                  group=group)  # fmt: skip


def _exchange(code, table: Transfers, rounds, source, target, group) -> None:
    """Join transfers to their rounds at both ends; equal pairs keep one order at both."""
    sends, receives = rounds * 3, rounds * 3 + 1
    code.emit(Op.SEND, table.src, table.stage, COMMUNICATE, place=sends, role=table.role, peer=table.dst, round=rounds,
              buf=(source,), shard=table.shard, group=group)  # fmt: skip
    code.emit(Op.RECV, table.dst, table.stage, COMMUNICATE, place=receives, role=table.role, peer=table.src,
              round=rounds, buf=(target,), shard=table.shard, group=group)  # fmt: skip


def _launch(code, table: Transfers, rounds, num_ranks: int) -> None:
    """Start each round where its stage begins and wait for it where the stage ends."""
    if not len(table):
        return
    stage_of = np.zeros(int(rounds.max()) + 1, np.int64)
    stage_of[rounds] = table.stage
    joined = np.zeros((num_ranks, len(stage_of)), bool)
    joined[table.src, rounds] = joined[table.dst, rounds] = True
    rank, round_ = np.nonzero(joined)
    code.emit(Op.LAUNCH, rank, stage_of[round_], COMMUNICATE, place=round_ * 3 + 2, round=round_)
    code.emit(Op.WAIT, rank, stage_of[round_], WAIT, place=round_, round=round_)


def _compute(shards, buffers, code, schedule: Schedule, direction) -> None:
    """One fused kernel call per block and head group."""
    roles = INPUTS[direction] + OUTPUTS[direction]
    operands = [buffers.find(role, shards, schedule.rank, shard_of(schedule, role), schedule.group) for role in roles]
    op = Op.ATTEND if direction == "forward" else Op.ATTEND_GRAD
    group = schedule.group if buffers.sizes[2] > 1 else np.full(len(schedule.group), ALL)
    code.emit(op, schedule.rank, schedule.stage, COMPUTE, buf=operands, block=schedule.block, group=group)
