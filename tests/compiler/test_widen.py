"""Widen: neighbouring head groups that do the same are joined, and nothing else changes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsap.compiler.order import order
from hsap.compiler.relay import relay
from hsap.compiler.widen import MOST_GROUPS, Wide, widen
from hsap.ir.block import Shards, cut_blocks
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.program import PARTIAL_ROLES, Role
from hsap.ir.schedule import DIRECTIONS, Schedule, Transfers
from hsap.ir.slice import UNBOUNDED
from tests.strategies import scattered

QUERY_SIDE = (Role.Q, Role.O, Role.DO, Role.DQ)


def by_group(table, column: str, runs, names) -> Counter:
    """Rows of a table, one for every head group of the run that a column names."""
    out = Counter()
    for run, *row in zip(*(getattr(table, name).tolist() for name in (column, *names))):
        first, count = runs[run]
        out.update((group, *row) for group in range(first, first + count))
    return out


def places(wide: Wide) -> dict:
    """Runs of each role of a shard on each rank away from home, by (role, rank, shard)."""
    out: dict = {}
    moves = wide.moves
    for i in range(len(moves)):
        away = moves.src if moves.role[i] in PARTIAL_ROLES else moves.dst
        key = int(moves.role[i]), int(away[i]), int(moves.shard[i])
        out.setdefault(key, set()).add(wide.runs.runs[moves.run[i]])
    return out


@given(
    seed=st.integers(0, 1 << 16),
    num_groups=st.integers(1, 5),
    direction=st.sampled_from(DIRECTIONS),
    relays=st.booleans(),
    detours=st.booleans(),
)
def test_every_group_does_what_it_did(seed, num_groups, direction, relays, detours):
    problem = Problem(
        Layout.from_lengths((9, 1, 14, 3)), HeadShape(10, 5, 4), Topology(4, 1), cluster=Cluster(ranks_per_node=2)
    )
    strategy = scattered(problem, num_groups, seed, relay=relays, detours=detours)
    schedule = getattr(strategy, direction)[0]
    transfers = order(strategy.shards, schedule, direction)
    if relays:
        transfers = relay(strategy.shards, schedule, transfers, problem.heads, problem.node_of)
    wide = widen(strategy.shards, schedule, transfers, 4, num_groups)
    lone = [(group, 1) for group in range(num_groups)]
    names = ("block", "rank", "stage")
    assert by_group(wide.entries, "run", wide.runs.runs, names) == by_group(schedule, "group", lone, names)
    names, table = ("role", "shard", "src", "dst", "stage", "until"), Transfers.join(*transfers)
    assert by_group(wide.moves, "run", wide.runs.runs, names) == by_group(table, "group", lone, names)
    check_places(wide, strategy.shards)


def check_places(wide: Wide, shards: Shards) -> None:
    """Roles of one side have the same runs on a rank, which don't overlap; what uses or passes them on has no longer.

    A result may come in shorter ones.
    """
    held = places(wide)
    runs = {}
    for (role, rank, shard), found in held.items():
        groups = [group for first, count in found for group in range(first, first + count)]
        assert len(set(groups)) == len(groups)
        runs.setdefault((role in QUERY_SIDE, rank, shard), set()).update(found)
    for found in runs.values():
        groups = [group for first, count in found for group in range(first, first + count)]
        assert len(set(groups)) == len(groups)

    def holds(side: bool, rank: int, shard: int, run: tuple[int, int]) -> bool:
        """Whether one run there contains this one."""
        first, stop = run[0], sum(run)
        return shards.home[shard] == rank or any(a <= first and stop <= a + n for a, n in runs[side, rank, shard])

    entries, moves = wide.entries, wide.moves
    for role in (Role.Q, Role.KV):
        for rank, shard, run in zip(entries.rank, entries.shard_of(role), entries.run):
            assert holds(role in QUERY_SIDE, int(rank), int(shard), wide.runs.runs[run])
    for i in range(len(moves)):
        role, shard, run = int(moves.role[i]), int(moves.shard[i]), wide.runs.runs[moves.run[i]]
        via = int(moves.dst[i] if role in PARTIAL_ROLES else moves.src[i])
        assert holds(role in QUERY_SIDE, via, shard, run)
        if shards.home[shard] != via and role not in PARTIAL_ROLES:
            assert run in runs[role in QUERY_SIDE, via, shard]


@pytest.mark.parametrize("num_groups", [2, 3, 8])
def test_what_all_do_alike_is_done_once(num_groups):
    shards = Shards.of([(0, np.array([[0, 10]])), (1, np.array([[10, 20]]))])
    blocks = cut_blocks(shards, np.array([[10, 20, 0, 20, -UNBOUNDED, 0]]))
    block, group = np.divmod(np.arange(2 * num_groups), num_groups)
    schedule = Schedule(blocks, block, group, np.ones_like(block), np.where(blocks.kv[block] == 0, 1, 0))
    wide = widen(shards, schedule, order(shards, schedule, "forward"), 2, num_groups)
    assert wide.runs.runs == ((0, num_groups),) and wide.runs.is_whole.all()
    assert len(wide.entries.block) == 2 and wide.moves.role.tolist() == [Role.KV]
    # One group later: its rows come later too, and everything is parted there.
    late = Schedule(blocks, block, group, np.ones_like(block), schedule.stage + (block == 0) * (group == 1))
    wide = widen(shards, late, order(shards, late, "forward"), 2, num_groups)
    found = sorted(wide.runs.runs[run] for run in wide.moves.run)
    assert found == [run for run in ((0, 1), (1, 1), (2, num_groups - 2)) if run[1]]
    own = wide.entries.run[wide.entries.block == 1]
    assert [wide.runs.runs[run] for run in own] == [(0, num_groups)]


def test_runs_have_the_heads_of_their_groups():
    heads = HeadShape(12, 6, 4)
    share = heads.shares(1)[0]
    wide = widen(*_three_apart(), 2, 3)
    assert wide.runs.runs == ((0, 1), (1, 2))
    for (first, count), run in zip(wide.runs.runs, wide.runs.heads(heads, share)):
        assert run == (4 * first, 4 * count, 2 * first, 2 * count)
    assert wide.runs.heads(heads, share)[-1] == (0, 12, 0, 6)
    assert wide.runs.behind.tolist() == [sum(b <= a for b, _ in wide.runs.runs) for a, _ in wide.runs.runs]


def test_more_groups_than_bits_stay_apart():
    shards = Shards.of([(0, np.array([[0, 4]])), (1, np.array([[4, 8]]))])
    blocks = cut_blocks(shards, np.array([[4, 8, 0, 4, -UNBOUNDED, UNBOUNDED]]))
    group = np.arange(MOST_GROUPS + 1)
    schedule = Schedule(blocks, 0 * group, group, 0 * group + 1, 0 * group + 1)
    wide = widen(shards, schedule, order(shards, schedule, "forward"), 2, len(group))
    assert wide.runs.runs == tuple((g, 1) for g in group.tolist()) and len(wide.moves) == len(group)


def _three_apart() -> tuple[Shards, Schedule, tuple[Transfers, Transfers]]:
    """Three head groups of one block that isn't at home: the first alone, the others together."""
    shards = Shards.of([(0, np.array([[0, 4]])), (1, np.array([[4, 8]]))])
    blocks = cut_blocks(shards, np.array([[4, 8, 0, 4, -UNBOUNDED, UNBOUNDED]]))
    schedule = Schedule(blocks, np.zeros(3, np.int64), np.arange(3), np.ones(3, np.int64), np.array([2, 1, 1]))
    return shards, schedule, order(shards, schedule, "forward")
