"""Messages: transfers whose rows follow each other at both ends are sent as one, and packed as one before."""

from __future__ import annotations

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.schedule import Transfers
from hsap.ir.sort import distinct, order_of
from hsap.loops import loop

MESSAGE = (
    "role", "round", "src", "dst", "group", "stage", "until",
    "source", "target", "first", "stop", "to_first", "to_stop",
)  # fmt: skip


def messages(table: Transfers, rounds, source, target, rows, to_rows) -> dict[str, np.ndarray]:
    """Join transfers between the same two buffers whose rows follow each other at both ends: columns of `MESSAGE`.

    Messages of one role follow one another, in the order of roles.
    source, target: buffers. rows, to_rows: first and stop span of each shard in them.
    """
    ends = (source, target, *rows, *to_rows)
    columns = np.stack([table.role, rounds, table.src, table.dst, table.group, table.stage, table.until, *ends])
    # A round has a rank send once at most, so that it says the other end too.
    num_rounds, num_ranks = int(rounds.max(initial=0)) + 1, int(table.src.max(initial=0)) + 1
    num_groups, num_spans = int(table.group.max(initial=0)) + 1, int(rows[1].max(initial=0)) + 1
    key = (table.role * num_rounds + rounds) * num_ranks + table.src
    in_order = order_of((key * num_groups + table.group) * num_spans + rows[0])
    joined, count = _join(columns, in_order)
    return dict(zip(MESSAGE, joined[:, :count]))


_ROUND, _SOURCE, _TARGET = (MESSAGE.index(name) for name in ("round", "source", "target"))
_FIRST, _STOP, _TO_FIRST, _TO_STOP = range(len(MESSAGE) - 4, len(MESSAGE))


@loop
def _join(columns, in_order):
    """Let each message grow by those that follow it at both ends: (int64 [len(MESSAGE), n], how many are left)."""
    out = np.empty_like(columns)
    count = 0
    for at in range(len(in_order)):
        i, last = in_order[at], count - 1
        grows = count > 0 and columns[_FIRST, i] == out[_STOP, last] and columns[_TO_FIRST, i] == out[_TO_STOP, last]
        for row in (_ROUND, _SOURCE, _TARGET):
            grows = grows and columns[row, i] == out[row, last]
        if grows:
            out[_STOP, last], out[_TO_STOP, last] = columns[_STOP, i], columns[_TO_STOP, i]
        else:
            for row in range(len(columns)):
                out[row, count] = columns[row, i]
            count += 1
    return out, count


def packed(shards: Shards, moved: Transfers, mine: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple]:
    """Find what is copied together where it leaves home in one run of head groups: all that lies side by side there.

    mine: int64 [m], such transfers. Returns (a transfer of each copy int64 [n], the copy of each of `mine`, first and
    stop span of each copy).
    """
    num_ranks, num_groups, width = int(moved.src.max()) + 1, int(moved.group.max()) + 1, len(shards) + 1
    first = int(moved.stage.min())
    key = moved.role[mine] * (int(moved.stage.max()) - first + 1) + moved.stage[mine] - first
    key = ((key * num_ranks + moved.src[mine]) * num_groups + moved.group[mine]) * width + moved.shard[mine]
    keys, which = distinct(key)
    begins = np.append(True, keys[1:] != keys[:-1] + 1)
    lead = np.flatnonzero(begins)
    last = np.append(lead[1:], len(keys)) - 1
    there = np.empty(len(keys), np.int64)
    there[which] = mine
    rows = shards.offsets[keys[lead] % width], shards.offsets[keys[last] % width + 1]
    return there[lead], (np.cumsum(begins) - 1)[which], rows
