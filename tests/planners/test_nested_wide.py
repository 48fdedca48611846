"""Wide rows of the flagship: found where they are, computed where their keys live, every pair once; tight caps."""

import importlib

import numpy as np
import pytest

import hsap
from hsap.ir.effects import flows
from hsap.ir.slice import slices
from hsap.planners.nested.documents import exact_areas
from hsap.planners.nested.levels import Table
from hsap.planners.nested.wide import spread, wide_rows
from tests.planners.test_nested import imbalances, plan_of


def problem_of(lengths, masks, topology: str = "16x1") -> hsap.Problem:
    layout = hsap.Layout.from_lengths(lengths)
    return hsap.Problem(layout, hsap.HeadShape.parse("8:2:16"), hsap.Topology.parse(topology), masks)


def band_with_wide_rows(length: int, parts) -> list[tuple]:
    """Windows of 40 keys, but the first two rows and two in the middle see all."""
    middle = length // 2
    rows = [(0, 2), (middle, middle + 2)]
    others = [(2, middle), (middle + 2, length)]
    return [(a, b, 0, length) for a, b in rows] + [(a, b, 0, length, -39, 0) for a, b in others]


def dense(table: np.ndarray, num_tokens: int) -> np.ndarray:
    q, k = np.ogrid[:num_tokens, :num_tokens]
    seen = np.zeros((num_tokens, num_tokens), bool)
    for q0, q1, k0, k1, lo, hi in table.tolist():
        seen |= (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
    return seen


def test_wide_rows_are_the_few_that_see_far_more_than_the_others() -> None:
    lengths = [300, 6000, 40]
    layout = hsap.Layout.from_lengths(lengths)
    mask = hsap.Mask.of(band_with_wide_rows, layout)
    assert wide_rows(problem_of(lengths, ((mask, 1),)), np.arange(3)).tolist() == [[300, 302], [3300, 3302]]
    for name in ("causal", "full", "window:300", "lambda:32,300", "shared_question:4,20", "prefix:700", "chunked:900"):
        assert not len(wide_rows(problem_of([9000, 500], ((name, 1),)), np.arange(2)))
    blocks = problem_of([300, 8192], (("blockwise:64,2,1,1", 1),))
    assert wide_rows(blocks, np.arange(2)).tolist() == [[300 + 8128, 300 + 8192]]
    # Where three of four layers are causal, the last rows have less than twice the mean.
    assert not len(wide_rows(problem_of([8192], (("blockwise:64,2,1,1", 1), ("causal", 3))), np.arange(1)))


def test_spread_cells_compute_every_pair_once_and_areas_are_counted_pair_by_pair() -> None:
    length = 300
    mask = hsap.Mask.of(band_with_wide_rows, hsap.Layout.from_lengths([length]))
    problem = problem_of([length], ((mask, 1),), "3x1")
    seen = dense(problem.slices(0), length)
    # Rows [0, 100) and [151, 300) on one rank, or a rank for each of two head groups.
    rows = [(0, 100, 0, 0), (0, 100, 1, 0), (100, 151, 0, 1), (100, 151, 1, 2), (151, 300, 0, 2), (151, 300, 1, 2)]
    cells = np.array([(a, b, 0, length, group, rank, 0) for a, b, group, rank in rows])
    wide = np.array([[0, 2], [150, 152]])
    table = spread(Table(np.zeros((0, 3), np.int64), cells), wide)
    rank_of = np.full((2, length), -1)
    for a, b, group, rank in rows:
        rank_of[group, a:b] = rank
    work = np.zeros(3)
    for group in range(2):
        computes = np.full((length, length), -1)
        for q0, q1, k0, k1, g, rank, _ in table.cells.tolist():
            if g == group:
                assert (computes[q0:q1, k0:k1] == -1).all()
                computes[q0:q1, k0:k1] = rank
        wanted = np.repeat(rank_of[group][:, None], length, axis=1)
        wanted[[0, 1, 150, 151]] = rank_of[group]
        assert (computes == wanted).all()
        work += [(seen & (computes == rank)).sum() / 2 for rank in range(3)]
    np.testing.assert_allclose(exact_areas(problem, table.cells, 2), work)


MASKS = ["blockwise:64,2,1,1", (("blockwise:64,2,1,1", 2), ("window:200", 1)), "user"]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("topology,lengths", [("16x1", [9000]), ("16x1", [7000, 150, 90, 2500]), ("4x4", [6000, 9])])
def test_areas_are_level_and_keys_stay_at_home(mask, topology, lengths) -> None:
    if mask == "user":
        mask = ((hsap.Mask.of(band_with_wide_rows, hsap.Layout.from_lengths(lengths)), 1),)
    plan = plan_of(lengths, topology, mask)
    assert max(imbalances(plan)) <= 1.05
    for at in range(len(plan.problem.masks)):
        crossing = flows(plan, plan.programs[at][0]).between_nodes(plan.problem.node_of)
        # One rank that has all keys of the longest document would receive more than half of them from elsewhere.
        row = 2 * 2 * 16 * 2
        assert crossing < 0.4 * max(lengths) * row


def test_a_mask_that_shows_nothing_has_a_plan() -> None:
    lengths = [900, 30]
    nothing = hsap.Mask.of(lambda length, parts: slices([]), hsap.Layout.from_lengths(lengths), name="nothing")
    for topology in ("1x1", "16x1"):
        plan = plan_of(lengths, topology, ((nothing, 1),))
        assert plan.tokens_per_rank.max() <= 1.05 * np.ceil(930 / plan.num_ranks)


@pytest.mark.parametrize("lengths", [[7901, 7100, 4739], [6680, 6000, 785], [6000, 1539]], ids=str)
def test_nodes_leave_their_ranks_room_where_a_row_is_a_percent_of_a_rank(lengths, monkeypatch) -> None:
    monkeypatch.setattr(importlib.import_module("hsap.planners.nested"), "NODE_SLACKS", (0.98,))
    for topology in ("32x1", "64x1"):
        assert max(imbalances(plan_of(lengths, topology))) <= 1.05


@pytest.mark.parametrize(
    ("lengths", "topology", "mask", "cluster"),
    [
        ([32000], "64x1", "chunked:64", (8, 0)),
        ([346, 29, 61, 1, 425, 201, 197, 1596, 412, 51, 994, 2098, 24190, 1074, 9], "64x1", "chunked:256", (8, 4)),
        ([2188, 26780, 5202, 3422, 1933, 5275], "32x2", "chunked:256", (8, 0)),
        ([12282, 19718], "64x1", "blockwise:256,1,0,1", (4, 3)),
        ([5504, 19996, 4750, 1750], "64x1", "blockwise:64,1,0,1", (3, 1)),
    ],
)
def test_caps_hold_where_steps_are_coarser_than_a_rank(lengths, topology, mask, cluster) -> None:
    machines = hsap.Cluster(ranks_per_node=cluster[0], first_rank=cluster[1])
    layout, heads = hsap.Layout.from_lengths(lengths), hsap.HeadShape(8, 2, 128)
    problem = hsap.Problem(layout, heads, hsap.Topology.parse(topology), ((mask, 1),), machines)
    assert max(imbalances(hsap.compile(problem, "nested"))) <= 1.05
