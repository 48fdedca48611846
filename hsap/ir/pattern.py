"""Patterns: the five shapes that a causal document leaves in a (query shard, KV shard) cell (HSAP §3.2, Figure 3)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from hsap.ir.block import Blocks, Shards
from hsap.ir.slice import Kind, kinds


class Pattern(IntEnum):
    """What a block looks like; the paper's names."""

    OTHER = 0
    """None of the five: another mask, or a shard of several spans."""
    A1 = 1
    """Causal attention: the diagonal, with as many documents as the shard holds."""
    A2 = 2
    """Cross: one document covers both shards."""
    A3 = 3
    """Cross-up: the document ends inside the query shard."""
    A4 = 4
    """Cross-right: the document begins inside the KV shard."""
    A5 = 5
    """Cross-corner: it begins inside the KV shard and ends inside the query shard."""


def patterns(shards: Shards, blocks: Blocks) -> np.ndarray:
    """Name every block: int8 [num_blocks] of `Pattern`."""
    if not len(blocks):
        return np.zeros(0, np.int8)
    table, first = blocks.slices, blocks.offsets[:-1]
    q0, q1, k0, k1, lo, hi = table.T
    triangle = (q0 == k0) & (q1 == k1) & (hi == 0) & (lo == k0 - q1 + 1)
    causal = np.logical_and.reduceat(triangle, first) & (blocks.q == blocks.kv)
    single = np.diff(shards.offsets)[blocks.q] + np.diff(shards.offsets)[blocks.kv] == 2
    q_stop = shards.spans[shards.offsets[blocks.q], 1]
    kv_start = shards.spans[shards.offsets[blocks.kv], 0]
    rectangle = (np.diff(blocks.offsets) == 1) & (kinds(table)[first] == Kind.FULL) & (k1[first] <= q0[first])
    cross = Pattern.A2 + (q1[first] < q_stop) + 2 * (k0[first] > kv_start)
    found = np.where(causal, Pattern.A1, np.where(rectangle & (blocks.q != blocks.kv), cross, Pattern.OTHER))
    return np.where(single, found, Pattern.OTHER).astype(np.int8)
