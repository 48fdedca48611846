"""Trays: what a rank has of other ranks' rows, laid out so that one kernel reads it all.

Shards of one side (queries or keys) that come to a rank in the same stages and whose partial results leave it in the
same stage lie on one tray: the tray has one buffer for each role, and its shards lie there in order of position, so
that neighbours in a document are neighbours in memory. A rank's own shards need no tray: they lie in its home buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hsap.compiler.order import IS_OF_QUERIES, IS_RESULT
from hsap.compiler.widen import Moves, Runs
from hsap.ir.block import Shards
from hsap.ir.program import NONE
from hsap.ir.schedule import DIRECTIONS, INPUTS, OUTPUTS
from hsap.ir.sort import distinct, order_of
from hsap.ir.span import ranges
from hsap.loops import inner, loop

NEVER = -(1 << 31)
"""Stage of what doesn't happen."""


def _sides(direction: str) -> np.ndarray:
    """Roles of queries and of keys, inputs first: int64 [2, most roles of a side], NONE behind the last one."""
    roles = np.array(INPUTS[direction] + OUTPUTS[direction])
    sides = [roles[IS_OF_QUERIES[roles] == of_queries] for of_queries in (True, False)]
    return np.stack([np.pad(side, (0, len(sides[0]) - len(side)), constant_values=NONE) for side in sides])


SIDES = {direction: _sides(direction) for direction in DIRECTIONS}


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
def _runs(shard: np.ndarray, borders: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    """All trays of one direction, those of queries before those of keys, and where shards lie on them.

    runs: of head groups. rank, run: int64 [num_trays]; run is an index of these. rows: int64 [num_trays, 2], range of
    the span table. stage: int64 [num_roles, num_trays], when a role's rows arrive or its partial results leave, NEVER
    without. keys: int64 [n], rising, what `_key` gives for each shard on a tray; tray, first: int64 [n], which tray,
    and its first span there.
    """

    num_ranks: int
    runs: Runs
    rank: np.ndarray
    run: np.ndarray
    rows: np.ndarray
    stage: np.ndarray
    keys: np.ndarray
    tray: np.ndarray
    first: np.ndarray

    def find(
        self, shards: Shards, role: np.ndarray, rank: np.ndarray, shard: np.ndarray, run: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Say where a role's rows of shards lie on ranks that have them: (place; first and stop span), int64 [n] each.

        A place is the rank where that is the shard's home, else its tray's number behind those of all ranks.
        """
        place, first, stop = _find(role, rank, shard, run, self.runs.behind, shards.home, shards.offsets,
                                   self.num_ranks, self.keys, self.tray, self.first)  # fmt: skip
        assert place.min(initial=0) > MISSING, "a rank uses a shard that nobody sends to it"
        return place, first, stop


MISSING = -1


@loop
def _find(
    role: np.ndarray,
    rank: np.ndarray,
    shard: np.ndarray,
    run: np.ndarray,
    behind_run: np.ndarray,
    home: np.ndarray,
    offsets: np.ndarray,
    num_ranks: int,
    keys: np.ndarray,
    trays: np.ndarray,
    firsts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Place and range of spans of each shard on its rank; the place is MISSING where no key of it is there.

    A shard's trays on a rank have runs of head groups that don't overlap; the one that begins last, but no later than
    the run that is sought, contains it. behind_run: see `Runs.behind`.
    """
    place, first, stop = np.empty_like(shard), np.empty_like(shard), np.empty_like(shard)
    num_runs = len(behind_run)
    for i in range(len(shard)):
        place[i], first[i] = rank[i], offsets[shard[i]]
        if home[shard[i]] != rank[i]:
            beyond = _key(role[i], rank[i], shard[i], behind_run[run[i]], num_ranks, len(home), num_runs)
            at, behind = 0, len(keys)
            while at < behind:
                middle = (at + behind) // 2
                if keys[middle] < beyond:
                    at = middle + 1
                else:
                    behind = middle
            at -= 1
            place[i] = MISSING
            if at >= 0 and keys[at] // num_runs == (beyond - behind_run[run[i]]) // num_runs:
                place[i], first[i] = num_ranks + trays[at], firsts[at]
        stop[i] = first[i] + offsets[shard[i] + 1] - offsets[shard[i]]
    return place, first, stop


@inner
def _key(role: int, rank: int, shard: int, run: int, num_ranks: int, num_shards: int, num_runs: int) -> int:
    side = 0 if IS_OF_QUERIES[role] else 1
    return ((side * num_ranks + rank) * num_shards + shard) * num_runs + run


HOMES = 2
"""Most tokens of a tray that has partial results, in those of a mean rank.

Inputs and results of a tray are alive together. One for all rows would take half as much memory again as the shards
one by one, where a rank gathers a whole document; with small trays it is little more.
"""


def lay_out(table: SpanTable, num_ranks: int, runs: Runs, direction: str, moved: Moves) -> tuple[Trays, SpanTable]:
    """Deal the shards that travel to trays: (trays, the span table with their rows). moved: inputs and results."""
    shards, sides = table.shards, SIDES[direction]
    num_shards, num_runs = len(shards), len(runs.runs)
    when = np.where(IS_RESULT[moved.role], moved.stage, moved.until)
    first_stage = int(when.min(initial=0))
    num_stages = int(when.max(initial=0)) - first_stage + 2
    most = (1 << 62) // (2 * num_ranks * num_runs)
    assert num_stages ** sides.shape[1] < most, "stages are numbered without gaps"
    keys, which = distinct(_ends(moved.role, moved.shard, moved.run, moved.src, moved.dst, num_ranks, num_shards,
                                 num_runs))  # fmt: skip
    times, alike, shard = _times(moved.role, when - first_stage + 1, keys, which, num_stages, num_shards,
                                 num_runs, num_ranks, sides)  # fmt: skip
    assert len(moved) == np.count_nonzero(times), "a rank gets or sends the same role of a shard twice"
    if int(alike.max(initial=0)) >= (1 << 62) // max(num_shards, 1):
        alike = distinct(alike)[1]
    in_order = order_of(alike * num_shards + table.place[shard])
    total = int(table.tokens.sum())
    limits = np.where((IS_RESULT[sides] & (sides != NONE)).any(axis=1), HOMES * -(-total // num_ranks), total)
    tray, borders, num_trays = _deal(alike, in_order, keys // (num_ranks * num_shards * num_runs),
                                     table.tokens[shard], limits)  # fmt: skip
    borders = borders[: num_trays + 1]
    table, begins = table.with_lists(shard[in_order], borders)
    first, rows = _places(shard, in_order, borders, begins, shards.offsets)
    lead = in_order[borders[:-1]]
    rank, run = keys[lead] // (num_runs * num_shards) % num_ranks, keys[lead] % num_runs
    stage = times.take(lead, axis=1)
    stage = np.where(stage, stage - 1 + first_stage, NEVER)
    return Trays(num_ranks, runs, rank, run, rows, stage, keys, tray, first), table


@loop
def _ends(
    role: np.ndarray,
    shard: np.ndarray,
    run: np.ndarray,
    src: np.ndarray,
    dst: np.ndarray,
    num_ranks: int,
    num_shards: int,
    num_runs: int,
) -> np.ndarray:
    """Key of each transfer's shard on the rank that has a tray for it, which inputs come to and results leave."""
    keys = np.empty_like(shard)
    for i in range(len(keys)):
        rank = src[i] if IS_RESULT[role[i]] else dst[i]
        keys[i] = _key(role[i], rank, shard[i], run[i], num_ranks, num_shards, num_runs)
    return keys


@loop
def _times(
    role: np.ndarray,
    stage: np.ndarray,
    keys: np.ndarray,
    which: np.ndarray,
    num_stages: int,
    num_shards: int,
    num_runs: int,
    num_ranks: int,
    sides: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """When the rows of each role come or go, 0 never: int64 [num_roles, n]; all but the shard in one number; shards.

    role, stage, which: of the transfers, stages from 1 and the place of their key.
    """
    times = np.zeros((len(IS_RESULT), len(keys)), np.int64)
    alike, shard = np.empty_like(keys), np.empty_like(keys)
    for i in range(len(role)):
        times[role[i], which[i]] = stage[i]
    for i in range(len(keys)):
        rank_shard = keys[i] // num_runs
        shard[i] = rank_shard % num_shards
        alike[i] = rank_shard // num_shards * num_runs + keys[i] % num_runs
        for one in sides[rank_shard // num_shards // num_ranks]:
            alike[i] = alike[i] * num_stages + (times[one, i] if one >= 0 else 0)
    return times, alike, shard


@loop
def _deal(
    alike: np.ndarray, in_order: np.ndarray, side: np.ndarray, tokens: np.ndarray, limits: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Number the trays, of shards that are alike and have no more tokens than the limit together, single ones apart.

    Returns (tray of each shard int64 [n], where each tray begins in order int64 [n + 1], number of trays).
    """
    tray, borders = np.empty_like(alike), np.empty(len(alike) + 1, np.int64)
    count, full = 0, 0
    for at in range(len(in_order)):
        i = in_order[at]
        full += tokens[i]
        if at == 0 or alike[i] != alike[in_order[at - 1]] or full > limits[side[i]]:
            borders[count] = at
            count, full = count + 1, tokens[i]
        tray[i] = count - 1
    borders[count] = len(in_order)
    return tray, borders, count


@loop
def _places(
    shard: np.ndarray, in_order: np.ndarray, borders: np.ndarray, begins: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
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
