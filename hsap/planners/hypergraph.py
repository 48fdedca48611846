"""Hypergraph: computation and the data it shares, as vertices with weights and hyperedges with bytes. For `dcp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hsap.ir.sort import distinct, order_of


@dataclass(frozen=True, slots=True, eq=False)
class Hypergraph:
    """Vertices with a weight in every dimension, and hyperedges over them.

    weight: int64 [num_vertices, num_dimensions]. offsets: int64 [num_edges + 1], pins of each edge; pins: int64
    vertices, distinct within an edge. num_bytes: int64 [num_edges].
    """

    weight: np.ndarray
    offsets: np.ndarray
    pins: np.ndarray
    num_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.weight)

    @classmethod
    def of(cls, weight: np.ndarray, num_bytes: np.ndarray, edge: np.ndarray, vertex: np.ndarray) -> Hypergraph:
        """Build from distinct (edge, vertex) pairs; edges of fewer than two vertices tie nothing and are left out."""
        degree = np.bincount(edge, minlength=len(num_bytes))
        kept = degree >= 2
        at = np.flatnonzero(kept[edge])
        at = at[order_of(edge[at])]
        offsets = np.concatenate([[0], np.cumsum(degree[kept])])
        return cls(weight, offsets, vertex[at], num_bytes[kept])

    @property
    def edge(self) -> np.ndarray:
        """Edge of each pin: int64 [num_pins]."""
        return np.repeat(np.arange(len(self.num_bytes)), np.diff(self.offsets))

    def incidence(self) -> tuple[np.ndarray, np.ndarray]:
        """Edges of each vertex: (offsets int64 [num_vertices + 1], edges int64 [num_pins])."""
        offsets = np.concatenate([[0], np.cumsum(np.bincount(self.pins, minlength=len(self)))])
        return offsets, self.edge[order_of(self.pins)]

    def loads(self, part: np.ndarray, num_parts: int) -> np.ndarray:
        """Weight of each part in each dimension: int64 [num_parts, num_dimensions]."""
        total = np.zeros((num_parts, self.weight.shape[1]), np.int64)
        np.add.at(total, part, self.weight)
        return total

    def counts(self, part: np.ndarray, num_parts: int) -> np.ndarray:
        """Pins that each edge has in each part: int64 [num_edges, num_parts]."""
        key = self.edge * num_parts + part[self.pins]
        return np.bincount(key, minlength=len(self.num_bytes) * num_parts).reshape(-1, num_parts)

    def within(self, vertices: np.ndarray) -> Hypergraph:
        """The hypergraph over some of the vertices, renumbered in their order."""
        new = np.full(len(self), -1)
        new[vertices] = np.arange(len(vertices))
        held = new[self.pins] >= 0
        return Hypergraph.of(self.weight[vertices], self.num_bytes, self.edge[held], new[self.pins[held]])

    def contracted(self, cluster: np.ndarray, num_clusters: int) -> Hypergraph:
        """The hypergraph whose vertices are clusters; cluster: int64 [num_vertices], all of [0, num_clusters)."""
        edge, vertex = np.divmod(distinct(self.edge * num_clusters + cluster[self.pins])[0], num_clusters)
        return Hypergraph.of(self.loads(cluster, num_clusters), self.num_bytes, edge, vertex)


def cells_hypergraph(
    tokens: np.ndarray, cells: list[Any], group_work: np.ndarray, group_bytes: np.ndarray
) -> Hypergraph:
    """Build DCP's hypergraph: token blocks first, then the computation blocks of every mask.

    tokens: int64 [num_token_blocks]. cells: (q block, kv block, visible pairs, layers) of each mask. group_work: query
    heads of each head group. group_bytes: int64 [num_groups, 2], bytes of a token's q with o and of its kv. A
    computation block is a cell and a head group (the group changes fastest) and weighs in dimension 1 + mask; token
    blocks weigh their tokens in dimension 0. Every (mask, head group, token block) has an edge for q and o, which
    have the same readers and writers, and one for kv.
    """
    num_groups, num_tokens = len(group_work), len(tokens)
    sizes = [num_tokens] + [len(q) * num_groups for q, *_ in cells]
    weight = np.zeros((sum(sizes), 1 + len(cells)), np.int64)
    weight[:num_tokens, 0] = tokens
    groups = np.arange(num_groups)
    own = (np.arange(num_tokens)[:, None] * num_groups + groups).ravel()
    num_bytes, edges, vertices = [], [], []
    num_vertices, num_edges = num_tokens, 0
    for mask, (q, kv, area, layers) in enumerate(cells):
        vertex = num_vertices + np.arange(sizes[1 + mask])
        weight[vertex, 1 + mask] = (area[:, None] * group_work * layers).ravel()
        for side, block in enumerate((q, kv)):
            edges += [num_edges + own, num_edges + (block[:, None] * num_groups + groups).ravel()]
            vertices += [np.repeat(np.arange(num_tokens), num_groups), vertex]
            num_bytes.append((tokens[:, None] * group_bytes[:, side] * layers).ravel())
            num_edges += num_tokens * num_groups
        num_vertices += len(vertex)
    return Hypergraph.of(weight, *(np.concatenate(c).astype(np.int64) for c in (num_bytes, edges, vertices)))
