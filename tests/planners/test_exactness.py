"""What every planner must do, against masks written out pair by pair."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.api import compile
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.problem import Problem, Topology
from hsap.ir.program import Op, Role
from hsap.ir.schedule import DIRECTIONS, INPUTS, OUTPUTS
from hsap.ir.slice import dense
from hsap.planners import PLANNERS

HEADS = HeadShape(8, 2, 16)
VARIANTS = [("distflash", {}), ("sap", {}), ("sap", {"balance": "blocks"}), ("sap", {"slack": 0.0})]
QUERY_SIDE = (Role.Q, Role.O, Role.DO, Role.DQ)


def visible(lengths, mask):
    """Pairs (query, key) of a packed batch, one by one."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(len(document))
    back = at[:, None] - at[None, :]
    same = document[:, None] == document[None, :]
    name, _, width = mask.partition(":")
    return same & {"full": True, "causal": back >= 0, "window": (back >= 0) & (back < int(width or 0))}[name]


def check(lengths, masks, topology, planner, options, heads=HEADS):
    layout = Layout.from_lengths(lengths)
    problem = Problem(layout, heads, Topology.parse(topology), tuple((m, 1) for m in masks))
    plan = compile(problem, planner, **options)
    shards = plan.shards
    tokens = [np.concatenate([np.arange(a, b) for a, b in shards.spans[lo:hi]])
              for lo, hi in zip(shards.offsets[:-1], shards.offsets[1:])]  # fmt: skip
    assert sorted(t for rows in tokens for t in rows) == list(range(layout.num_tokens))
    for m, mask in enumerate(masks):
        want = visible(lengths, mask)
        assert (dense(plan.slices[m], layout.num_tokens) == want).all()
        areas = {
            (q, kv): int(want[np.ix_(rows, keys)].sum())
            for q, rows in enumerate(tokens)
            for kv, keys in enumerate(tokens)
        }
        for d, direction in enumerate(DIRECTIONS):
            check_chart(plan, m, d, {cell: n for cell, n in areas.items() if n})
            check_transfers(plan, m, d, direction)
    return plan


def check_chart(plan, m, d, areas):
    chart = plan.chart[m][d]
    assert sorted((q, kv) for q, kv, *_ in chart.tolist()) == sorted(areas)
    work = [0] * plan.topology.inter_sp
    for q, kv, _, rank, stage, area in chart.tolist():
        assert area == areas[q, kv]
        home = plan.shards.home[q] == plan.shards.home[kv] == rank
        assert stage == 0 if home else stage >= 1
        work[rank] += area
    assert plan.area_per_column(m, d).tolist() == work


def check_transfers(plan, m, d, direction):
    """A rank receives the rows of each remote shard it uses once, and sends each partial result home once.

    What several blocks of a stage read together is one kernel, what travels together one message.
    """
    chart, home = plan.chart[m][d].tolist(), plan.shards.home
    programs = plan.programs[m][d]
    intra = plan.topology.intra_sp
    starts = np.concatenate([[0], np.cumsum(plan.spans[:, 1] - plan.spans[:, 0])])
    for role in INPUTS[direction] + OUTPUTS[direction]:
        uses = {(rank, q if role in QUERY_SIDE else kv) for q, kv, _, rank, _, _ in chart}
        remote = sum(int(plan.shards.tokens[shard]) for rank, shard in uses if home[shard] != rank)
        for op in (Op.SEND, Op.RECV):
            first, stop = programs.rows[(programs.op == op) & (programs.role == role)].T
            assert (starts[stop] - starts[first]).sum() == remote * intra
    attends = np.isin(programs.op, (Op.ATTEND, Op.ATTEND_GRAD)).sum()
    places = {(rank, stage, home[q] == rank, home[kv] == rank) for q, kv, _, rank, stage, _ in chart}
    assert len(places) * intra <= attends <= len(chart) * intra


lengths_strategy = st.one_of(
    st.lists(st.integers(1, 25), max_size=9),
    st.lists(st.just(1), min_size=1, max_size=20),
    st.lists(st.integers(60, 120), min_size=1, max_size=1),
)
masks_strategy = st.lists(st.sampled_from(["causal", "full", "window:1", "window:5"]), min_size=1, max_size=2)


@given(lengths_strategy, masks_strategy, st.integers(1, 9), st.sampled_from(VARIANTS), st.sampled_from([2, 8]))
@settings(max_examples=80, deadline=None)
def test_every_pair_is_computed_once_and_all_that_is_needed_travels(lengths, masks, ranks, variant, kv_heads):
    check(lengths, masks, f"{ranks}x1", *variant, HeadShape(8, kv_heads, 16))


@pytest.mark.parametrize("planner, options", VARIANTS)
@pytest.mark.parametrize("topology", [f"{n}x{m}" for n in (1, 2, 3, 4, 8) for m in (1, 2)])
def test_every_topology_compiles(topology, planner, options):
    check([34, 20, 10, 3, 3, 1, 19], ["causal", "window:8"], topology, planner, options)


@pytest.mark.parametrize("planner, options", VARIANTS)
@pytest.mark.parametrize("lengths", [[], [1], [1, 1], [3], [1] * 40, [97]])
def test_odd_batches(lengths, planner, options):
    check(lengths, ["causal"], "8x1", planner, options)


@pytest.mark.parametrize("planner, options", VARIANTS)
def test_one_mask_per_document(planner, options):
    lengths = [30, 1, 25, 14]
    masks = tuple(Mask.parse(name) for name in ("full", "causal", "window:4", "full"))
    problem = Problem(Layout.from_lengths(lengths), HEADS, Topology(4, 1), ((masks, 2),))
    plan = compile(problem, planner, **options)
    want = (30 * 30) + 1 + sum(min(i + 1, 4) for i in range(25)) + 14 * 14
    assert plan.chart[0][0][:, 5].sum() == want


@pytest.mark.parametrize("planner, options", VARIANTS)
def test_plans_are_deterministic(planner, options):
    problem = Problem(Layout.from_lengths([900, 350, 20, 1, 1400, 77]), HEADS, Topology(6, 2))
    assert compile(problem, planner, **options).hash == compile(problem, planner, **options).hash


def test_the_table_says_what_each_planner_is():
    for planner in PLANNERS.values():
        assert planner.paper and planner.summary and "\n" not in planner.summary
    assert {"distflash", "sap"} <= set(PLANNERS)
