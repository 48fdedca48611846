"""Rounds: as few as König's theorem allows, and no rank twice in one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.compiler.rounds import assign_rounds

NUM_RANKS = 9
edges = st.lists(st.tuples(st.integers(0, NUM_RANKS - 1), st.integers(0, NUM_RANKS - 1)), unique=True, max_size=70)


def colour(src, dst, num_ranks):
    """Rounds of one stage are colours."""
    return assign_rounds(np.zeros_like(src), src, dst, num_ranks, 0)


def degrees(pairs) -> list[int]:
    return [sum(pair[side] == rank for pair in pairs) for side in (0, 1) for rank in range(NUM_RANKS)]


@settings(max_examples=120, deadline=None)
@given(edges)
def test_colouring_is_proper_and_uses_the_largest_degree(pairs):
    src, dst = np.array(pairs, np.int64).reshape(-1, 2).T
    colours = colour(src, dst, NUM_RANKS).tolist()
    for side in (0, 1):
        at = [(pair[side], c) for pair, c in zip(pairs, colours)]
        assert len(set(at)) == len(at), "a rank has one colour twice"
    assert sorted(set(colours)) == list(range(max(degrees(pairs))))
    assert colour(src, dst, NUM_RANKS).tolist() == colours


def test_complete_graph_needs_alternating_paths():
    """Edges in this order leave no common free colour again and again."""
    n = 12
    rng = np.random.default_rng(7)
    src, dst = rng.permutation(np.stack(np.divmod(np.arange(n * n), n), axis=1)).T
    colours = colour(src, dst, n)
    for c in range(n):
        assert sorted(src[colours == c]) == sorted(dst[colours == c]) == list(range(n))
    assert colours.max() == n - 1


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 8), st.integers(0, 8)), max_size=60), st.integers(0, 4))
def test_rounds_rise_with_stages(rows, first):
    """Repeated edges (several roles between the same ranks) share their round."""
    stage, src, dst = np.array(rows, np.int64).reshape(-1, 3).T
    rounds = assign_rounds(stage, src, dst, NUM_RANKS, first).tolist()
    expected = first
    for s in sorted(set(stage.tolist())):
        here = {(row[1:], r) for row, r in zip(rows, rounds) if row[0] == s}
        needed = max(degrees({pair for pair, _ in here}))
        assert len(here) == len({pair for pair, _ in here}), "one pair of ranks is split over two rounds"
        assert {r for _, r in here} == set(range(expected, expected + needed))
        for side in (0, 1):
            assert len({(pair[side], r) for pair, r in here}) == len(here)
        expected += needed


@pytest.mark.parametrize("shift", [1, 3])
def test_a_ring_needs_one_round_a_stage(shift):
    src = np.tile(np.arange(8), 5)
    stage = np.repeat(np.arange(5), 8)
    rounds = assign_rounds(stage, src, (src + shift) % 8, 8, 2)
    assert (rounds == stage + 2).all()
