"""Plans give the answer of float64 mathematics, whatever the planner, mask, heads, topology, nodes and layout."""

import itertools
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hsap
from hsap.planners import PLANNERS
from tests.pairwise import pairwise
from tests.runtime.oracle import attention, tensors

MASKS = [
    *("causal", "full", "window:1", "window:7", "window:40", "lambda:3,5", "lambda:0,9", "blockwise:4,2,1,1"),
    *("blockwise:16,1,0,0", "shared_question:4,20", "shared_question:2,50", "prefix:17", "chunked:10"),
]
HEADS = [(8, 8), (8, 2), (9, 3), (28, 4), (8, 1)]
TOPOLOGIES = ["1x1", "2x1", "3x1", "8x1", "16x1", "5x1", "1x2", "1x8", "2x2", "4x2", "2x4", "3x3", "2x7", "4x4"]
NODES = [{}, {"ranks_per_node": 2}, {"ranks_per_node": 3, "first_rank": 1}]
LAYOUTS = {
    "one token": ([1], ()),
    "one-token documents": ([1] * 23, (2, 2)),
    "fewer tokens than ranks": ([2, 1], (1,)),
    "one giant document": ([301], ()),
    "a giant among dwarfs": ([1, 2, 250, 1, 1, 3], (2, 2, 5)),
    "odd sizes": ([7, 13, 29, 31, 3, 1, 17], (3,)),
    "many": ([1 + (i * 37) % 11 for i in range(60)], (10, 30, 50)),
    "ordinary": ([34, 20, 10, 3, 1, 10, 7], (3, 4)),
}
"""Document lengths, and how many documents lie before each border of a sequence."""


@lru_cache(64)
def oracle(layout: hsap.Layout, shape: hsap.HeadShape, mask: str):
    """Tensors, and what attention by its definition makes of them."""
    problem = hsap.Problem(layout, shape, hsap.Topology(1, 1), ((mask, 1),))
    inputs = tensors(problem, torch.float64, seed=layout.num_tokens)
    return inputs, attention(problem, *inputs)


def check(
    planner: str, mask: str, heads: tuple[int, int], topology: str, nodes: dict, lengths, cuts=(), options=None
) -> None:
    """Compare a plan's results, forward and backward, with attention by its definition."""
    borders = [0, *sorted(min(at, len(lengths)) for at in cuts), len(lengths)]
    layout = hsap.Layout.from_lengths(lengths, np.diff(borders).tolist())
    shape = hsap.HeadShape(*heads, 4, "fp64")
    problem = hsap.Problem(layout, shape, hsap.Topology.parse(topology), ((mask, 1),), hsap.Cluster(**nodes))
    plan = hsap.compile(problem, planner, **(options or {}))
    report = hsap.verify(plan)
    assert report.ok, report
    (*inputs, grad_o), wanted = oracle(layout, shape, mask)
    for got, want in zip(hsap.reference(plan, *inputs, grad_o=grad_o), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


FACTORS = [list(PLANNERS), MASKS, HEADS, TOPOLOGIES, NODES, list(LAYOUTS)]
PAIRS = [tuple(choices[at] for choices, at in zip(FACTORS, row)) for row in pairwise(*map(len, FACTORS))]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_pair_of_choices(planner: str, topology: str) -> None:
    """Every planner meets every mask, head shape, topology, node size and layout, and each of these all the others."""
    rows = [row for row in PAIRS if (row[0], row[3]) == (planner, topology)]
    assert rows
    for *choices, layout in rows:
        check(*choices, *LAYOUTS[layout])


def test_pairs_are_complete() -> None:
    for (a, first), (b, second) in itertools.combinations(enumerate(FACTORS), 2):
        met = {(str(row[a]), str(row[b])) for row in PAIRS}
        assert met == {(str(one), str(two)) for one in first for two in second}


OPTIONS = [
    *[("dcp", {"block": 8, "relay": relay}) for relay in (False, True)],
    *[(planner, {"relay": True}) for planner in ("allgather", "flashcp", "magi", "mesh")],
    ("allgather", {"chunks": "document"}),
    ("flashcp", {"slack": 0.5}),
    ("magi", {"chunks": 3, "stages": 4}),
    ("mesh", {"a": 1}),
    ("nested", {"area_slack": 0.01, "token_slack": 0.5}),
    ("sap", {"balance": "blocks"}),
    *[(planner, {"heads": 1}) for planner in ("usp", "te", "loongtrain")],
]


@pytest.mark.parametrize(("planner", "options"), OPTIONS)
def test_options(planner: str, options: dict) -> None:
    cases = (
        ("causal", (8, 2), "4x1", [50, 3, 41, 18]),
        ("window:7", (9, 3), "3x3", [34, 20, 10, 3, 1, 10, 7]),
        ("lambda:3,5", (8, 2), "6x2", [60, 33]),
        ("shared_question:2,20", (8, 4), "8x1", [40, 31]),
    )
    for mask, heads, topology, lengths in cases[OPTIONS.index((planner, options)) % 2 :: 2]:
        check(planner, mask, heads, topology, {"ranks_per_node": 2, "first_rank": 1}, lengths, options=options)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_combination(planner: str, topology: str) -> None:
    """Of planner, topology, mask and head shape; layouts and nodes in turn."""
    layouts, nodes = itertools.cycle(LAYOUTS.values()), itertools.cycle(NODES)
    for mask, heads in itertools.product(MASKS, HEADS):
        check(planner, mask, heads, topology, next(nodes), *next(layouts))


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(PLANNERS)),
    st.sampled_from(MASKS),
    st.sampled_from(HEADS),
    st.sampled_from(TOPOLOGIES),
    st.sampled_from(NODES),
    st.lists(st.one_of(st.integers(1, 12), st.integers(1, 120)), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_random_layouts(planner, mask, heads, topology, nodes, lengths, cuts) -> None:
    check(planner, mask, heads, topology, nodes, lengths, cuts)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("planner", PLANNERS)
def test_long_ragged_packs(planner: str) -> None:
    generator = np.random.default_rng(5)
    for num_documents, most, topology in ((300, 12, "16x1"), (9, 700, "4x4"), (2, 2000, "8x2")):
        check(planner, "causal", (4, 2), topology, {}, generator.integers(1, most, num_documents).tolist())


def test_a_plan_of_64_ranks_runs_in_one_process() -> None:
    check("sap", "causal", (8, 2), "64x1", {}, [300, 90, 100, 210])
