"""Stages: how long a strategy takes, from its schedule alone: no instruction is made and no buffer placed.

A rank goes through the stages as `hsap.compiler.lower` lays them out: it packs what it sends, starts the stage's
rounds, computes while they run, waits for them and folds in what arrived. So a stage takes it the longer of its blocks
and its rounds, and a round begins when both ends are there. What is done is said by the compiler's own passes (the
pipeline's `routes`, and `lay`); streams, buffers and copies for every intra rank are what is left out, so that 1,024
ranks are priced in the time of one column. Prices are the event clock's
(`hsap.sim.cost`), a round at a time.

What is shared is reckoned with as `hsap.tune.contention` says; a host's cores bound the whole: it takes a column no
less than all that its ranks want of them. What the event clock knows better: which message of a round has a port first,
who meets whom on a card, when a core is free, and all-to-alls whose ranks are not there at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hsap.compiler.lay import lay
from hsap.compiler.pipeline import routes
from hsap.compiler.trays import SpanTable
from hsap.ir.heads import HeadRun
from hsap.ir.problem import Cluster, Problem
from hsap.ir.schedule import DIRECTIONS, Strategy
from hsap.ir.sort import distinct
from hsap.tune.contention import PASSES, Links
from hsap.tune.counted import Cost, Counted
from hsap.tune.ends import Ends, rank_tokens
from hsap.tune.live import arena_bytes


@dataclass(frozen=True, slots=True)
class Priced:
    """A strategy's price. seconds[mask][direction] of one layer; arena_bytes, tokens: of the rank with the most."""

    seconds: tuple[tuple[float, float], ...]
    arena_bytes: int
    tokens: int

    def layer_s(self, problem: Problem, direction: int) -> float:
        """Seconds of one layer and direction, the mean over the model's layers."""
        layers = [count for _, count in problem.masks]
        return float(np.average([pair[direction] for pair in self.seconds], weights=layers))


def price(problem: Problem, strategy: Strategy, cluster: Cluster | None = None) -> Priced:
    """Price every mask and direction of a strategy on a cluster (None: the problem's).

    strategy: what `hsap.planners.run` gave for this problem. Deterministic; takes time in proportion to the strategy's
    blocks and transfers, and to the rounds of one column.
    """
    cluster = cluster or problem.cluster
    problem = replace(problem, topology=strategy.topology or problem.topology, cluster=cluster)
    table = SpanTable.of(strategy.shards, strategy.shards.spans)
    columns = _columns(problem)
    ends = Ends.of(problem, strategy.shards)
    seconds, arena = [], 0
    for pair in zip(strategy.forward, strategy.backward):
        both: list[float] = []
        for schedule, direction in zip(pair, DIRECTIONS):
            wide = next(routes(problem, strategy, schedule, direction))
            counted = Counted.of(problem, lay(table, wide, direction, problem.topology.inter_sp))
            at_end, first = np.zeros(problem.topology.inter_sp), ends.enter_s(direction)
            for share, members in columns:
                at_end = np.maximum(at_end, _column(problem, counted, share, members))
            both.append(float((first + at_end + ends.leave_s(direction)).max()))
            arena = max(arena, arena_bytes(problem, counted, Cost(problem, counted, columns[0][0])))
        seconds.append((both[0], both[1]))
    return Priced(tuple(seconds), arena, int(rank_tokens(problem, strategy.shards).max()))


def _columns(problem: Problem) -> list[tuple[HeadRun, list[int]]]:
    """The columns that differ, as (share of heads, intra indices that have as many and lie on the same nodes)."""
    intra = problem.topology.intra_sp
    nodes = problem.node_of.reshape(-1, intra)
    found: dict[tuple[Any, ...], tuple[HeadRun, list[int]]] = {}
    for j, share in enumerate(problem.heads.shares(intra)):
        found.setdefault((share.q_count, share.kv_count, nodes[:, j].tobytes()), (share, []))[1].append(j)
    return list(found.values())


def _column(problem: Problem, counted: Counted, share: HeadRun, members: list[int]) -> np.ndarray:
    """When each InterSP rank is done, counted from when its inputs are there: float64 [inter_sp] seconds."""
    laid, cost = counted.laid, Cost(problem, counted, share)
    cluster, inter = problem.cluster, problem.topology.inter_sp
    shape = (counted.num_stages, inter)
    pack, work, fold = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    cost.add_kernels(work)
    cost.add_packing(pack)
    cost.add_folding(fold)
    m = laid.messages
    edges, which = distinct((m.round * inter + m.src) * inter + m.dst)
    lead = np.empty(len(edges), np.int64)
    lead[which] = np.arange(len(which))
    round_, src, dst, stage, until = (column[lead] for column in (m.round, m.src, m.dst, m.stage, m.until))
    total = np.bincount(which, cost.message_bytes(), len(edges))
    links = Links.of(problem, members, round_, src, dst, total)
    launch_s = cluster.message_overhead_s * np.bincount(which, minlength=len(edges))
    borders = np.searchsorted(round_, np.arange(int(round_.max(initial=-1)) + 2))
    stages = (stage - laid.first_stage, until - laid.first_stage)
    own = (pack, work, fold)
    seconds = links.guess_s()
    done, start = _run(*own, (src, dst, seconds, launch_s, *stages), borders, cluster.comm_share)
    for _ in range(PASSES if (links.cards >= 0).any() else 0):
        seconds = links.corrected_s(start, seconds)
        done, start = _run(*own, (src, dst, seconds, launch_s, *stages), borders, cluster.comm_share)
    if cluster.cores is None:
        return done
    ends_s = np.zeros(inter)
    for end in (src, dst):
        np.add.at(ends_s, end, launch_s + cluster.comm_cores * links.alone_s)
    return np.maximum(done, _host_s(problem, sum(each.sum(axis=0) for each in own) + ends_s, members))


def _host_s(problem: Problem, core_s: np.ndarray, members: list[int]) -> np.ndarray:
    """Seconds that each InterSP rank's host needs for all that its ranks want of its cores: float64 [inter_sp]."""
    nodes = problem.node_of.reshape(-1, problem.topology.intra_sp)
    wanted = np.bincount(nodes.ravel(), np.repeat(core_s, nodes.shape[1]))
    return wanted[nodes[:, members[0]]] / problem.cluster.cores


def _run(
    pack: np.ndarray,
    work: np.ndarray,
    fold: np.ndarray,
    edges: tuple[np.ndarray, ...],
    borders: np.ndarray,
    share_lost: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Go through the stages: when each rank is done, float64 [num_ranks]; when each edge starts, float64 [num_edges].

    pack, work, fold: float64 [num_stages, num_ranks]. edges: source, destination and seconds of what a round carries
    between two ranks, seconds that its launch takes of either end, and the stages in which it leaves and is waited for;
    round by round at `borders`. share_lost: part of a rank's speed that it lacks while a round of its is under way.
    """
    src, dst, seconds, launch_s, stage_of, until = edges
    start = np.zeros(len(src))
    now, free, over_by = np.zeros(pack.shape[1]), np.zeros(pack.shape[1]), np.zeros(pack.shape)

    def after(amount: np.ndarray) -> np.ndarray:
        """When each rank has done so much more, its rounds being over at `free`."""
        slowed = np.minimum(amount * (share_lost / (1 - share_lost)), np.maximum(free - now, 0.0) * share_lost)
        return now + amount + slowed

    g, num_rounds = 0, len(borders) - 1
    for stage in range(len(pack)):
        now = after(pack[stage])
        while g < num_rounds and stage_of[borders[g]] == stage:
            mine = slice(borders[g], borders[g + 1])
            a, b = src[mine], dst[mine]
            if launch_s[borders[g]]:
                np.add.at(now, a, launch_s[mine])
                np.add.at(now, b, launch_s[mine])
            begun = np.maximum(free, now)
            start[mine] = np.maximum(begun[a], begun[b])
            over = start[mine] + seconds[mine]
            # A round has a rank send once and receive once at most.
            free = free.copy()
            free[a] = over
            free[b] = np.maximum(free[b], over)
            awaited = over_by[until[borders[g]]]
            awaited[a], awaited[b] = free[a], free[b]  # rounds of a rank end in their order
            g += 1
        now = np.maximum(after(work[stage]), over_by[stage])
        now = after(fold[stage])
    return now, start
