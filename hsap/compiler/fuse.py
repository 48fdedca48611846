"""Fuse: all that a rank attends in one stage between the same two places is one kernel.

Places are home or a tray (`hsap.compiler.trays`); only entries of one run of head groups are fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.compiler.trays import Trays
from hsap.compiler.widen import Entries
from hsap.ir.block import Shards
from hsap.ir.program import NONE, Role
from hsap.ir.slice import K0, Q0
from hsap.ir.sort import distinct, order_of
from hsap.loops import loop


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """The kernels of one mask and direction.

    on_q, on_kv: int64 [num_entries], place of each entry's queries and of its keys, see `Trays.find`. lead: int64
    [num_kernels], an entry of each. borders: int64 [num_kernels + 1], range of `index` that each attends; index: int64
    of slices.
    """

    on_q: np.ndarray
    on_kv: np.ndarray
    lead: np.ndarray
    borders: np.ndarray
    index: np.ndarray

    def __len__(self) -> int:
        return len(self.lead)


def fuse(shards: Shards, entries: Entries, trays: Trays) -> Fused:
    """Fuse the entries of a rank, stage and run of head groups that read the same two places."""
    rank, run = entries.rank, entries.run
    q, kv = (
        trays.find(shards, np.full(len(rank), role), rank, entries.shard_of(role), run)[0] for role in (Role.Q, Role.KV)
    )
    num_stages, num_runs = int(entries.stage.max(initial=0)) + 1, len(trays.runs.runs)
    num_places = trays.num_ranks + len(trays.rank)
    pair, num_pairs = q * num_places + kv, num_places * num_places
    if num_pairs >= (1 << 62) // (trays.num_ranks * num_stages * num_runs):
        pair, num_pairs = distinct(pair)[1], len(pair)
    key = ((rank * num_stages + entries.stage) * num_runs + run) * num_pairs + pair
    in_order = order_of(key)
    lead, borders, index, kernel = _fuse(key, in_order, entries.block, entries.blocks.offsets)
    fused = np.flatnonzero(kernel != NONE)
    if len(fused):
        index[fused] = _row_by_row(shards, entries.blocks.slices, kernel[fused], index[fused])
    return Fused(q, kv, lead, borders, index)


@loop
def _fuse(
    key: np.ndarray, in_order: np.ndarray, block: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
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
def _strips(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
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
