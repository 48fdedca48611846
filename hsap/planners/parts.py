"""What several planners share: ways to cut a batch into shards, areas of its rows, one schedule for both directions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.problem import Problem
from hsap.ir.schedule import Schedule, Strategy
from hsap.ir.slice import K0, K1, Q0, Q1, area, cut
from hsap.ir.sort import distinct, order_of
from hsap.ir.span import ranges

Placement = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Gives the ranks that compute blocks, from the home ranks of their queries and of their keys."""


def equal_shards(num_tokens: int, num_ranks: int) -> Shards:
    """Cut the packed sequence into one contiguous shard per rank, equal ± 1 token."""
    borders = num_tokens * np.arange(num_ranks + 1) // num_ranks
    return Shards.of([(rank, np.array([borders[rank : rank + 2]])) for rank in range(num_ranks)])


def same_both_ways(problem: Problem, shards: Shards, schedule: Callable[[Blocks], Schedule]) -> Strategy:
    """Make the strategy whose backward computes every block where and when the forward does."""
    schedules = tuple(schedule(cut_blocks(shards, problem.slices(mask))) for mask in range(len(problem.masks)))
    return Strategy(shards, schedules, schedules)


def query_home(q_home: np.ndarray, kv_home: np.ndarray) -> np.ndarray:
    """Place every block where its queries live: only KV travels."""
    return q_home


def mean_areas(problem: Problem, spans: np.ndarray) -> np.ndarray:
    """Count the visible pairs of each span's queries, as the mean over the model's layers: float64 [num_spans].

    spans: sorted disjoint span set [n, 2].
    """
    everything = np.array([[0, max(problem.layout.num_tokens, 1)]])
    total = np.zeros(len(spans))
    for mask, (_, num_layers) in enumerate(problem.masks):
        pieces, q_span, _ = cut(problem.slices(mask), spans, everything)
        total += num_layers * np.bincount(q_span, weights=area(pieces), minlength=len(spans))
    return total / sum(num_layers for _, num_layers in problem.masks)


def split_by_need(problem: Problem, shards: Shards, *placements: Placement) -> Shards:
    """Split shards so that what travels as a whole shard is needed as a whole.

    A home rank's rows are told apart by the ranks that need their queries or their KV, in each mask and under each of
    the placements; rows of one home that are needed alike become one shard, in token order. So nothing travels that a
    block doesn't use, in as few shards as that takes.
    """
    by_position = order_of(shards.spans[:, 0])
    spans, home = shards.spans[by_position], np.repeat(shards.home, np.diff(shards.offsets))[by_position]
    found = []
    for mask, place in itertools.product(range(len(problem.masks)), placements):
        pieces, q_span, k_span = cut(problem.slices(mask), spans, spans)
        found += _needs(pieces, home[q_span], home[k_span], place)
    begin, end = (np.concatenate([need[i] for need in found]) for i in (0, 1))
    who = np.concatenate([rank * len(found) + i for i, (_, _, rank) in enumerate(found)])
    borders = np.unique(np.concatenate([spans.ravel(), begin, end]))
    need, atom = ranges(np.searchsorted(borders, begin), np.searchsorted(borders, end))
    num_atoms, count = max(len(borders) - 1, 0), int(who.max(initial=0)) + 1
    atom, who = np.divmod(distinct(atom * count + who[need])[0], count)
    mark = np.zeros(num_atoms, np.uint64)
    np.add.at(mark, atom, scramble(who))
    at = home[np.searchsorted(spans[:, 0], borders[:num_atoms], side="right") - 1] if num_atoms else home
    return grouped(borders, at, mark)


def _needs(pieces: np.ndarray, q_home: np.ndarray, kv_home: np.ndarray, place: Placement) -> list[tuple[Any, ...]]:
    """List which query rows and which KV rows are needed away from home: (first, stop, rank) of both."""
    rank = place(q_home, kv_home)
    found = []
    for home, first, stop in ((q_home, Q0, Q1), (kv_home, K0, K1)):
        away = np.flatnonzero(home != rank)
        found.append((pieces[away, first], pieces[away, stop], rank[away]))
    return found


def scramble(values: np.ndarray) -> np.ndarray:
    """Give small integers 64 random-looking bits (SplitMix64), so that sums tell sets of them apart: uint64 [n].

    Two sets of equal sum would share a shard: rows too many would travel, and no result be wrong.
    """
    z = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def grouped(borders: np.ndarray, home: np.ndarray, mark: np.ndarray) -> Shards:
    """Join the spans between borders into one shard for each home and mark, in token order."""
    order = np.lexsort([mark, home])  # stable: token order within
    home, mark, start, stop = home[order], mark[order], borders[:-1][order], borders[1:][order]
    if not len(home):
        return Shards.of([])
    fresh = np.r_[True, (home[1:] != home[:-1]) | (mark[1:] != mark[:-1])]
    joins = np.r_[False, start[1:] == stop[:-1]] & ~fresh
    first = np.flatnonzero(~joins)
    spans = np.stack([start[first], stop[np.append(first[1:], len(start)) - 1]], axis=1)
    return Shards(spans, np.append(np.flatnonzero(fresh[first]), len(first)), home[fresh])
