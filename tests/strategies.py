"""Strategies made by hand, or by chance: what no planner of the package does yet the compiler must do right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.problem import Problem, Topology
from hsap.ir.schedule import DIRECTIONS, OUTPUTS, Schedule, Strategy, Transfers
from hsap.planners.zigzag import zigzag_shards

NUM_STAGES = 4


def scattered(problem: Problem, num_groups: int = 2, seed: int = 0, *, relay=False, detours=False,
              topology: Topology | None = None) -> Strategy:  # fmt: skip
    """Every block and head group on a rank and in a stage drawn at random, forward and backward apart.

    A group often goes with the one before it, for some blocks only, so that runs of several lengths come about.
    detours: partial results go home over a rank drawn at random, as transfers of the planner's own.
    """
    random = np.random.default_rng(seed)
    num_ranks = (topology or problem.topology).inter_sp
    shards = zigzag_shards(problem.layout.document_spans, num_ranks)
    both = []
    for direction in DIRECTIONS:
        blocks = [cut_blocks(shards, problem.slices(mask)) for mask in range(len(problem.masks))]
        made = [_scatter(part, num_groups, num_ranks, random) for part in blocks]
        both.append(tuple(_with_detours(shards, s, direction, num_ranks, random) if detours else s for s in made))
    return Strategy(shards, *both, num_groups, relay=relay, topology=topology)


def _scatter(blocks: Blocks, num_groups: int, num_ranks: int, random: np.random.Generator) -> Schedule:
    block = np.repeat(np.arange(len(blocks)), num_groups)
    group = np.tile(np.arange(num_groups), len(blocks))
    rank, stage = (random.integers(0, most, len(block)) for most in (num_ranks, NUM_STAGES))
    follows = (group > 0) & (random.random(len(block)) < random.choice([0.3, 0.9, 1.0]))
    lead = np.maximum.accumulate(np.where(follows, 0, np.arange(len(block))))
    return Schedule(blocks, block, group, rank[lead], stage[lead])


def _with_detours(shards: Shards, schedule: Schedule, direction, num_ranks: int, random) -> Schedule:
    rows = []
    for role in OUTPUTS[direction]:
        held: dict[tuple[int, int], dict[int, int]] = {}
        for shard, group, rank, stage in zip(schedule.shard_of(role), schedule.group, schedule.rank, schedule.stage):
            if rank != shards.home[shard]:
                last = held.setdefault((int(shard), int(group)), {})
                last[int(rank)] = max(last.get(int(rank), 0), int(stage))
        for (shard, group), last in held.items():
            home, relay = int(shards.home[shard]), int(random.integers(num_ranks))
            over = {rank for rank in last if relay != home and rank != relay and random.random() < 0.8}
            if over:  # the relay may have nothing of its own
                last = {relay: 0} | last
                last[relay] = max([last[relay], *(last[rank] + 1 for rank in over)])
            for rank, stage in last.items():
                rows.append((role, shard, rank, relay if rank in over else home, stage + 1, group))
    columns = np.array(rows, np.int64).reshape(-1, 6).T
    return replace(schedule, transfers=Transfers.of(*columns) if rows else None)
