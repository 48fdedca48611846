"""Refine: hold every balance of a partitioned hypergraph at the least connectivity. Ours, for `dcp`.

A partitioner balances one weight; here every dimension (tokens, and the area of each mask) has a cap of its own.
Simulated annealing over moves, and exchanges of what weighs in dimension 0, lowers

    connectivity + price of what exceeds a cap

while the price grows and the temperature falls, so that a part may be too full on the way. First whole families move
(a token block with all computation of its queries in the same part), as no single vertex of a large edge is worth
moving alone; then single vertices. Deterministic: the random numbers are a fixed sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hsap.ir.sort import distinct
from hsap.loops import loop
from hsap.planners.hypergraph import Hypergraph

TURNS = 40
"""Steps of temperature and price; the last one takes no move for the worse."""
HOT_FAMILY, HOT, COLD = 0.3, 0.04, 0.004
"""Temperatures at first (for families, for single vertices) and at last, in units of the median edge's bytes."""
TRIES_FAMILY, TRIES = 3000, 150
"""Proposals per family and per single vertex."""
CHEAPEST, DEAREST = 1.0, 200.0
"""Prices, in that unit for every two edges of a vertex, of an excess as large as the median vertex."""
HALF = np.uint64(32)
SEED = np.uint64(88172645463325252)


class Parts(NamedTuple):
    """Parts and what they may hold. caps: float64 [num_parts, num_dimensions], the largest weight that costs nothing.

    node_of: int64 [num_parts]. far: what a byte costs more for each further node that an edge touches.
    """

    caps: np.ndarray
    node_of: np.ndarray
    far: float

    @staticmethod
    def alike(caps: np.ndarray) -> Parts:
        """Parts that are all equally far from each other."""
        return Parts(caps, np.zeros(len(caps), np.int64), 0.0)


class _State(NamedTuple):
    """A hypergraph, its partition, and the sums that tell what a move changes."""

    part: np.ndarray
    weight: np.ndarray
    first_edge: np.ndarray
    edges: np.ndarray
    offsets: np.ndarray
    pins: np.ndarray
    num_bytes: np.ndarray
    in_part: np.ndarray
    in_node: np.ndarray
    load: np.ndarray
    heavy: np.ndarray
    price: np.ndarray


def refine(graph: Hypergraph, part: np.ndarray, parts: Parts, families: tuple[np.ndarray, ...]) -> np.ndarray:
    """Improve a partition under caps: int64 [num_vertices], the new parts.

    families: int64 [num_vertices] each, what moves together where it is in one part, from coarse to fine.
    """
    num_parts = len(parts.caps)
    if num_parts < 2 or not len(graph):
        return part
    unit = float(np.median(graph.num_bytes)) if len(graph.num_bytes) else 1.0
    price = np.array([_price(graph, column, unit) for column in graph.weight.T])
    for family in families:
        keys, cluster = distinct(family * num_parts + part)
        coarse = graph.contracted(cluster, len(keys))
        part = _annealed(coarse, keys % num_parts, parts, price, unit * HOT_FAMILY, unit * COLD, TRIES_FAMILY)[cluster]
    return _annealed(graph, part, parts, price, unit * HOT, unit * COLD, TRIES)


def _price(graph: Hypergraph, weight: np.ndarray, unit: float) -> float:
    """Price of an excess of 1 in a dimension: the more edges its vertices have, the dearer they are to move."""
    mine = weight > 0
    if not mine.any():
        return 0.0
    degree = np.bincount(graph.pins, minlength=len(graph))[mine]
    return unit * max(float(np.median(degree)) / 2, 1.0) / float(np.median(weight[mine]))


def _annealed(
    graph: Hypergraph, part: np.ndarray, parts: Parts, price: np.ndarray, hot: float, cold: float, tries: int
) -> Any:
    """Anneal a copy of the partition: int64 [num_vertices]."""
    num_parts, num_nodes = len(parts.caps), int(parts.node_of.max()) + 1
    state = _State(
        part.copy(),
        graph.weight,
        *graph.incidence(),
        graph.offsets,
        graph.pins,
        graph.num_bytes.astype(np.float64),
        graph.counts(part, num_parts).astype(np.int32),
        graph.counts(parts.node_of[part], num_nodes).astype(np.int32),
        graph.loads(part, num_parts),
        np.flatnonzero(graph.weight[:, 0]),
        price,
    )
    steps = np.arange(TURNS) / (TURNS - 1)
    heat = hot * (cold / hot) ** steps
    heat[-1] = 0.0
    _anneal(state, parts, heat, CHEAPEST * (DEAREST / CHEAPEST) ** steps, -(-tries * len(part) // TURNS))
    return state.part


@loop
def _anneal(state: _State, parts: Parts, heat: np.ndarray, cost: np.ndarray, tries: int) -> None:
    """Propose moves, `tries` at each temperature and price; state is changed in place."""
    random = SEED
    for turn in range(len(heat)):
        for _ in range(tries):
            random, v, u, b = _propose(state, len(parts.caps), random)
            a = state.part[v]
            if a == b:
                continue
            change = cost[turn] * _overload(state, parts.caps, v, u, a, b) + _gain(state, parts, v, a, b)
            _put(state, parts.node_of, v, a, b)
            if u >= 0:
                change += _gain(state, parts, u, b, a)
                _put(state, parts.node_of, u, b, a)
            random = _next(random)
            chance = float(random >> HALF) / 2.0**32
            if change > 0.0 and (heat[turn] == 0.0 or chance >= np.exp(-change / heat[turn])):
                _put(state, parts.node_of, v, b, a)
                if u >= 0:
                    _put(state, parts.node_of, u, a, b)


@loop(inline="always")
def _propose(state: _State, num_parts: int, random: np.uint64) -> tuple[np.uint64, Any, Any, Any]:
    """Choose vertex v to go to part b, in exchange for vertex u there (-1: for none): (random, v, u, b)."""
    random = _next(random)
    kind = _below(random, 8)
    random = _next(random)
    # What weighs in dimension 0 is rare, but the balance of memory rests on it: two tries in eight, one an exchange.
    if kind < 2 and len(state.heavy) > 0:
        v = state.heavy[_below(random, len(state.heavy))]
        random = _next(random)
        if kind == 0:
            u = state.heavy[_below(random, len(state.heavy))]
            return random, v, u, state.part[u]
        anywhere = _below(random, 2) == 0
    else:
        v = _below(random, len(state.part))
        random = _next(random)
        anywhere = _below(random, 8) == 0
    random = _next(random)
    degree = state.first_edge[v + 1] - state.first_edge[v]
    if anywhere or degree == 0:
        return random, v, np.int64(-1), _below(random, num_parts)
    e = state.edges[state.first_edge[v] + _below(random, degree)]
    random = _next(random)
    at = state.offsets[e] + _below(random, state.offsets[e + 1] - state.offsets[e])
    return random, v, np.int64(-1), state.part[state.pins[at]]


@loop(inline="always")
def _gain(state: _State, parts: Parts, v: int, a: int, b: int) -> float:
    """Bytes that the connectivity grows by if v goes from part a to part b."""
    change = 0.0
    x, y = parts.node_of[a], parts.node_of[b]
    for i in range(state.first_edge[v], state.first_edge[v + 1]):
        e = state.edges[i]
        if state.in_part[e, a] == 1:
            change -= state.num_bytes[e]
        if state.in_part[e, b] == 0:
            change += state.num_bytes[e]
        if x != y:
            if state.in_node[e, x] == 1:
                change -= parts.far * state.num_bytes[e]
            if state.in_node[e, y] == 0:
                change += parts.far * state.num_bytes[e]
    return change


@loop(inline="always")
def _overload(state: _State, caps: np.ndarray, v: int, u: int, a: int, b: int) -> float:
    """Priced excess over the caps that is added if v goes from part a to part b, and u the other way."""
    change = 0.0
    for d in range(caps.shape[1]):
        w = state.weight[v, d]
        if u >= 0:
            w -= state.weight[u, d]
        if w != 0:
            excess = max(state.load[a, d] - w - caps[a, d], 0.0) + max(state.load[b, d] + w - caps[b, d], 0.0)
            excess -= max(state.load[a, d] - caps[a, d], 0.0) + max(state.load[b, d] - caps[b, d], 0.0)
            change += state.price[d] * excess
    return change


@loop(inline="always")
def _put(state: _State, node_of: np.ndarray, v: int, a: int, b: int) -> None:
    """Move v from part a to part b."""
    state.part[v] = b
    for d in range(state.weight.shape[1]):
        state.load[a, d] -= state.weight[v, d]
        state.load[b, d] += state.weight[v, d]
    for i in range(state.first_edge[v], state.first_edge[v + 1]):
        e = state.edges[i]
        state.in_part[e, a] -= 1
        state.in_part[e, b] += 1
        state.in_node[e, node_of[a]] -= 1
        state.in_node[e, node_of[b]] += 1


@loop(inline="always")
def _next(random: np.uint64) -> np.uint64:
    """The next of a fixed sequence of 64 random bits (xorshift, Marsaglia 2003)."""
    random ^= random << np.uint64(13)
    random ^= random >> np.uint64(7)
    random ^= random << np.uint64(17)
    return random


@loop(inline="always")
def _below(random: np.uint64, limit: int) -> np.int64:
    """A number in [0, limit) out of random bits."""
    return np.int64(((random >> HALF) * np.uint64(limit)) >> HALF)
