"""The two balancers against brute force, and the spreading of sends."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.ir.block import Blocks, Shards
from hsap.planners.balance import even_areas, even_counts
from hsap.planners.spread import spread

RANKS = 5


@given(st.lists(st.tuples(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1), st.integers(0, 3)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_counts_are_as_even_as_any_assignment(rows):
    rank, other, step = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    got = even_counts(rank, other, RANKS, step)
    assert all(g in (r, o) for g, r, o in zip(got, rank, other, strict=True))
    every = (np.bincount(np.array(pick, dtype=int), minlength=RANKS) for pick in itertools.product(*zip(rank, other)))
    best = min(sorted(counts.tolist(), reverse=True) for counts in every)
    assert sorted(np.bincount(got, minlength=RANKS).tolist(), reverse=True) == best


def random_blocks(seed):
    rng = np.random.default_rng(seed)
    num_shards, num_blocks = int(rng.integers(1, 12)), int(rng.integers(1, 40))
    shards = Shards.of([(i * RANKS // num_shards, [[i * 10, i * 10 + 10]]) for i in range(num_shards)])
    q, kv = rng.integers(0, num_shards, (2, num_blocks))
    blocks = Blocks(q, kv, rng.integers(1, 1000, num_blocks), np.arange(num_blocks + 1), np.zeros((num_blocks, 6)))
    return shards, blocks, rng.integers(0, RANKS, num_blocks)


@pytest.mark.parametrize("seed", range(40))
def test_areas_end_at_the_goal_or_where_the_busiest_rank_can_give_no_block(seed):
    shards, blocks, start = random_blocks(seed)
    kept = start.copy()
    rank = even_areas(shards, blocks, start, RANKS, (4, 1), 0.05)
    assert (start == kept).all()
    before = np.bincount(start, weights=blocks.area, minlength=RANKS)
    load = np.bincount(rank, weights=blocks.area, minlength=RANKS)
    assert load.sum() == before.sum() and load.max() <= before.max()
    if load.max() > 1.05 * load.mean():
        smallest = blocks.area[rank == load.argmax()].min()
        assert load.min() + smallest >= load.max()


def test_areas_take_the_move_without_traffic():
    # Rank 0 holds everything; shard 1's own block costs nothing at rank 1, shard 0's would need rows.
    shards = Shards.of([(0, [[0, 10]]), (1, [[10, 20]])])
    blocks = Blocks(np.array([0, 1]), np.array([0, 1]), np.array([55, 55]), np.arange(3), np.zeros((2, 6)))
    assert even_areas(shards, blocks, np.zeros(2, np.int64), 2, (1, 1), 0.0).tolist() == [0, 1]


@pytest.mark.parametrize("costs, home", [((4, 1), 1), ((1, 4), 0)])
def test_areas_let_the_cheaper_side_travel(costs, home):
    # Rank 2 is too busy with (1, 0): it goes to the query's rank 1 where KV is cheap, else to KV's rank 0.
    shards = Shards.of([(0, [[0, 10]]), (1, [[10, 20]]), (2, [[20, 30]])])
    blocks = Blocks(np.array([1, 2]), np.array([0, 2]), np.array([50, 50]), np.arange(3), np.zeros((2, 6)))
    assert even_areas(shards, blocks, np.array([2, 2]), 3, costs, 0.6).tolist() == [home, 2]


@given(
    st.lists(
        st.tuples(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1), st.integers(0, RANKS - 1)).filter(
            lambda c: c[1] != c[0] or c[2] != c[0]
        ),
        unique=True,
        max_size=30,
    )
)
@settings(max_examples=60, deadline=None)
def test_spread_gives_each_rank_one_cell_a_stage_in_the_fewest_stages(rows):
    cells = np.array(sorted(rows, key=lambda c: c[0]), dtype=np.int64).reshape(-1, 3)
    stage = spread(cells, RANKS)
    assert len({(r, s) for r, s in zip(cells[:, 0].tolist(), stage.tolist())}) == len(cells)
    if len(cells):
        assert stage.min() >= 1 and stage.max() == np.bincount(cells[:, 0]).max()


def test_spread_staggers_the_sends_of_one_giver():
    # Rank 0 sends to ranks 1 … 6 while rank 7 needs three stages: two sends a stage are enough.
    cells = np.array([(r, r, 0) for r in range(1, 7)] + [(7, 7, kv) for kv in (1, 2, 3)])
    stage = spread(cells, 8)
    assert np.bincount(stage[:6], minlength=4).tolist() == [0, 2, 2, 2]
