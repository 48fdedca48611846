"""What a strategy makes travel, against what its blocks see: written out row by row."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from hsap.compiler.order import order
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.ir.program import Role
from hsap.ir.slice import dense
from hsap.planners import run

MASKS = ("causal", "full", "window:5", "lambda:2,4", "blockwise:4,2,1,1", "shared_question:2,20", "prefix:3")


def problem_of(lengths, ranks, masks=("causal",), heads=(8, 2)):
    return Problem(
        Layout.from_lengths(lengths), HeadShape(*heads, 64), Topology(ranks, 1), tuple((m, 1) for m in masks)
    )


def homes(strategy, num_tokens):
    """Home rank of each token: int64 [num_tokens]."""
    out = np.full(num_tokens, -1)
    owner = np.repeat(strategy.shards.home, np.diff(strategy.shards.offsets))
    for (a, b), rank in zip(strategy.shards.spans, owner, strict=True):
        out[a:b] = rank
    return out


def tokens_of(shards, shard):
    spans = shards.spans[shards.offsets[shard] : shards.offsets[shard + 1]]
    return np.concatenate([np.arange(a, b) for a, b in spans])


def received(strategy, direction="forward", mask=0):
    """Rows that arrive at each rank: {(role name, rank): sorted token positions}, each as often as it arrives."""
    got = defaultdict(list)
    arriving, leaving = order(strategy.shards, getattr(strategy, direction)[mask], direction)
    for table in (arriving, leaving):
        for role, shard, dst in zip(table.role.tolist(), table.shard.tolist(), table.dst.tolist(), strict=True):
            got[Role(role).name, dst].extend(tokens_of(strategy.shards, shard).tolist())
    return {key: sorted(rows) for key, rows in got.items()}


def wanted(problem, home, place, mask=0):
    """Rows of q and KV that each rank must get if it computes the pairs that `place(q home, kv home)` gives it."""
    q, k = np.nonzero(dense(problem.slices(mask), problem.layout.num_tokens))
    rank = place(home[q], home[k])
    need = defaultdict(set)
    for role, token in (("Q", q), ("KV", k)):
        away = home[token] != rank
        for r, t in zip(rank[away].tolist(), token[away].tolist()):
            need[role, r].add(t)
    return {key: sorted(rows) for key, rows in need.items()}


def loads(problem, planner, **options):
    """(tokens, areas) of each rank, the areas summed over masks and their layers."""
    strategy = run(planner, problem, options)
    ranks = problem.topology.inter_sp
    tokens = np.bincount(strategy.shards.home, weights=strategy.shards.tokens, minlength=ranks)
    area = np.zeros(ranks)
    for schedule, (_, layers) in zip(strategy.forward, problem.masks, strict=True):
        area += layers * np.bincount(schedule.rank, weights=schedule.blocks.area[schedule.block], minlength=ranks)
    return tokens, area


def excess(load):
    return load.max() / load.mean() - 1
