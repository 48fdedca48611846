"""Prefetch: transfers that leave earlier and are waited for later than they must be.

A stage's transfers run under its blocks. Where ranks have unequal blocks in a stage, the first to be done would wait
for those that the next transfers come from, stage after stage, although all have as much to do in the end. What is at
home from the beginning may as well leave some stages ahead, and what goes home be folded in some stages later: ranks
may then be that many stages apart. It costs memory: more is under way at once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.ir.schedule import Transfers
from hsap.ir.sort import order_of


def prefetch(transfers: tuple[Transfers, Transfers], depth: int) -> tuple[Transfers, Transfers]:
    """Widen (inputs, results), as `order` and `relay` give them, by up to `depth` stages each.

    No input leaves before the first of all does, no result ends after the last. A rank passes a row on once it has
    waited for it, and its own partial result once it has folded in the others'.
    """
    arriving, leaving = transfers
    if len(arriving):
        came = _when(arriving, arriving.dst, arriving.src, arriving.until, int(arriving.stage.min()) - 1)
        arriving = replace(arriving, stage=np.maximum(arriving.stage - depth, np.minimum(came + 1, arriving.stage)))
    if len(leaving):
        goes = _when(leaving, leaving.src, leaving.dst, leaving.stage, int(leaving.until.max()) + 1)
        leaving = replace(leaving, until=np.minimum(leaving.until + depth, np.maximum(goes - 1, leaving.until)))
    return arriving, leaving


def _when(table: Transfers, here: np.ndarray, wanted: np.ndarray, value: np.ndarray, otherwise: int) -> np.ndarray:
    """The value of the transfer of the same rows that ends at each rank wanted: int64 [n]; `otherwise` for none."""
    sizes = [int(column.max()) + 1 for column in (table.shard, table.group)]
    rows = (table.role * sizes[0] + table.shard) * sizes[1] + table.group
    num_ranks = int(max(table.src.max(), table.dst.max())) + 1
    keys, asked = rows * num_ranks + here, rows * num_ranks + wanted
    by_key = order_of(keys)
    keys = keys[by_key]
    place = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[place] == asked, value[by_key[place]], otherwise)
