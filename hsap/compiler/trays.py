"""Trays: what a rank has of other ranks' rows, laid out so that one kernel reads it all.

Shards of one side (queries or keys) that come to a rank in the same stages and whose partial results leave it in the
same stage lie on one tray: the tray has one buffer for each role, and its shards lie there in order of position, so
that neighbours in a document are neighbours in memory. A rank's own shards need no tray: they lie in its home buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from hsap.ir.block import Shards
from hsap.ir.program import NONE, Role
from hsap.ir.schedule import Transfers
from hsap.ir.sort import distinct, order_of
from hsap.ir.span import ranges

NEVER = -(1 << 31)
"""Stage of what doesn't happen."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """The plan's span table while it grows: rows of trays come behind those of shards and ranks.

    spans: int64 [n, 2]. known: where the rows of a list of shards begin, by the list's bytes.
    """

    shards: Shards
    spans: np.ndarray
    known: dict[bytes, int]

    def with_lists(self, shard: np.ndarray, borders: np.ndarray) -> tuple[SpanTable, np.ndarray]:
        """Find or add the rows of lists of shards: (table with them, first span of each shard in its list int64 [n]).

        shard: int64 [n], the lists one after another, at borders: int64 [num_lists + 1]. No list is empty.
        """
        offsets = self.shards.offsets
        first, stop = borders[:-1], borders[1:]
        ends = np.append(0, np.cumsum(offsets[shard + 1] - offsets[shard]))
        begins = offsets[shard[first]]  # right where a list is a run of shards: these lie side by side already
        jumps = np.append(0, np.cumsum(shard[1:] != shard[:-1] + 1))
        known, added, count = dict(self.known), [], len(self.spans)
        for i in np.flatnonzero(jumps[stop - 1] != jumps[first]).tolist():
            members = shard[first[i] : stop[i]]
            key = members.tobytes()
            if key not in known:
                known[key] = count
                added.append(members)
                count += int(ends[stop[i]] - ends[first[i]])
            begins[i] = known[key]
        table = self
        if added:
            members = np.concatenate(added)
            new = self.shards.spans[ranges(offsets[members], offsets[members + 1])[1]]
            table = replace(self, spans=np.concatenate([self.spans, new]), known=known)
        return table, ends[:-1] + np.repeat(begins - ends[first], stop - first)


@dataclass(frozen=True, slots=True, eq=False)
class Trays:
    """All trays of one side in one direction, and where shards lie on them.

    rank, group: int64 [num_trays]. rows: int64 [num_trays, 2], range of the span table. stage[role]: int64 [num_trays],
    when the role's rows arrive or its partial results leave, NEVER without. keys: int64 [n], rising, what `key` gives
    for each shard on a tray; tray, first, stop: int64 [n], which tray and which spans of the table.
    """

    num_shards: int
    num_groups: int
    rank: np.ndarray
    group: np.ndarray
    rows: np.ndarray
    stage: dict[Role, np.ndarray]
    keys: np.ndarray
    tray: np.ndarray
    first: np.ndarray
    stop: np.ndarray

    def find(self, shards: Shards, rank, shard, group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Say where shards lie on ranks that have them: (tray, NONE at home; first and stop span), int64 [n] each."""
        place = _find(_key(rank, shard, group, self.num_shards, self.num_groups), shards.home[shard] == rank, self.keys)
        assert place.min(initial=0) > MISSING, "a rank uses a shard that nobody sends to it"
        at_home = place == NONE
        if at_home.all():
            return place, shards.offsets[shard], shards.offsets[shard + 1]
        first = np.where(at_home, shards.offsets[shard], self.first[place])
        stop = np.where(at_home, shards.offsets[shard + 1], self.stop[place])
        return np.where(at_home, NONE, self.tray[place]), first, stop


@njit(cache=True)
def _split(tray, in_order, tokens, limit):
    """Number trays anew so that none has more tokens than the limit, single shards apart: int64 [n].

    in_order: the entries tray by tray.
    """
    new, count, full = np.empty_like(tray), -1, 0
    for at in range(len(in_order)):
        i = in_order[at]
        full += tokens[i]
        if at == 0 or tray[i] != tray[in_order[at - 1]] or full > limit:
            count, full = count + 1, tokens[i]
        new[i] = count
    return new


MISSING = NONE - 1


@njit(cache=True)
def _find(wanted, at_home, keys):
    """Place of each key among the rising `keys`: NONE where its shard is at home, MISSING where it isn't there."""
    place = np.searchsorted(keys, wanted)
    for i in range(len(wanted)):
        if at_home[i]:
            place[i] = NONE
        elif place[i] == len(keys) or keys[place[i]] != wanted[i]:
            place[i] = MISSING
    return place


def _key(rank, shard, group, num_shards: int, num_groups: int) -> np.ndarray:
    return (rank * num_shards + shard) * num_groups + group


HOMES = 2
"""Rows of a tray that has partial results, in mean homes: its inputs are free for others when its kernels are over."""


def lay_out(
    table: SpanTable, num_ranks: int, num_groups: int, arriving: dict[Role, Transfers], leaving: dict[Role, Transfers]
) -> tuple[Trays, SpanTable]:
    """Deal one side's shards to trays: (trays, the span table with their rows).

    arriving, leaving: transfers of each of the side's inputs and of its results.
    """
    shards = table.shards
    num_shards = len(shards)
    ends = [(role, t, t.dst) for role, t in arriving.items()] + [(role, t, t.src) for role, t in leaving.items()]
    of_end = [_key(rank, t.shard, t.group, num_shards, num_groups) for _, t, rank in ends]
    keys, which = distinct(np.concatenate(of_end))
    first_stage = min(int(t.stage.min(initial=0)) for _, t, _ in ends)
    num_stages = max(int(t.stage.max(initial=0)) for _, t, _ in ends) - first_stage + 2
    times = np.zeros((len(ends), len(keys)), np.int64)  # 0 is never
    begin = 0
    for time, (role, t, _) in zip(times, ends):
        mine = which[begin : begin + len(t)]
        assert not len(mine) or np.bincount(mine).max() == 1, f"a rank gets or sends the same {role.name} twice"
        time[mine] = t.stage - first_stage + 1
        begin += len(t)
    rank_shard, group = keys // num_groups, keys % num_groups
    rank, shard = rank_shard // num_shards, rank_shard % num_shards
    alike = rank * num_groups + group
    assert num_stages ** len(ends) < (1 << 62) // (int(alike.max(initial=0)) + 1), "stages are numbered without gaps"
    for time in times:
        alike = alike * num_stages + time
    tray = distinct(alike)[1]
    by_position = np.empty(num_shards, np.int64)
    by_position[order_of(shards.spans[shards.offsets[:-1], 0])] = np.arange(num_shards)
    on_trays = order_of(tray * num_shards + by_position[shard])
    if leaving:
        limit = HOMES * -(-int(shards.tokens.sum()) // num_ranks)
        tray = _split(tray, on_trays, shards.tokens[shard], limit)
    borders = np.searchsorted(tray[on_trays], np.arange(int(tray.max(initial=-1)) + 2))
    table, in_order = table.with_lists(shard[on_trays], borders)
    first = np.empty(len(keys), np.int64)
    first[on_trays] = in_order
    stop = first + shards.offsets[shard + 1] - shards.offsets[shard]
    lead, last = on_trays[borders[:-1]], on_trays[borders[1:] - 1]
    stage = {role: np.where(time[lead], time[lead] - 1 + first_stage, NEVER) for time, (role, *_) in zip(times, ends)}
    rows = np.stack([first[lead], stop[last]], axis=1)
    return Trays(num_shards, num_groups, rank[lead], group[lead], rows, stage, keys, tray, first, stop), table
