"""Relay: what the compiler routes itself crosses each node border once.

An input row that several ranks of another node need goes to one of them, the relay, and from there to the others: each
rank still receives it once, so that totals stay those of direct transfers. Partial results that several ranks of a node
have for a home in another node are merged at one of these first: as many bytes in all, but fewer for home to receive.
Both cost a hop: a relayed row leaves home a stage earlier than it would, in a stage before the first if need be; merged
results leave a stage later.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.compiler.order import routed_roles
from hsap.ir.block import Shards
from hsap.ir.heads import HeadShape
from hsap.ir.program import KV_ROLES
from hsap.ir.schedule import Schedule, Transfers
from hsap.loops import loop


def relay(
    shards: Shards, schedule: Schedule, transfers: tuple[Transfers, Transfers], heads: HeadShape, node_of: np.ndarray
) -> tuple[Transfers, Transfers]:
    """Rewrite the direct transfers of a schedule, (inputs, outputs) as `order` gives them.

    node_of: int64 [num_ranks], the node of each rank that the schedule knows. What the planner routed stays as it is.
    """
    planned = np.array(sorted(routed_roles(schedule)), np.int64)
    fresh = [~np.isin(table.role, planned) for table in transfers]
    size = [_sizes(shards, table, heads) for table in transfers]
    arriving = _fan_out(transfers[0], fresh[0], size[0], node_of)
    received = np.bincount(arriving.dst, weights=size[0], minlength=len(node_of))
    return arriving, _merge_first(transfers[1], fresh[1], size[1], node_of, received)


def _sizes(shards: Shards, table: Transfers, heads: HeadShape) -> np.ndarray:
    """What a transfer carries, in rows of one head: int64 [n]."""
    return shards.tokens[table.shard] * np.where(
        np.isin(table.role, KV_ROLES), 2 * heads.num_kv_heads, heads.num_q_heads
    )


def _fan_out(table: Transfers, fresh: np.ndarray, size: np.ndarray, node_of: np.ndarray) -> Transfers:
    """Let a rank that needs a row first have it, and pass it on; of several the one with the least to carry."""
    rows, first, stop = _bundles(table, fresh, node_of, table.dst, table.stage)
    if not len(first):
        return table
    count, stage = stop - first, table.stage[rows]
    as_early = np.add.reduceat((stage == np.repeat(stage[first], count)).astype(np.int64), first)
    # A relay receives the row over the network and sends it once to each of the others.
    carried = size[rows[first]] * count
    load = np.zeros(len(node_of), np.int64)
    chosen = first.copy()
    _choose(np.argsort(-carried, kind="stable"), first, first + as_early, table.dst[rows], carried, load, chosen)
    src, new_stage = table.src.copy(), table.stage.copy()
    src[rows] = np.repeat(table.dst[rows[chosen]], count)
    src[rows[chosen]] = table.src[rows[chosen]]
    # The others' first use is that of the second row, which comes right behind the first in time.
    several = count > 1
    new_stage[rows[chosen[several]]] = np.minimum(stage[chosen], stage[first + several] - 1)[several]
    return replace(table, src=src, stage=new_stage, until=new_stage)


def _merge_first(
    table: Transfers, fresh: np.ndarray, size: np.ndarray, node_of: np.ndarray, load: np.ndarray
) -> Transfers:
    """Gather a node's partial results at one of its ranks that have one, that which has received the least.

    load: what each rank receives besides.
    """
    rows, first, stop = _bundles(table, fresh, node_of, table.src, -table.stage)
    if not len(first):
        return table
    count, stage = stop - first, table.stage[rows]
    stays = np.ones(len(table), bool)
    stays[rows] = False
    load = load + np.bincount(table.dst[stays], weights=size[stays], minlength=len(node_of))
    load += np.bincount(table.dst[rows[first]], weights=size[rows[first]], minlength=len(node_of))
    gathered = size[rows[first]] * (count - 1)
    load, chosen = load.astype(np.int64), first.copy()
    _choose(np.argsort(-gathered, kind="stable"), first, stop, table.src[rows], gathered, load, chosen)
    dst, new_stage = table.dst.copy(), table.stage.copy()
    dst[rows] = np.repeat(table.src[rows[chosen]], count)
    dst[rows[chosen]] = table.dst[rows[chosen]]
    # The first row of a bundle is its latest; if that is the one chosen, the second is the latest of the others.
    several = count > 1
    others = stage[np.where(chosen == first, first + several, first)]
    new_stage[rows[chosen[several]]] = np.maximum(stage[chosen], others + 1)[several]
    return replace(table, dst=dst, stage=new_stage, until=new_stage)


def _bundles(
    table: Transfers, fresh: np.ndarray, node_of: np.ndarray, end: np.ndarray, time: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Transfers between nodes, of one row and with `end` in one node: (their indices, where each bundle starts, stops).

    A bundle's transfers are ordered by time, then by the rank at their end.
    """
    rows = np.flatnonzero(fresh & (node_of[table.src] != node_of[table.dst]))
    keys = [node_of[end], table.group, table.shard, table.role]
    rows = rows[np.lexsort([key[rows] for key in (end, time, *keys)])]
    differs = np.zeros(max(len(rows) - 1, 0), bool)
    for key in keys:
        differs |= key[rows[1:]] != key[rows[:-1]]
    first = np.flatnonzero(np.r_[True, differs]) if len(rows) else rows
    return rows, first, np.append(first[1:], len(rows)) if len(rows) else rows


@loop
def _choose(
    order: np.ndarray,
    first: np.ndarray,
    stop: np.ndarray,
    rank: np.ndarray,
    weight: np.ndarray,
    load: np.ndarray,
    chosen: np.ndarray,
) -> None:
    """Choose a place in [first, stop) for each bundle, where `rank` has the least load yet; adds its weight there.

    chosen: a copy of `first`.
    """
    for i in range(len(order)):
        bundle = order[i]
        for place in range(first[bundle] + 1, stop[bundle]):
            if load[rank[place]] < load[rank[chosen[bundle]]]:
                chosen[bundle] = place
        load[rank[chosen[bundle]]] += weight[bundle]
