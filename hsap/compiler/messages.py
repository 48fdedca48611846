"""Messages: transfers whose rows follow each other at both ends are sent as one."""

from __future__ import annotations

import numpy as np

from hsap.ir.schedule import Transfers
from hsap.ir.sort import order_of
from hsap.loops import loop

MESSAGE = ("round", "src", "dst", "group", "stage", "until", "source", "target", "first", "stop", "to_first", "to_stop")


def messages(table: Transfers, group, rounds, source, target, rows, to_rows) -> dict[str, np.ndarray]:
    """Join transfers between the same two buffers whose rows follow each other at both ends: columns of `MESSAGE`.

    group: as instructions name it. source, target: buffers. rows, to_rows: first and stop span of each shard in them.
    """
    columns = np.stack([rounds, table.src, table.dst, group, table.stage, table.until, source, target, *rows, *to_rows])
    # A round has a rank send once at most, so that it says the other end too.
    num_ranks, num_spans = int(table.src.max(initial=0)) + 1, int(rows[1].max(initial=0)) + 1
    num_groups = int(table.group.max(initial=0)) + 1
    in_order = order_of(((rounds * num_ranks + table.src) * num_groups + table.group) * num_spans + rows[0])
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
