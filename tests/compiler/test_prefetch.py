"""Prefetch: transfers start earlier and end later, never before what they carry is there, and nothing else changes."""

from dataclasses import replace

import numpy as np
import pytest

from hsap.compiler.order import order
from hsap.compiler.pipeline import build
from hsap.compiler.prefetch import prefetch
from hsap.ir.effects import attended_pairs, flows
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.program import Op, Role
from hsap.ir.schedule import DIRECTIONS, Transfers
from hsap.verify import verify
from tests.strategies import scattered

NOTHING = Transfers.of(*[np.zeros(0)] * 5)


def times(tables) -> list[list[tuple[int, int]]]:
    """(stage, until) of the transfers of each table."""
    return [list(zip(table.stage.tolist(), table.until.tolist())) for table in tables]


def test_what_is_at_home_leaves_ahead_and_what_is_passed_on_as_soon_as_it_is_there():
    """KV of shard 0 goes 0 → 1 → 2 → 3 in stages 1, 4 and 5; stages below 0 are stages too."""
    come = Transfers.of(Role.KV, [0, 0, 0, 1], [0, 1, 2, 3], [1, 2, 3, 1], [1, 4, 5, -1])
    assert times(prefetch((come, NOTHING), 2)) == [[(-1, 1), (2, 4), (5, 5), (-1, -1)], []]
    assert times(prefetch((come, NOTHING), 1)) == [[(0, 1), (3, 4), (5, 5), (-1, -1)], []]
    assert times(prefetch((come, NOTHING), 0)) == [[(1, 1), (4, 4), (5, 5), (-1, -1)], []]


def test_results_are_folded_in_later_but_before_the_sum_goes_on():
    """O of shard 0 goes 3 → 2 in stage 1, 2 → 1 in stage 4 and 1 → 0, home, in stage 5, the last of all."""
    leave = Transfers.of(Role.O, 0, [3, 2, 1], [2, 1, 0], [1, 4, 5])
    other = Transfers.of(Role.O, 1, 3, 0, 2)
    assert times(prefetch((NOTHING, Transfers.join(leave, other)), 2)) == [[], [(1, 3), (4, 4), (5, 5), (2, 4)]]


def test_results_of_the_last_stage_add_none():
    leave = Transfers.of(Role.O, [0, 1], [1, 2], 0, [7, 5])
    assert times(prefetch((NOTHING, leave), 3)) == [[], [(7, 7), (5, 7)]]


def test_rows_of_other_roles_shards_and_groups_are_others():
    """KV of shard 0 comes to rank 1, which then sends all but that from home."""
    role, shard, group = [Role.KV, Role.Q, Role.KV, Role.KV], [0, 0, 1, 0], [0, 0, 0, 1]
    come = Transfers.of(role, shard, [0, 1, 1, 1], [1, 2, 2, 2], [1, 5, 5, 5], group)
    assert times(prefetch((come, NOTHING), 2))[0] == [(1, 1)] + [(3, 5)] * 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ahead", [1, 2, 50])
def test_plans_stay_right_and_carry_the_same(seed: int, ahead: int):
    """Strategies drawn at random, with detours, relays, head groups and IntraSP: verified, of equal bytes and work."""
    random = np.random.default_rng(seed)
    problem = Problem(
        Layout.from_lengths(random.integers(1, 90, 6).tolist()),
        HeadShape(8, 4, 8, "bf16"),
        Topology.parse(("5x1", "4x2", "7x1")[seed % 3]),
        cluster=Cluster(ranks_per_node=(1 << 20, 2, 4)[seed // 2 % 3]),
    )
    strategy = scattered(problem, 1 + seed % 2, seed, relay=seed % 3 == 1, detours=seed % 3 == 2)
    plain, early = (build(problem, replace(strategy, ahead=n), "scattered", {}) for n in (0, ahead))
    assert verify(early).ok, verify(early)
    for direction in range(len(DIRECTIONS)):
        before, after = (plan.programs[0][direction] for plan in (plain, early))
        carried = [np.sort(flows(plan, plan.programs[0][direction]).num_bytes) for plan in (plain, early)]
        assert carried[0].sum() == carried[1].sum()
        work = [attended_pairs(p, plain.slices[0]).sum() for p in (before, after)]
        assert work[0] == work[1]


def test_rounds_leave_before_what_they_were_waited_for():
    """With room to be ahead, some round is launched a whole stage of blocks before it is waited for."""
    problem = Problem(Layout.from_lengths((400,)), HeadShape(4, 4, 8, "bf16"), Topology.parse("4x1"))
    strategy = replace(scattered(problem, 1, 0), ahead=2)
    programs = build(problem, strategy, "scattered", {}).programs[0][0]
    lead = 0
    for rank in range(4):
        lo, hi = programs.offsets[rank : rank + 2]
        launched = {}
        for i in range(lo, hi):
            if programs.op[i] == Op.LAUNCH:
                launched[int(programs.round[i])] = int(programs.stage[i])
            elif programs.op[i] == Op.WAIT:
                lead = max(lead, int(programs.stage[i]) - launched[int(programs.round[i])])
    assert lead == 2


def test_an_arena_too_small_for_it_gets_the_schedule_as_it_is():
    problem = Problem(Layout.from_lengths((4000, 300, 900)), HeadShape(8, 8, 16, "bf16"), Topology.parse("8x1"))
    strategy = scattered(problem, 1, 4)
    needs = {n: build(problem, replace(strategy, ahead=n), "scattered", {}) for n in (0, 9)}
    peaks = {n: int(plan.arena_bytes().max()) for n, plan in needs.items()}
    assert peaks[9] > peaks[0]
    unit = int(needs[0].tokens_per_rank.max()) * 8 * 16 * 2
    tight = replace(problem, arena_multiple=(peaks[0] + 1) / unit)
    plan = build(tight, replace(strategy, ahead=9), "scattered", {})
    assert int(plan.arena_bytes().max()) == peaks[0]
    transfers = order(strategy.shards, strategy.forward[0], "forward")
    assert (prefetch(transfers, 9)[0].stage < transfers[0].stage).any()
