"""Shards and blocks: what a planner places on ranks.

A shard is a set of tokens with one home rank. A block is the work of one query shard against one KV shard: its slices
and their area. Blocks without a visible pair don't exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hsap.ir.slice import area, cut
from hsap.ir.sort import order_of
from hsap.ir.span import coalesce, row_starts


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """All shards as columns, ordered by home rank; together they cover every token position once.

    spans: int64 [num_spans, 2], in local row order. offsets: int64 [num_shards + 1], spans of each shard.
    home: int64 [num_shards], never falling. A rank's local rows are its shards one after another.
    """

    spans: np.ndarray
    offsets: np.ndarray
    home: np.ndarray

    @classmethod
    def of(cls, shards: Sequence[tuple[int, np.ndarray]]) -> Shards:
        """Build from (home rank, span table) pairs with homes in rising order; empty shards are dropped."""
        tables = [(home, coalesce(np.asarray(table, dtype=np.int64).reshape(-1, 2))) for home, table in shards]
        tables = [(home, table) for home, table in tables if len(table)]
        return cls(
            np.concatenate([table for _, table in tables]) if tables else np.zeros((0, 2), np.int64),
            np.cumsum([0] + [len(table) for _, table in tables]),
            np.array([home for home, _ in tables], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.home)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each shard: int64 [num_shards]."""
        ends = row_starts(self.spans)
        return np.diff(ends[self.offsets])


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """All blocks of one mask as columns, ordered by (query shard, KV shard).

    q, kv: int64 [num_blocks] shard indices. area: int64 [num_blocks] visible pairs.
    slices: int64 [num_slices, 6]; offsets: int64 [num_blocks + 1], slices of each block.
    """

    q: np.ndarray
    kv: np.ndarray
    area: np.ndarray
    offsets: np.ndarray
    slices: np.ndarray

    def __len__(self) -> int:
        return len(self.q)


def cut_blocks(shards: Shards, slices: np.ndarray) -> Blocks:
    """Cut a mask's slices by the shards' spans and gather the pieces into blocks."""
    by_position = np.argsort(shards.spans[:, 0], kind="stable")
    spans = shards.spans[by_position]
    shard_of = np.repeat(np.arange(len(shards)), np.diff(shards.offsets))[by_position]
    pieces, q_span, k_span = cut(slices, spans, spans)
    key = shard_of[q_span] * len(shards) + shard_of[k_span]
    order = order_of(key)
    pieces, key = pieces.T.take(order, axis=1).T, key[order]
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(key) else np.zeros(0, np.int64)
    offsets = np.append(first, len(key))
    areas = np.add.reduceat(area(pieces), first) if len(first) else np.zeros(0, np.int64)
    return Blocks(key[first] // len(shards), key[first] % len(shards), areas, offsets, pieces)
