"""Spread: give each rank's cells their stages so that no rank has to send much at once. Ours, for `sap`.

A stage needs as many rounds as its busiest rank has partners, so what one rank sends should be spread over the stages.
"""

from __future__ import annotations

import numpy as np


def spread(cells: np.ndarray, num_ranks: int) -> np.ndarray:
    """Choose the stage of each cell, from 1, one a rank and stage: int64 [num_cells].

    cells: int64 [num_cells, 3], a row (rank, q rank, KV rank), by rank and then in preferred order. There are as many
    stages as the busiest rank has cells. Ranks with the least time to spare choose first, the first of their cells
    whose senders are not busy; a rank with time to spare rather waits than make a busy one send more.
    """
    rows = cells.tolist()
    waiting: list[list[int]] = [[] for _ in range(num_ranks)]
    sends = [0] * num_ranks
    for index, (rank, q, kv) in enumerate(rows):
        waiting[rank].append(index)
        for sender in {q, kv} - {rank}:
            sends[sender] += 1
    num_stages = max(map(len, waiting), default=0)
    most = -(-max(sends, default=0) // max(num_stages, 1))
    stage = np.zeros(len(rows), np.int64)
    for now in range(1, num_stages + 1):
        left = num_stages - now + 1
        sends = [0] * num_ranks
        for rank in sorted((r for r in range(num_ranks) if waiting[r]), key=lambda r: (left - len(waiting[r]), r)):
            excess, at = _choose(rows, waiting[rank], sends, most)
            if excess and len(waiting[rank]) < left:
                continue
            index = waiting[rank].pop(at)
            stage[index] = now
            for sender in set(rows[index][1:]) - {rank}:
                sends[sender] += 1
    return stage


def _choose(rows: list[list[int]], waiting: list[int], sends: list[int], most: int) -> tuple[int, int]:
    """Pick the first cell with the least excess of sends at a sender: (excess, place in `waiting`)."""
    best, place = -1, 0
    for at, index in enumerate(waiting):
        rank, q, kv = rows[index]
        excess = max(0 if q == rank else sends[q] + 1 - most, 0 if kv == rank else sends[kv] + 1 - most, 0)
        if best < 0 or excess < best:
            best, place = excess, at
        if not excess:
            break
    return best, place
