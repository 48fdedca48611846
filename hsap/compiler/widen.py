"""Widen: what neighbouring head groups do alike is done once, for all their heads.

A planner may place head groups apart, and yet some or all of them often stay together. One by one they would cost: a
kernel of few heads has few tiles and leaves most of a device idle, and messages of one group are small. So blocks that
a run of groups computes on one rank in one stage become one entry, and rows that it sends alike become one transfer.
Rows of a shard then lie on a rank in a buffer for each run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.compiler.order import IS_OF_QUERIES, IS_RESULT
from hsap.ir.block import Blocks, Shards
from hsap.ir.heads import HeadRun, HeadShape
from hsap.ir.program import Role
from hsap.ir.schedule import Schedule, Transfers
from hsap.ir.sort import distinct, order_of
from hsap.loops import loop

MOST_GROUPS = 62
"""Borders between head groups are bits of one number; more groups than that stay apart."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of neighbouring head groups, in rising order: (first group, number of groups) of each."""

    num_groups: int
    runs: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> np.ndarray:
        """Whether each run is all groups: bool [num_runs]."""
        return np.array([count == self.num_groups for _, count in self.runs], bool)

    @property
    def behind(self) -> np.ndarray:
        """How many runs begin no later than each of them: int64 [num_runs]."""
        first = [first for first, _ in self.runs]
        return np.searchsorted(first, first, side="right")

    def heads(self, heads: HeadShape, share: HeadRun) -> tuple[HeadRun, ...]:
        """Heads of each run, numbered within a column's share, and last those of the whole share."""
        groups, out = heads.groups(share, self.num_groups), []
        for first, count in self.runs:
            begin, end = groups[first], groups[first + count - 1]
            q, kv = end.q_first + end.q_count - begin.q_first, end.kv_first + end.kv_count - begin.kv_first
            out.append(HeadRun(begin.q_first, q, begin.kv_first, kv))
        return (*out, HeadRun(0, share.q_count, 0, share.kv_count))


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """A schedule's entries, one for each block and run of head groups; columns as in `Schedule`.

    run: int64 [num_entries], index into `Runs.runs`.
    """

    blocks: Blocks
    block: np.ndarray
    run: np.ndarray
    rank: np.ndarray
    stage: np.ndarray

    def shard_of(self, role: Role) -> np.ndarray:
        """Shard whose `role` each entry reads or writes: int64 [num_entries]."""
        return (self.blocks.q if IS_OF_QUERIES[role] else self.blocks.kv)[self.block]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """What travels, inputs before results, one row for each run of head groups; columns as in `Transfers`.

    run: int64 [num_moves], index into `Runs.runs`.
    """

    role: np.ndarray
    shard: np.ndarray
    run: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    stage: np.ndarray
    until: np.ndarray

    @classmethod
    def of(cls, table: Transfers, run: np.ndarray) -> Moves:
        """Let every transfer stand for a run of head groups."""
        return cls(table.role, table.shard, run, table.src, table.dst, table.stage, table.until)

    def __len__(self) -> int:
        return len(self.role)


@dataclass(frozen=True, slots=True, eq=False)
class Wide:
    """What is computed and what travels, in runs of head groups."""

    entries: Entries
    moves: Moves
    runs: Runs


def widen(
    shards: Shards, schedule: Schedule, transfers: tuple[Transfers, Transfers], num_ranks: int, num_groups: int
) -> Wide:
    """Join neighbouring head groups wherever they do the same.

    transfers: (inputs, results), as the passes before give them. Roles of one side (queries or keys) of a shard have
    the same runs on a rank, so that they can lie on one tray.
    """
    moved = Transfers.join(*transfers)
    if num_groups == 1 or not len(schedule.block):
        done = Entries(schedule.blocks, schedule.block, schedule.group, schedule.rank, schedule.stage)
        return Wide(done, Moves.of(moved, moved.group), Runs(num_groups, ((0, num_groups),)))
    if num_groups > MOST_GROUPS:
        done, sent = (np.ones(len(part.group), np.int64) for part in (schedule, moved))
        return _joined(schedule, moved, done, sent, num_groups)
    away = np.where(IS_RESULT[moved.role], moved.src, moved.dst)
    known, held = distinct(_keys(shards, moved.role, away, moved.shard, num_ranks))
    by_role = held * (max(Role) + 1) + moved.role
    in_order = order_of(by_role * num_groups + moved.group)
    borders = np.zeros(len(known), np.int64)
    _divide(by_role, moved.group, held, moved.src, moved.dst, moved.stage, moved.until, in_order, num_groups, borders)
    _spread(*_passed_on(shards, moved, known, held, num_ranks), borders)
    sent = _lengths(by_role, moved.group, borders[held], in_order)
    done = _lengths(*_entries(shards, schedule, known, borders, num_ranks, num_groups))
    return _joined(schedule, moved, done, sent, num_groups)


def _keys(shards: Shards, role: Role | np.ndarray, rank: np.ndarray, shard: np.ndarray, num_ranks: int) -> np.ndarray:
    """Number what lies in one place: rows of a shard on a rank, of queries or of keys whatever the role: int64 [n]."""
    return (IS_OF_QUERIES[role] * num_ranks + rank) * len(shards) + shard


@loop
def _divide(
    by_role: np.ndarray,
    group: np.ndarray,
    held: np.ndarray,
    src: np.ndarray,
    dst: np.ndarray,
    stage: np.ndarray,
    until: np.ndarray,
    in_order: np.ndarray,
    num_groups: int,
    borders: np.ndarray,
) -> None:
    """Set a bit in `borders` for every group that isn't sent with the one before it, in some role.

    by_role: what is sent, in which role. held: its place in `borders`. in_order: by both and then by group.
    """
    for at in range(len(in_order)):
        i, j = in_order[at], in_order[max(at - 1, 0)]
        follows = at > 0 and by_role[i] == by_role[j] and group[i] == group[j] + 1
        if follows and src[i] == src[j] and dst[i] == dst[j] and stage[i] == stage[j] and until[i] == until[j]:
            continue
        borders[held[i]] |= np.int64(1) << group[i]
        if at > 0 and not follows and group[j] + 1 < num_groups:
            borders[held[j]] |= np.int64(1) << (group[j] + 1)
    if len(in_order) and group[in_order[-1]] + 1 < num_groups:
        borders[held[in_order[-1]]] |= np.int64(1) << (group[in_order[-1]] + 1)


def _passed_on(
    shards: Shards, moved: Transfers, known: np.ndarray, held: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Transfers between two ranks that both hold the rows for others: (place of the one, of the other, is a result)."""
    result = IS_RESULT[moved.role]
    via = np.where(result, moved.dst, moved.src)
    which = np.flatnonzero(via != shards.home[moved.shard])
    keys = _keys(shards, moved.role[which], via[which], moved.shard[which], num_ranks)
    return held[which], np.searchsorted(known, keys), result[which]


@loop
def _spread(one: np.ndarray, other: np.ndarray, result: np.ndarray, borders: np.ndarray) -> None:
    """Let rows be passed on in the runs in which they came; parts of a result may also be folded into a longer run."""
    changed = True
    while changed:
        changed = False
        for i in range(len(one)):
            both = borders[one[i]] | borders[other[i]]
            if borders[one[i]] != both or (borders[other[i]] != both and not result[i]):
                borders[one[i]] = both
                if not result[i]:
                    borders[other[i]] = both
                changed = True


def _entries(
    shards: Shards, schedule: Schedule, known: np.ndarray, borders: np.ndarray, num_ranks: int, num_groups: int
) -> tuple[np.ndarray, ...]:
    """What `_lengths` wants of a schedule's entries: a block's groups on one rank in one stage may be a run."""
    between = np.zeros(len(schedule.block), np.int64)
    for role in (Role.Q, Role.KV) if len(known) else ():
        keys = _keys(shards, role, schedule.rank, schedule.shard_of(role), num_ranks)
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        between |= np.where(known[at] == keys, borders[at], 0)
    doing = schedule.block * num_ranks + schedule.rank
    doing = doing * (int(schedule.stage.max(initial=0)) + 1) + schedule.stage
    return doing, schedule.group, between, order_of(doing * num_groups + schedule.group)


@loop
def _lengths(kind: np.ndarray, group: np.ndarray, borders: np.ndarray, in_order: np.ndarray) -> np.ndarray:
    """How many groups of a kind are one run with each group that begins one, 0 for the others: int64 [n].

    borders: bits of the groups that begin one in any case. in_order: by kind and then by group.
    """
    lengths = np.zeros_like(group)
    lead = 0
    for at in range(len(in_order)):
        i, j = in_order[at], in_order[max(at - 1, 0)]
        follows = at > 0 and kind[i] == kind[j] and group[i] == group[j] + 1
        if not follows or borders[i] >> group[i] & 1:
            lead = i
        lengths[lead] += 1
    return lengths


def _joined(schedule: Schedule, moved: Transfers, done: np.ndarray, sent: np.ndarray, num_groups: int) -> Wide:
    """Keep what begins a run, for all of it. done, sent: of entries and transfers, as `_lengths` gives them."""
    first, leads = np.flatnonzero(done), np.flatnonzero(sent)
    codes = [
        table.group[at] * (num_groups + 1) + length[at]
        for table, length, at in ((schedule, done, first), (moved, sent, leads))
    ]
    found, run = distinct(np.concatenate(codes))
    of_entry, of_move = np.split(run, [len(first)])
    entries = Entries(schedule.blocks, schedule.block[first], of_entry, schedule.rank[first], schedule.stage[first])
    pairs = zip(*(part.tolist() for part in np.divmod(found, num_groups + 1)))
    return Wide(entries, Moves.of(moved.take(leads), of_move), Runs(num_groups, tuple(pairs)))
