"""Every planner keeps the contract on random batches: verified, every token at home once, every pair computed once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.api import compile
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.schedule import DIRECTIONS, Chart
from hsap.ir.slice import dense
from hsap.planners import PLANNERS, options_of, run
from hsap.verify import verify

MASKS = ("causal", "full", "window:1", "window:6", "lambda:2,5", "blockwise:4,2,1,1", "shared_question:2,20",
         "prefix:3", "chunked:6")  # fmt: skip
TOPOLOGIES = ("1x1", "2x1", "3x1", "5x1", "8x1", "12x1", "1x2", "2x2", "3x2", "4x4")

lengths = st.one_of(
    st.lists(st.integers(1, 20), max_size=10),
    st.lists(st.just(1), min_size=1, max_size=25),
    st.lists(st.sampled_from([1, 2, 70]), min_size=1, max_size=4),
    st.lists(st.integers(80, 150), min_size=1, max_size=1),
)
masks = st.lists(st.sampled_from(MASKS), min_size=1, max_size=2)
heads = st.sampled_from([(4, 4), (8, 2), (6, 3), (4, 1)])


def check(planner, document_lengths, names, shape, topology, mixed=False, **options):
    layout = Layout.from_lengths(document_lengths)
    if mixed:  # one mask per document, in turn
        names = [[names[i % len(names)] for i in range(layout.num_documents)]]
    masks = tuple((mask, layers + 1) for layers, mask in enumerate(names))
    problem = Problem(layout, HeadShape(*shape, 16), Topology.parse(topology), masks, Cluster(ranks_per_node=3))
    plan = compile(problem, planner, **options)
    report = verify(plan)
    assert report.ok, str(report)
    assert plan.tokens_per_rank.sum() == layout.num_tokens
    held = [t for rank in range(plan.num_ranks) for a, b in plan.rank_spans(rank) for t in range(a, b)]
    assert sorted(held) == list(range(layout.num_tokens))
    for mask in range(len(problem.masks)):
        visible = dense(problem.slices(mask), layout.num_tokens)
        for direction in range(len(DIRECTIONS)):
            assert plan.area_per_column(mask, direction).sum() == visible.sum() * chart_groups(plan, mask, direction)
    return plan


def chart_groups(plan, mask, direction):
    """Head groups of a plan's chart: every pair is there once for each."""
    return int(plan.chart[mask][direction][:, Chart.GROUP].max(initial=0)) + 1


@given(st.sampled_from(sorted(PLANNERS)), lengths, masks, heads, st.sampled_from(TOPOLOGIES), st.booleans())
@settings(max_examples=40, deadline=None)
def test_random_batches(planner, document_lengths, names, shape, topology, mixed):
    if Topology.parse(topology).intra_sp <= shape[0]:
        check(planner, document_lengths, names, shape, topology, mixed)


OPTIONS = [
    ("allgather", {"chunks": "document"}),
    ("flashcp", {"slack": 0.0}),
    ("flashcp", {"slack": 0.5}),
    ("magi", {"chunks": 1}),
    ("magi", {"chunks": 3, "stages": 4}),
    ("mesh", {"a": 1}),
    ("mesh", {"a": 4, "slack": 0.0}),
    *((name, {"relay": True}) for name, planner in PLANNERS.items() if planner.may_relay and not planner.slow),
]


@pytest.mark.parametrize("planner, options", OPTIONS)
def test_options(planner, options):
    for document_lengths in ([], [2, 1], [1] * 30, [301], [1, 2, 250, 1, 1, 3], [34, 20, 10, 3, 1, 10, 7]):
        check(planner, document_lengths, ["causal", "window:6"], (8, 2), "8x1", **options)


@pytest.mark.parametrize("planner, options", [*((name, {}) for name in PLANNERS), *OPTIONS])
def test_plans_are_deterministic(planner, options):
    problem = Problem(Layout.from_lengths([900, 350, 20, 1, 1400, 77]), HeadShape(8, 2, 16), Topology(8, 1))
    assert compile(problem, planner, **options).hash == compile(problem, planner, **options).hash


WRONG = [
    ("dcp", {"divisions": 1025}, "divisions is 1025; it must be a whole number from 1 to 1024"),
    ("nested", {"effort": 5001}, "effort, .* is 5001; it must be a whole number from 1 to 5000"),
    ("allgather", {"chunks": "tokens"}, "unknown chunks 'tokens'; known .* are pack, document"),
    ("flashcp", {"slack": -0.1}, "slack"),
    ("magi", {"chunks": 0}, "chunks of a rank"),
    ("magi", {"stages": 1.5}, "stages"),
    ("magi", {"relay": "yes"}, "relay"),
    ("mesh", {"a": 3}, "doesn't divide the 8 ranks of a column; give one of 1, 2, 4, 8"),
    ("mesh", {"a": 0}, "a, the query chunks"),
    ("mesh", {"slack": "much"}, "slack"),
]


def test_relay_is_an_option_of_those_that_may_relay_and_changes_nothing_but_the_routes():
    problem = Problem(Layout.from_lengths([90, 5, 41]), HeadShape(4, 2, 8), Topology(8, 1))
    for name, planner in PLANNERS.items():
        assert ("relay" in options_of(name)) == planner.may_relay
        if planner.may_relay:
            plain, relayed = (run(name, problem, {"relay": relay}) for relay in (False, True))
            assert relayed.relay and not plain.relay
            for a, b in zip(plain.forward + plain.backward, relayed.forward + relayed.backward, strict=True):
                assert b.transfers is None
                assert np.array_equal(a.rank, b.rank) and np.array_equal(a.stage, b.stage)
        else:
            with pytest.raises(ValueError, match="unknown option 'relay'"):
                run(name, problem, {"relay": True})


@pytest.mark.parametrize("planner, options, words", WRONG)
def test_wrong_options_are_refused(planner, options, words):
    assert set(options) <= set(options_of(planner))
    problem = Problem(Layout.from_lengths([20, 5]), HeadShape(4, 2, 8), Topology(8, 1))
    with pytest.raises(ValueError, match=f"planner {planner}: .*{words}"):
        compile(problem, planner, **options)
