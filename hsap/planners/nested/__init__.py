"""Nested: documents to nodes, then to ranks, then to tiles, with row intervals of a document nested in one another.

Ours; the flagship. What it rests on:
- A causal document's rows [a, b) need the keys of all rows before b. A bin that computes several of its row intervals
  needs keys up to the last of them only, less those it owns: **a prefix that sits with the same document's tail is
  free.** A suffix is rich in pairs, a prefix or a short document in tokens: mixing them fills both caps with few cuts.
- Bytes between nodes count once per node, as relays pass rows on inside: so nodes come first (`cost` counts what each
  node receives), then every node deals what it got to its ranks with the same code.
- Two ranks may share rows by head groups, four or eight by columns of keys too (2-D tiles, cheaper than rows where a
  suffix is short beside what it sees), and q and o travel within the tile.
Steps: `peel` makes first placements, `search` improves the best of them, `repair` brings areas and tokens under their
caps exactly, `strategy` turns pieces into shards and blocks. Cost: a few thousand proposals a level, some 10 ms.
Options: area_slack, token_slack: excess of the busiest rank over the mean that is allowed. Where a single row or token
is more than that, it can't hold. effort: proposals of the search, in hundreds; 10 is quick, 1000 is thorough. It is
seeded, and never looks at the clock.
"""

from __future__ import annotations

import numpy as np

from hsap.ir.check import number, whole
from hsap.ir.precision import Precision, row_bytes
from hsap.ir.problem import Problem
from hsap.ir.program import Role, Space
from hsap.ir.schedule import Strategy
from hsap.planners.nested.cost import Documents
from hsap.planners.nested.levels import (
    Table,
    inside,
    part_of_documents,
    rules_of,
    tabulate,
    whole_documents,
)
from hsap.planners.nested.search import solve
from hsap.planners.nested.strategy import strategy_of

NODE_SLACK = 0.8
"""Share of the slack that nodes may use; the rest is for their ranks."""
CARE = 0.0005
"""What caps are lowered by, so that rounding rows doesn't exceed them."""
PEAK = 4.0


def nested(problem: Problem, area_slack: float = 0.05, token_slack: float = 0.05, effort: int = 100) -> Strategy:
    """Plan documents nested in nodes and ranks, balanced in area and in tokens."""
    slack = [
        number("planner nested: area_slack, as 0.05 for 5 % over the mean,", area_slack, zero=True),
        number("planner nested: token_slack, as 0.05 for 5 % over the mean,", token_slack, zero=True),
    ]
    effort = whole("planner nested: effort, in hundreds of proposals,", effort)
    groups = head_groups(problem)
    documents, starts = documents_of(problem)
    table = place(problem, documents, starts, groups, np.array(slack), 100 * effort)
    return strategy_of(problem, table, groups)


def head_groups(problem: Problem) -> int:
    """Head groups that ranks may share rows by: a power of two up to 8 that divides the column's KV heads."""
    share = problem.heads.shares(problem.topology.intra_sp)[0]
    return next(g for g in (8, 4, 2, 1) if share.kv_count % g == 0)


def documents_of(problem: Problem) -> tuple[Documents, np.ndarray]:
    """Describe documents by falling area, with the first token of each."""
    length = np.array(problem.layout.lengths, np.int64)
    order = np.argsort(-length, kind="stable")
    starts = problem.layout.cu_seqlens[:-1][order]
    length = length[order]
    return Documents(length, np.ones(len(length)), np.full(len(length), -1), np.zeros((0, 2))), starts


def row_costs(problem: Problem, groups: int) -> tuple[float, float, float]:
    """Bytes of one head group's row of kv, q and o on the network."""
    share = problem.heads.shares(problem.topology.intra_sp)[0]
    precision = Precision.of(problem.heads.dtype, problem.wire_dtype)
    costs = (
        sum(row_bytes(precision, role, Space.ARENA, False, np.array(share), problem.heads.head_dim)) / groups
        for role in (Role.KV, Role.Q, Role.O)
    )
    return tuple(float(c) for c in costs)


def place(problem: Problem, documents: Documents, starts, groups: int, slack: np.ndarray, proposals: int) -> Table:
    """Deal documents to nodes and what each gets to its ranks."""
    costs = row_costs(problem, groups)
    num_ranks = problem.topology.inter_sp
    nodes = problem.node_of[:: problem.topology.intra_sp]
    first_rank = np.flatnonzero(np.diff(nodes, prepend=-1))
    size = np.diff(first_rank, append=num_ranks)
    mean = totals(documents) / num_ranks
    caps = np.maximum(mean * (1 + slack - CARE), np.ceil(mean * [0, 1]))
    pieces, counts = whole_documents(documents.length, groups)
    if len(size) > 1:
        loose = np.maximum(mean * (1 + slack * NODE_SLACK), np.ceil(mean * [0, 1]))
        rules = rules_of(costs, groups, loose[:, None] * size, 0.0)
        pieces, counts = search_level(pieces, counts, documents, rules, proposals, 100, (4.0, 64.0), min(2, groups), 1)
    tables = []
    for x in range(len(size)):
        template, sizes, which = inside(pieces, counts, x, groups) if len(size) > 1 else (pieces, counts, np.arange(len(counts)))
        if not len(which):
            continue
        own = part_of_documents(documents, which)
        rules = rules_of(costs, groups, np.repeat(caps[:, None], size[x], axis=1), PEAK)
        placed, sizes = search_level(template, sizes, own, rules, proposals // 3, 48, (8.0, 200.0), 8, 2 + x)
        tables.append(tabulate(placed, sizes, starts[which], own.length, groups, first_rank[x]))
    if not tables:
        return Table(np.zeros((0, 3), np.int64), np.zeros((0, 7), np.int64))
    return Table(*(np.concatenate(parts) for parts in zip(*tables)))


def totals(documents: Documents) -> np.ndarray:
    """Pairs and tokens of all documents: float64 [2]."""
    return np.array([(documents.weight * documents.length * (documents.length + 1) / 2).sum(), documents.length.sum()], float)


def search_level(template, counts, documents, rules, proposals, starts, price, max_order, seed):
    """Solve one level: (pieces, counts)."""
    num_bins = rules.caps.shape[1]
    places = 2 * template.shape[1] + 3 * num_bins + 8
    heat = (0.004, 0.0003)
    pieces, sizes, _, _ = solve(
        template, counts, documents, rules, wishes(starts, max_order, seed), proposals, heat, price, max_order, places, seed
    )
    return pieces, sizes


def wishes(starts: int, max_order: int, seed: int) -> np.ndarray:
    """Draw the parameters of first placements, see `peel`: float64 [starts, 6]."""
    r = np.random.default_rng(seed)
    out = np.stack([
        r.uniform(-0.5, 1, starts), r.uniform(-0.5, 1, starts), r.choice([0, 0.3, 0.6, 1], starts),
        r.choice([0, 0, 0.25, 0.5, 1], starts), r.choice([o for o in (1, 2, 4, 8) if o <= max_order], starts),
        r.uniform(0.55, 1.0, starts),
    ], axis=1)  # fmt: skip
    out[:2, :4] = (0.5, 0.5, 0, 0), (0.9, 0.9, 0, 0)
    return out[:starts]
