"""FlashCP: whole documents, zigzag shards, both balances; the filling against its own definition."""

import importlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.ir.slice import dense
from hsap.planners import run
from hsap.planners.fill import RINGS, fill
from hsap.planners.magi import magi
from tests.planners.needs import MASKS, excess, homes, loads, problem_of, received

flashcp = importlib.import_module("hsap.planners.flashcp")


def rows_moved(strategy):
    return sum(len(rows) for rows in received(strategy).values())


def test_equal_documents_stay_whole_and_nothing_moves():
    problem = problem_of([64] * 8, 8)
    assert rows_moved(run("flashcp", problem, {})) == 0
    tokens, areas = loads(problem, "flashcp")
    assert excess(tokens) == excess(areas) == 0


def test_one_document_is_dealt_in_zigzag():
    strategy = run("flashcp", problem_of([64], 4), {})
    home = homes(strategy, 64)
    assert (home == home[::-1]).all() and home[:32].tolist() == sorted(home[:32])
    tokens, areas = loads(problem_of([64], 4), "flashcp")
    assert (tokens == 16).all() and excess(areas) < 0.05


def test_a_cut_document_goes_to_neighbours_and_no_further_than_it_must():
    # Four ranks are full with a document each; 250 tokens of the first and 5 short documents fill one of the others.
    lengths = [1000] + [500] * 4 + [50] * 20
    problem = problem_of(lengths, 8)
    home = homes(run("flashcp", problem, {}), sum(lengths))
    cut = np.unique(home[:1000])
    assert len(cut) == 4 and (np.diff(cut) == 1).all()
    borders = np.cumsum(lengths)
    assert all(len(set(home[a:b])) == 1 for a, b in itertools.pairwise(borders.tolist()))
    tokens, areas = loads(problem, "flashcp")
    assert excess(tokens) <= 0.05 and excess(areas) <= 0.05


@pytest.mark.parametrize("ranks", [16, 32, 64])
@pytest.mark.parametrize("name", ["ldc@131072", "fineweb@131072"])
def test_benchmark_packs_are_even_and_move_less_than_magi(batches, name, ranks):
    for lengths in batches[name][:2]:
        problem = problem_of(lengths, ranks)
        tokens, areas = loads(problem, "flashcp")
        assert excess(tokens) <= 0.05 and excess(areas) <= 0.05
        rows = [_kv_rows(strategy) for strategy in (run("flashcp", problem, {}), magi(problem))]
        assert rows[0] < 0.7 * rows[1]


def _kv_rows(strategy):
    blocks, home = strategy.forward[0].blocks, strategy.shards.home
    away = home[blocks.q] != home[blocks.kv]
    pairs = np.unique(np.stack([home[blocks.q], blocks.kv])[:, away], axis=1)
    return strategy.shards.tokens[pairs[1]].sum()


@pytest.mark.parametrize("mask", MASKS)
def test_any_mask_is_even(mask):
    tokens, areas = loads(problem_of([3000, 700, 4000, 492, 90, 1200], 8, (mask, "window:64")), "flashcp")
    assert excess(tokens) < 0.06 and excess(areas) < 0.12


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [[1], [7, 64, 33, 2], [101]])
def test_rings_are_pairs_from_both_ends(mask, lengths):
    problem = problem_of(lengths, 2, (mask, "causal"))
    rows = sum(dense(problem.slices(i), sum(lengths)).sum(axis=1) for i in range(2)) / 2
    got = flashcp.ring_areas(problem, problem.layout.document_spans)
    start = 0
    for n, rings in zip(lengths, got, strict=True):
        mine = rows[start : start + n]
        half = [n * k // (2 * RINGS) for k in range(RINGS)] + [n // 2]
        want = [mine[a:b].sum() + mine[n - b : n - a].sum() for a, b in itertools.pairwise(half)]
        want[-1] += mine[n // 2] if n % 2 else 0
        np.testing.assert_allclose(rings, want)
        start += n


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=25),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.02, 0.05, 0.5]),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_filling_has_every_token_once_and_says_its_cost_and_excess(lengths, ranks, slack, fit):
    lengths = np.array(lengths)
    rings = np.repeat((lengths * (lengths + 1) / (2 * RINGS))[:, None], RINGS, axis=1)
    order = np.argsort(-lengths, kind="stable")
    shares, rows, worst = fill(lengths, rings, order, ranks, slack, slack / 2, fit)
    tokens, areas, cost = np.zeros(ranks), np.zeros(ranks), 0.0
    at = np.zeros(len(lengths), int)
    assert (np.diff(shares[:, 1]) >= 0).all()
    for d, rank, first, stop in shares:
        assert first == at[d] and stop > first
        at[d] = stop
        tokens[rank] += stop - first
        areas[rank] += (stop - first) * rings[d].sum() / lengths[d]
        cost += lengths[d] - first / 2 - (stop - first)
    assert (at == lengths).all()
    assert cost == pytest.approx(rows, abs=1e-6)
    assert max(excess(tokens), excess(areas)) == pytest.approx(worst, abs=1e-9)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), min_size=1, max_size=12), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_zigzag_pieces_cover_each_document_once_from_both_ends(documents, ranks):
    lengths = [n for n, _ in documents]
    borders = np.cumsum([0, *lengths])
    spans = np.stack([borders[:-1], borders[1:]], axis=1)
    shares = []
    for d, (n, cuts) in enumerate(documents):
        points = sorted({0, n, *(n * c // (cuts + 1) for c in range(cuts + 1))})
        shares += [(d, i % ranks, a, b) for i, (a, b) in enumerate(itertools.pairwise(points))]
    shards = flashcp.zigzag_pieces(spans, *np.array(shares).T)
    held = {}
    for shard, rank in enumerate(shards.home.tolist()):
        for a, b in shards.spans[shards.offsets[shard] : shards.offsets[shard + 1]]:
            for t in range(a, b):
                assert t not in held
                held[t] = rank
    for d, rank, first, stop in shares:
        start, end = spans[d]
        # Tokens in the order first, last, second, last but one, …; an even place is at the end, as rounding goes.
        for i in range(first, stop):
            token = start + i // 2 if i % 2 else end - 1 - i // 2
            assert held[token] == rank
