"""Trays: what a rank has of other ranks' rows, laid out so that one kernel reads it all.

Shards of one side (queries or keys) that come to a rank in the same stages and whose partial results leave it in the
same stage lie on one tray: the tray has one buffer for each role, and its shards lie there in order of position, so
that neighbours in a document are neighbours in memory. A rank's own shards need no tray: they lie in its home buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.program import NONE, Role
from hsap.ir.schedule import Transfers
from hsap.ir.sort import distinct, order_of
from hsap.ir.span import ranges
from hsap.loops import loop

NEVER = -(1 << 31)
"""Stage of what doesn't happen."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """The plan's span table while it grows: rows of trays come behind those of shards and ranks.

    spans: int64 [n, 2]. place: int64 [num_shards], of each shard in the order of their positions. tokens: int64
    [num_shards]. known: where the rows of a list of shards begin, by the list's bytes.
    """

    shards: Shards
    spans: np.ndarray
    place: np.ndarray
    tokens: np.ndarray
    known: dict[bytes, int]

    @classmethod
    def of(cls, shards: Shards, spans: np.ndarray) -> SpanTable:
        """Begin with the spans of shards and ranks."""
        place = np.empty(len(shards), np.int64)
        place[order_of(shards.spans[shards.offsets[:-1], 0])] = np.arange(len(shards))
        return cls(shards, spans, place, shards.tokens, {})

    def with_lists(self, shard: np.ndarray, borders: np.ndarray) -> tuple[SpanTable, np.ndarray]:
        """Find or add the rows of lists of shards: (table with them, where those of each list begin int64 [n]).

        shard: int64 [n], the lists one after another, at borders: int64 [num_lists + 1]. No list is empty.
        """
        offsets = self.shards.offsets
        begins, num_spans = _runs(shard, borders, offsets)
        known, added, count = dict(self.known), [], len(self.spans)
        for i in np.flatnonzero(begins < 0).tolist():
            members = shard[borders[i] : borders[i + 1]]
            key = members.tobytes()
            if key not in known:
                known[key] = count
                added.append(members)
                count += int(num_spans[i])
            begins[i] = known[key]
        if not added:
            return self, begins
        members = np.concatenate(added)
        new = self.shards.spans[ranges(offsets[members], offsets[members + 1])[1]]
        return replace(self, spans=np.concatenate([self.spans, new]), known=known), begins


@loop
def _runs(shard, borders, offsets):
    """First span of each list that is a run of shards, which lie side by side already, NONE of others; its spans."""
    begins, num_spans = np.empty(len(borders) - 1, np.int64), np.zeros(len(borders) - 1, np.int64)
    for i in range(len(begins)):
        begins[i] = offsets[shard[borders[i]]]
        for at in range(borders[i], borders[i + 1]):
            num_spans[i] += offsets[shard[at] + 1] - offsets[shard[at]]
            if at > borders[i] and shard[at] != shard[at - 1] + 1:
                begins[i] = NONE
    return begins, num_spans


@dataclass(frozen=True, slots=True, eq=False)
class Trays:
    """All trays of one side in one direction, and where shards lie on them.

    rank, group: int64 [num_trays]. rows: int64 [num_trays, 2], range of the span table. stage[role]: int64 [num_trays],
    when the role's rows arrive or its partial results leave, NEVER without. keys: int64 [n], rising, what `_key` gives
    for each shard on a tray; tray, first: int64 [n], which tray, and its first span there.
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

    def find(self, shards: Shards, rank, shard, group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Say where shards lie on ranks that have them: (tray, NONE at home; first and stop span), int64 [n] each."""
        key = _key(rank, shard, group, self.num_shards, self.num_groups)
        tray, first, stop = _find(key, rank, shard, shards.home, shards.offsets, self.keys, self.tray, self.first)
        assert tray.min(initial=0) > MISSING, "a rank uses a shard that nobody sends to it"
        return tray, first, stop


MISSING = NONE - 1


@loop
def _find(wanted, rank, shard, home, offsets, keys, trays, firsts):
    """Tray and range of spans of each shard on its rank: tray NONE at home, MISSING where its key isn't there."""
    tray, first, stop = np.empty_like(wanted), np.empty_like(wanted), np.empty_like(wanted)
    for i in range(len(wanted)):
        tray[i], first[i] = NONE, offsets[shard[i]]
        if home[shard[i]] != rank[i]:
            place, behind = 0, len(keys)
            while place < behind:
                middle = (place + behind) // 2
                if keys[middle] < wanted[i]:
                    place = middle + 1
                else:
                    behind = middle
            tray[i] = MISSING
            if place < len(keys) and keys[place] == wanted[i]:
                tray[i], first[i] = trays[place], firsts[place]
        stop[i] = first[i] + offsets[shard[i] + 1] - offsets[shard[i]]
    return tray, first, stop


def _key(rank, shard, group, num_shards: int, num_groups: int) -> np.ndarray:
    return (rank * num_shards + shard) * num_groups + group


HOMES = 2
"""Most tokens of a tray that has partial results, in those of a mean rank.

Inputs and results of a tray are alive together. One for all rows would take half as much memory again as the shards
one by one, where a rank gathers a whole document; with small trays it is little more.
"""


def lay_out(
    table: SpanTable, num_ranks: int, num_groups: int, arriving: dict[Role, Transfers], leaving: dict[Role, Transfers]
) -> tuple[Trays, SpanTable]:
    """Deal one side's shards to trays: (trays, the span table with their rows).

    arriving, leaving: transfers of each of the side's inputs and of its results.
    """
    shards = table.shards
    num_shards = len(shards)
    ends = [(role, t, t.dst) for role, t in arriving.items()] + [(role, t, t.src) for role, t in leaving.items()]
    keys, which = distinct(np.concatenate([_key(end, t.shard, t.group, num_shards, num_groups) for _, t, end in ends]))
    stage = np.concatenate([t.until for t in arriving.values()] + [t.stage for t in leaving.values()])
    first_stage = int(stage.min(initial=0))
    num_stages = int(stage.max(initial=0)) - first_stage + 2
    assert num_stages ** len(ends) < (1 << 62) // (num_ranks * num_groups), "stages are numbered without gaps"
    lengths = np.array([len(t) for _, t, _ in ends])
    times, alike, shard = _times(keys, which, stage - first_stage + 1, lengths, num_stages, num_shards, num_groups)
    assert lengths.sum() == np.count_nonzero(times), "a rank gets or sends the same role of a shard twice"
    if int(alike.max(initial=0)) >= (1 << 62) // max(num_shards, 1):
        alike = distinct(alike)[1]
    in_order = order_of(alike * num_shards + table.place[shard])
    total = int(table.tokens.sum())
    limit = HOMES * -(-total // num_ranks) if leaving else total
    tray, borders, num_trays = _deal(alike, in_order, table.tokens[shard], limit)
    borders = borders[: num_trays + 1]
    table, begins = table.with_lists(shard[in_order], borders)
    first, rows = _places(shard, in_order, borders, begins, shards.offsets)
    lead = in_order[borders[:-1]]
    rank, group = keys[lead] // (num_groups * num_shards), keys[lead] % num_groups
    when = np.where(times[:, lead], times[:, lead] - 1 + first_stage, NEVER)
    stages = {role: when[i] for i, (role, *_) in enumerate(ends)}
    return Trays(num_shards, num_groups, rank, group, rows, stages, keys, tray, first), table


@loop
def _times(keys, which, stage, lengths, num_stages, num_shards, num_groups):
    """When each end of a shard's rows is, 0 never: int64 [num_ends, n]; rank, group and times in one number; shards.

    which, stage: of the ends' transfers, `lengths` of each one after another.
    """
    times = np.zeros((len(lengths), len(keys)), np.int64)
    alike, shard = np.empty_like(keys), np.empty_like(keys)
    at = 0
    for end in range(len(lengths)):
        for _ in range(lengths[end]):
            times[end, which[at]] = stage[at]
            at += 1
    for i in range(len(keys)):
        rank_shard = keys[i] // num_groups
        shard[i] = rank_shard % num_shards
        alike[i] = rank_shard // num_shards * num_groups + keys[i] % num_groups
        for end in range(len(lengths)):
            alike[i] = alike[i] * num_stages + times[end, i]
    return times, alike, shard


@loop
def _deal(alike, in_order, tokens, limit):
    """Number the trays, of shards that are alike and have no more tokens than the limit together, single ones apart.

    Returns (tray of each shard int64 [n], where each tray begins in order int64 [n + 1], number of trays).
    """
    tray, borders = np.empty_like(alike), np.empty(len(alike) + 1, np.int64)
    count, full = 0, 0
    for at in range(len(in_order)):
        i = in_order[at]
        full += tokens[i]
        if at == 0 or alike[i] != alike[in_order[at - 1]] or full > limit:
            borders[count] = at
            count, full = count + 1, tokens[i]
        tray[i] = count - 1
    borders[count] = len(in_order)
    return tray, borders, count


@loop
def _places(shard, in_order, borders, begins, offsets):
    """First span of each shard on its tray, int64 [n], and the range of spans of each tray, int64 [num_trays, 2]."""
    first, rows = np.empty_like(shard), np.empty((len(begins), 2), np.int64)
    for tray in range(len(begins)):
        place = begins[tray]
        rows[tray, 0] = place
        for at in range(borders[tray], borders[tray + 1]):
            i = in_order[at]
            first[i] = place
            place += offsets[shard[i] + 1] - offsets[shard[i]]
        rows[tray, 1] = place
    return first, rows
