"""Mesh-Attention's tiles against their definition, its shapes against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.planners import run
from hsap.planners.mesh import arrival_stages, deal_whole, tile_width
from tests.planners.needs import MASKS, excess, homes, loads, problem_of, received, wanted


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.sampled_from(MASKS),
    st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (7, 1), (8, 2)]),
)
@settings(max_examples=40, deadline=None)
def test_a_tile_gets_exactly_the_q_and_kv_that_its_cells_use(lengths, mask, shape):
    ranks, a = shape
    problem = problem_of(lengths, ranks, (mask,))
    strategy = run("mesh", problem, {"a": a})
    home = homes(strategy, sum(lengths))
    want = wanted(problem, home, lambda q, kv: q // a * a + kv % a)
    got = received(strategy)
    assert {key: rows for key, rows in got.items() if key[0] != "O"} == want
    # A rank gets back a part of each of its rows from every rank that it sent the row's query to.
    back = sorted(t for (role, _), rows in got.items() if role == "O" for t in rows)
    assert back == sorted(t for (role, _), rows in want.items() if role == "Q" for t in rows)


@pytest.mark.parametrize("ranks, a", [(4, 2), (8, 2), (9, 3), (12, 4)])
def test_one_document_costs_two_sides_of_a_tile_and_is_even(ranks, a):
    chunk, b = 24, ranks // a
    strategy = run("mesh", problem_of([ranks * chunk], ranks, ("full",)), {"a": a})
    rows = {key: len(tokens) for key, tokens in received(strategy).items()}
    for rank in range(ranks):
        assert rows["Q", rank] == rows["O", rank] == (a - 1) * chunk
        assert rows["KV", rank] == (b - 1) * chunk
    assert strategy.forward[0].stage.max() == a + b - 2
    tokens, areas = loads(problem_of([ranks * chunk], ranks), "mesh", a=a)
    assert (tokens == chunk).all() and excess(areas) < 0.03


@given(st.integers(1, 64), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_the_tile_s_shape_moves_the_fewest_elements(ranks, q_cost, kv_cost):
    a = tile_width(ranks, q_cost, kv_cost)
    cost = {a: (a - 1) * q_cost + (ranks // a - 1) * kv_cost for a in range(1, ranks + 1) if ranks % a == 0}
    assert cost[a] == min(cost.values())


def test_grouped_kv_heads_flatten_the_tile_and_each_direction_has_its_own():
    assert tile_width(16, 2 * 8, 2 * 8) == 4
    assert tile_width(64, 2 * 8, 2 * 2) == 4  # not 8: a KV row is a quarter of a query's
    assert tile_width(64, 2 * 32, 2 * 1) == 1  # a ring
    assert tile_width(7, 1, 1) == 1


@pytest.mark.parametrize("a, b", [(1, 1), (1, 8), (8, 1), (4, 4), (4, 8), (3, 5)])
@pytest.mark.parametrize("costs", [(1, 1), (4, 1), (1, 3)])
def test_one_chunk_a_stage_and_the_most_new_cells_per_element(a, b, costs):
    queries, keys = arrival_stages(a, b, *costs)
    assert sorted([*queries[1:], *keys[1:]]) == list(range(1, a + b - 1)) and queries[0] == keys[0] == 0
    for stage in range(1, a + b - 1):
        num_q, num_kv = (queries < stage).sum(), (keys < stage).sum()
        if num_q < a and num_kv < b:
            gains = {"q": num_kv / costs[0], "kv": num_q / costs[1]}
            assert gains["q" if stage in queries else "kv"] == max(gains.values())


def test_short_documents_stay_whole_where_that_is_even():
    lengths = [400] + [20] * 20
    problem = problem_of(lengths, 4)
    home = homes(run("mesh", problem, {}), sum(lengths))
    borders = np.cumsum(lengths)
    assert len(set(home[:400])) == 4
    assert all(len(set(home[a:b])) == 1 for a, b in itertools.pairwise(borders.tolist()))
    tokens, areas = loads(problem, "mesh")
    assert excess(tokens) <= 0.05 and excess(areas) <= 0.06
    home = homes(run("mesh", problem_of([400, 30], 4), {}), 430)
    assert len(set(home[400:])) == 4  # a fifth of a rank's tokens can't be made up


def test_deal_whole_puts_the_next_document_where_it_leaves_the_least():
    lengths, areas = np.array([10, 10, 4, 3]), np.array([1.0, 1.0, 40.0, 1.0])
    ranks, worst = deal_whole(lengths, areas, np.arange(4), 2, np.array([10.0, 40.0]))
    assert ranks.tolist() == [0, 1, 0, 1]
    assert worst == pytest.approx((41 - 21.5) / 40)
