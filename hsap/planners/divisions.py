"""Divisions: the greedy schedule of DCP §4.3, which overlaps one division's computation with the next one's data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hsap.loops import loop


class Needs(NamedTuple):
    """Computation blocks and the data they read, as columns.

    rank, area: int64 [num_entries], where a block is computed and its load. reads: int64 [num_entries, 2], the data
    blocks it needs. home, num_bytes: int64 [num_data], the rank that has a data block, and its size.
    """

    rank: np.ndarray
    area: np.ndarray
    reads: np.ndarray
    home: np.ndarray
    num_bytes: np.ndarray


def divide(needs: Needs, num_ranks: int, num_divisions: int) -> np.ndarray:
    """Choose the division of each block: int64 [num_entries], of [0, num_divisions).

    Division 0 has what needs no transfer. For each of the others but the last, ranks come in the order of the
    load they have so far, the least loaded first; each takes, in order, the blocks whose missing data fit into 1/T of
    all that the rank sends and receives, and leaves the others to later divisions. The last one has what is left. A
    data block is received once. With one division all is in it.
    """
    if num_divisions == 1 or not len(needs.rank):
        return np.zeros(len(needs.rank), np.int64)
    order = np.argsort(needs.rank, kind="stable")
    first = np.searchsorted(needs.rank[order], np.arange(num_ranks + 1))
    return _greedy(needs, order, first, num_ranks, num_divisions)


@loop
def _greedy(needs: Needs, order: np.ndarray, first: np.ndarray, num_ranks: int, num_divisions: int) -> np.ndarray:
    division = np.full(len(order), num_divisions - 1)
    fetched = np.zeros((num_ranks, len(needs.home)), np.bool_)
    total = np.zeros(num_ranks, np.int64)
    load = np.zeros(num_ranks, np.int64)
    for i in order:
        rank, local = needs.rank[i], True
        for data in needs.reads[i]:
            local = local and needs.home[data] == rank
            _fetch(needs, fetched, total, rank, data)
        if local:
            division[i] = 0
            load[rank] += needs.area[i]
    fetched[:] = False
    for now in range(1, num_divisions - 1):
        moved = np.zeros(num_ranks, np.int64)
        for rank in np.argsort(load, kind="mergesort"):
            for at in range(first[rank], first[rank + 1]):
                i = order[at]
                if division[i] != num_divisions - 1:
                    continue
                extra = 0
                for data in needs.reads[i]:
                    if needs.home[data] != rank and not fetched[rank, data]:
                        extra += needs.num_bytes[data]
                if moved[rank] + extra <= total[rank] // num_divisions:
                    for data in needs.reads[i]:
                        _fetch(needs, fetched, moved, rank, data)
                    division[i] = now
                    load[rank] += needs.area[i]
    return division


@loop
def _fetch(needs: Needs, fetched: np.ndarray, moved: np.ndarray, rank: int, data: int) -> None:
    """Count a data block at both ends the first time that a rank reads it from elsewhere."""
    home = needs.home[data]
    if home != rank and not fetched[rank, data]:
        fetched[rank, data] = True
        moved[rank] += needs.num_bytes[data]
        moved[home] += needs.num_bytes[data]
