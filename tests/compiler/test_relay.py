"""Relay: each row crosses a node border once, nothing else changes, and everything still comes in time."""

from dataclasses import replace

import numpy as np
import pytest

from hsap.compiler.order import order, shard_of
from hsap.compiler.pipeline import build
from hsap.compiler.relay import relay
from hsap.ir.block import Shards, cut_blocks
from hsap.ir.effects import flows
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.program import Op, Role
from hsap.ir.schedule import DIRECTIONS, INPUTS, OUTPUTS, Schedule, Transfers
from hsap.ir.slice import UNBOUNDED
from hsap.ir.span import positions
from tests.strategies import scattered

HEADS = HeadShape(4, 2, 8, "bf16")
NODES = np.array([0, 0, 1, 1, 1])
FULL = (-UNBOUNDED, UNBOUNDED)


def rows_of(table) -> list[tuple[int, ...]]:
    """(role, shard, group, src, dst, stage) of transfers, sorted."""
    return sorted(zip(*(getattr(table, name).tolist() for name in table.__slots__[:-1])))


def moved(rank, stage, slices, sizes=(10,) * 5, transfers=None, direction="forward"):
    """Transfers of blocks that are computed at `rank` in `stage`, over the ranks of `NODES`, relayed."""
    borders = np.cumsum([0, *sizes])
    shards = Shards.of([(i, borders[None, i : i + 2]) for i in range(len(sizes))])
    blocks = cut_blocks(shards, np.array(slices))
    schedule = Schedule.of(blocks, np.array(rank), np.array(stage), transfers)
    return [rows_of(t) for t in relay(shards, schedule, order(shards, schedule, direction), HEADS, NODES)]


def test_the_earliest_user_gets_a_row_and_passes_it_on():
    """KV of rank 0 is used on 2, 3 and 4, first on 3: it comes there as it would, and goes on in the others' time."""
    arriving, _ = moved([2, 3, 4], [5, 2, 4], [(20, 50, 0, 10, *FULL)])
    assert arriving == [(Role.KV, 0, 0, 0, 3, 1), (Role.KV, 0, 0, 3, 2, 4), (Role.KV, 0, 0, 3, 4, 3)]


def test_of_users_as_early_the_least_busy_one_passes_on_and_gets_the_row_a_stage_before():
    """Rank 2 passes the larger row on, so 3 does with the smaller one; stages below 0 are stages too."""
    arriving, _ = moved([2, 2, 3, 3], [0] * 4, [(30, 50, 0, 30, *FULL)], (10, 20, 10, 10, 10))
    smaller = [(Role.KV, 0, 0, 0, 3, -2), (Role.KV, 0, 0, 3, 2, -1)]
    assert arriving == [*smaller, (Role.KV, 1, 0, 1, 2, -2), (Role.KV, 1, 0, 2, 3, -1)]


def test_partial_results_of_a_node_are_merged_before_they_leave_it():
    """o of rank 0's queries from 2, 3, 4, which have received alike: the last to finish merges. 1 is in home's node."""
    rank, stage = [0, 1, 2, 3, 4], [0, 1, 1, 3, 2]
    routes = Transfers.of(Role.Q, 0, [0, 0, 0, 0], [1, 2, 3, 4], 0)
    _, leaving = moved(rank, stage, [(0, 10, 0, 50, *FULL)], transfers=routes)
    assert leaving == [
        (Role.O, 0, 0, 1, 0, 2),
        (Role.O, 0, 0, 2, 3, 2),
        (Role.O, 0, 0, 3, 0, 4),
        (Role.O, 0, 0, 4, 3, 3),
    ]


def test_the_rank_that_has_received_least_merges():
    """As above, but 3 has received KV as well."""
    routes = Transfers.of(Role.Q, 0, [0, 0, 0], [2, 3, 4], 0)
    _, leaving = moved([3, 2, 3, 4], [2, 1, 3, 2], [(0, 10, 10, 50, *FULL)], transfers=routes)
    assert leaving == [(Role.O, 0, 0, 2, 4, 2), (Role.O, 0, 0, 3, 4, 4), (Role.O, 0, 0, 4, 0, 5)]


def test_what_the_planner_routed_stays():
    routes = Transfers.of(Role.KV, 0, [0, 0, 0], [2, 3, 4], [0, 0, 0])
    arriving, _ = moved([2, 3, 4], [1, 1, 1], [(20, 50, 0, 10, *FULL)], transfers=routes)
    assert arriving == rows_of(routes)


def row_bytes(role: Role, q_heads: int, kv_heads: int) -> int:
    """Bytes of a bf16 row of 8 elements a head: k and v, or the queries' with their float32 statistics."""
    if role in (Role.KV, Role.DKV):
        return 2 * kv_heads * 8 * 2
    return q_heads * (8 * 2 + 4 * {Role.O: 1, Role.DO: 2}.get(role, 0))


def bytes_once(problem: Problem, strategy, schedule: Schedule, direction: str) -> int:
    """Bytes between nodes if each row goes once to, or comes once from, each node but its home's."""
    intra, tokens, total = problem.topology.intra_sp, strategy.shards.tokens.tolist(), 0
    node = problem.node_of.reshape(-1, intra)[:, 0].tolist()
    for role in INPUTS[direction] + OUTPUTS[direction]:
        there = {
            (shard, group, node[rank])
            for shard, group, rank in zip(shard_of(schedule, role).tolist(), schedule.group.tolist(), schedule.rank)
            if node[rank] != node[strategy.shards.home[shard]]
        }
        for share in problem.heads.shares(intra):
            runs = problem.heads.groups(share, strategy.num_groups)
            total += sum(tokens[shard] * row_bytes(role, runs[g].q_count, runs[g].kv_count) for shard, g, _ in there)
    return total


@pytest.mark.parametrize(("topology", "ranks_per_node"), [("8x1", 4), ("9x1", 3), ("4x2", 4), ("4x4", 8), ("5x1", 2)])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_bytes_between_nodes(topology, ranks_per_node, num_groups):
    problem = Problem(
        Layout.from_lengths((33, 1, 60, 7, 100)),
        HeadShape(8, 4, 8, "bf16"),
        Topology.parse(topology),
        cluster=Cluster(ranks_per_node=ranks_per_node),
    )
    strategy = scattered(problem, num_groups, seed=3, relay=True)
    plan = build(problem, strategy, "scattered", {})
    direct = build(problem, replace(strategy, relay=False), "scattered", {})
    saved = 0
    for d, direction in enumerate(DIRECTIONS):
        schedule = getattr(strategy, direction)[0]
        sent, before = (flows(p, p.programs[0][d]) for p in (plan, direct))
        assert sent.between_nodes(problem.node_of) == bytes_once(problem, strategy, schedule, direction)
        assert sent.num_bytes.sum() == before.num_bytes.sum()
        for role in INPUTS[direction]:
            assert np.array_equal(*(received(p, d, role) for p in (plan, direct)))
        saved += before.between_nodes(problem.node_of) - sent.between_nodes(problem.node_of)
    assert saved > 0


def received(plan, direction: int, role: Role) -> np.ndarray:
    """Rows × heads of a role that each rank receives."""
    p = plan.programs[0][direction]
    here = np.flatnonzero((p.op == Op.RECV) & (p.role == role))
    rows = np.array([len(positions(plan.spans[a:b])) for a, b in p.rows[here]])
    count = p.heads[here, 3 if role == Role.KV else 1]
    return np.bincount(p.rank[here], weights=rows * count, minlength=plan.num_ranks)
