"""Order: every row arrives before it is used, from where it is, and results leave after the last addition."""

from dataclasses import replace

import numpy as np
import pytest

from hsap.compiler.order import order, routed_roles, shard_of
from hsap.ir.block import Shards, cut_blocks
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.ir.program import Role
from hsap.ir.schedule import INPUTS, OUTPUTS, Schedule, Transfers
from hsap.planners import PLANNERS, run

LENGTHS = (40, 1, 7, 90, 13)


def rows_of(table) -> list[tuple[int, ...]]:
    """(role, shard, group, src, dst, stage) of transfers, sorted."""
    return sorted(zip(*(getattr(table, name).tolist() for name in table.__slots__[:-1])))


def needs(shards: Shards, schedule: Schedule, roles) -> dict[tuple[int, int, int, int], list[int]]:
    """Stages in which (role, shard, group) is used on a rank that isn't its home."""
    out: dict[tuple[int, int, int, int], list[int]] = {}
    for role in roles:
        for shard, group, rank, stage in zip(shard_of(schedule, role), schedule.group, schedule.rank, schedule.stage):
            if shards.home[shard] != rank:
                out.setdefault((int(role), int(shard), int(group), int(rank)), []).append(int(stage))
    return out


@pytest.fixture
def three() -> tuple[Shards, Schedule]:
    """Three shards of one causal document; rank 0 computes (2, 0) in stage 2, with a query from rank 2."""
    shards = Shards.of([(rank, np.array([[10 * rank, 10 * rank + 10]])) for rank in range(3)])
    blocks = cut_blocks(shards, np.array([[0, 30, 0, 30, -29, 0]]))
    assert list(zip(blocks.q, blocks.kv)) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    return shards, Schedule.of(blocks, np.array([0, 1, 1, 0, 2, 2]), np.array([0, 1, 0, 2, 1, 0]))


def test_direct_transfers(three):
    arriving, leaving = order(*three, "forward")
    assert rows_of(arriving) == [(Role.Q, 2, 0, 2, 0, 1), (Role.KV, 0, 0, 0, 1, 0), (Role.KV, 1, 0, 1, 2, 0)]
    assert rows_of(leaving) == [(Role.O, 2, 0, 0, 2, 3)]


def test_backward_brings_the_outputs_gradient_and_returns_both_gradients(three):
    arriving, leaving = order(*three, "backward")
    assert (Role.DO, 2, 0, 2, 0, 1) in rows_of(arriving) and (Role.Q, 2, 0, 2, 0, 1) in rows_of(arriving)
    assert rows_of(leaving) == [(Role.DQ, 2, 0, 0, 2, 3), (Role.DKV, 0, 0, 1, 0, 2), (Role.DKV, 1, 0, 2, 1, 2)]


def test_routes_of_the_planner_stay_as_they_are(three):
    """Rank 0's part of dq goes by rank 1, dkv straight home; forward has neither role, and its o does too."""
    shards, schedule = three
    given = Transfers.of(Role.DQ, 2, [0], [1], [7]), Transfers.of(Role.DQ, 2, [1], [2], [9])
    routed = replace(schedule, transfers=Transfers.join(*given))
    assert rows_of(order(shards, routed, "forward")[1]) == [(Role.O, 2, 0, 0, 2, 3)]
    _, leaving = order(shards, routed, "backward")
    assert rows_of(leaving)[:2] == [(Role.DQ, 2, 0, 0, 1, 7), (Role.DQ, 2, 0, 1, 2, 9)]
    assert rows_of(leaving)[2:] == [(Role.DKV, 0, 0, 1, 0, 2), (Role.DKV, 1, 0, 2, 1, 2)]


def test_nothing_travels_for_one_rank():
    shards = Shards.of([(0, np.array([[0, 5]]))])
    blocks = cut_blocks(shards, np.array([[0, 5, 0, 5, -4, 0]]))
    for direction in INPUTS:
        arriving, leaving = order(shards, Schedule.of(blocks, np.array([0]), np.array([0])), direction)
        assert len(arriving) == len(leaving) == 0


@pytest.mark.parametrize("direction", INPUTS)
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_use_is_served_in_time(planner, direction):
    problem = Problem(Layout.from_lengths(LENGTHS), HeadShape(4, 2, 8), Topology(5, 1))
    strategy = run(planner, problem, {})
    shards, schedule = strategy.shards, getattr(strategy, direction)[0]
    arriving, leaving = order(shards, schedule, direction)
    arrival = {}
    for role, shard, group, src, dst, stage in sorted(rows_of(arriving), key=lambda row: row[-1]):
        held_since = -1 if shards.home[shard] == src else arrival[role, shard, group, src]
        assert stage > held_since, "sent on before it was there"
        assert (role, shard, group, dst) not in arrival, "sent twice to one rank"
        arrival[role, shard, group, dst] = stage
    for key, stages in needs(shards, schedule, INPUTS[direction]).items():
        assert arrival[key] < min(stages)
    returned = {(role, shard, group, src): (dst, stage) for role, shard, group, src, dst, stage in rows_of(leaving)}
    expected = needs(shards, schedule, OUTPUTS[direction])
    assert {key: dst for key, (dst, _) in returned.items()} == {key: shards.home[key[1]] for key in expected}
    for key, stages in expected.items():
        stage = returned[key][1]
        assert stage > max(stages) if key[0] in routed_roles(schedule) else stage == max(stages) + 1


def test_a_ring_forwards_what_it_got():
    """KV of shard 0 goes 0 → 1 → 2 → 3, a hop a stage, and not from its home each time."""
    problem = Problem(Layout.from_lengths([40]), HeadShape(4, 2, 8), Topology(4, 1))
    strategy = run("ring", problem, {})
    arriving, _ = order(strategy.shards, strategy.forward[0], "forward")
    hops = [row[3:] for row in rows_of(arriving) if row[:2] == (Role.KV, 0)]
    assert hops == [(0, 1, 0), (1, 2, 1), (2, 3, 2)]
