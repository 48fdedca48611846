"""The flagship: its count of bytes against brute force, both caps, one crossing per node, odd sizes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsap
from hsap.ir.crossing import once_per_node_bytes
from hsap.ir.effects import attended_pairs, flows
from hsap.planners.nested.cost import (
    AREA,
    BYTES,
    NUM_LOADS,
    SEEN,
    SEEN_ROWS,
    TOKENS,
    WIDTH,
    Documents,
    Rules,
    add_document,
)

GROUPS, BINS = 2, 5
KV, Q, OUT = 3.0, 5.0, 7.0


def causal(length: int) -> Documents:
    return Documents(np.array([length]), np.array([-1]), np.zeros((0, SEEN + SEEN_ROWS, 2)))


def random_pieces(rng: np.random.Generator, length: int) -> np.ndarray:
    """Rows of all kinds: of one bin, computed elsewhere than at home, for one head group, of pairs of bins, foreign."""
    cuts = np.unique(rng.integers(1, length, int(rng.integers(1, 7))))
    table = np.zeros((len(cuts) + 1, WIDTH), np.int64)
    table[:, 0] = np.append(cuts, length)
    begin = 0
    for piece in table:
        kind = rng.integers(0, 5)
        bins = rng.permutation(BINS)
        if kind == 1 and piece[0] - begin >= 2:
            piece[1:5], piece[5:7] = (1, 3, 2, 0), bins[:2]
        elif kind:
            own = int(rng.integers(0, 2))
            piece[1:6] = own, rng.integers(0 if own else 1, 4), 1, bins[int(rng.integers(0, 2))], bins[0]
        begin = piece[0]
    return table


def count(pieces: np.ndarray, length: int) -> np.ndarray:
    """Receive by receive: every row and head group that a bin needs and doesn't own, every partial result at home."""
    load = np.zeros((3, BINS))
    owner = np.full(length, -1)
    computes = [[set() for _ in range(GROUPS)] for _ in range(length)]
    begin = 0
    for end, own, heads, order, home, *bins in pieces.tolist():
        for j in range(order):
            lo, hi = begin + (end - begin) * j // order, begin + (end - begin) * (j + 1) // order
            if own:
                owner[lo:hi] = home if order == 1 else bins[j]
            for row in range(begin, end):
                for g in range(GROUPS):
                    if (heads >> g & 1) and (order == 1 or g == j):
                        computes[row][g].add(bins[j])
        begin = end
    for g in range(GROUPS):
        for x in range(BINS):
            rows = [row for row in range(length) if x in computes[row][g]]
            load[AREA, x] += sum(row + 1 for row in rows) / GROUPS
            load[BYTES, x] += Q * sum(owner[row] != x for row in rows)
            load[BYTES, x] += KV * sum(owner[key] != x for key in range(max(rows) + 1)) if rows else 0
        for row in range(length):
            # What no bin here computes is computed in another node and comes home from there.
            load[BYTES, owner[row]] += OUT * ((computes[row][g] or {-2}) != {owner[row]}) if owner[row] >= 0 else 0
    for x in range(BINS):
        load[TOKENS, x] = (owner == x).sum()
    return load


@pytest.mark.parametrize("seed", range(60))
def test_bytes_area_and_tokens_are_those_of_a_count_row_by_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = int(rng.integers(8, 60))
    pieces = random_pieces(rng, length)
    load = np.zeros((NUM_LOADS, BINS))
    rules = Rules(KV, Q, OUT, GROUPS, np.ones((2, BINS)), 1.0, 0.0, 0.0)
    reach = np.zeros((3, BINS, GROUPS), np.int64)
    add_document(load, pieces, len(pieces), 1.0, 0, causal(length), rules, reach)
    np.testing.assert_allclose(load[:3], count(pieces, length))
    add_document(load, pieces, len(pieces), -1.0, 0, causal(length), rules, reach)
    np.testing.assert_allclose(load, 0, atol=1e-9)


def plan_of(lengths, topology: str, mask="causal", heads: str = "8:2:16", **options) -> hsap.Plan:
    masks = mask if isinstance(mask, tuple) else ((mask, 1),)
    cluster = options.pop("cluster", hsap.Cluster())
    problem = hsap.Problem(
        hsap.Layout.from_lengths(lengths), hsap.HeadShape.parse(heads), hsap.Topology.parse(topology), masks, cluster
    )
    plan = hsap.compile(problem, "nested", **options)
    report = hsap.verify(plan)
    assert report.ok, report
    return plan


def imbalances(plan: hsap.Plan) -> tuple[float, float]:
    """Largest over mean of the layer-weighted area and of the tokens of the ranks."""
    work = np.zeros(plan.num_ranks)
    for mask, (_, layers) in enumerate(plan.problem.masks):
        programs = plan.programs[mask][0]
        np.add.at(work, programs.rank, layers * attended_pairs(programs, plan.slices[mask]))
    tokens = plan.tokens_per_rank
    return work.max() / work.mean(), tokens.max() / tokens.mean()


MASKS = ["causal", "full", "window:500", "lambda:32,300", "shared_question:4,20", "prefix:700", "chunked:900"]


@pytest.mark.parametrize("mask", [*MASKS, (("window:300", 5), ("causal", 1))], ids=str)
def test_areas_and_tokens_stay_under_their_caps(mask) -> None:
    rng = np.random.default_rng(3)
    for topology, lengths in (
        ("16x1", [9000]),
        ("8x1", rng.integers(100, 5000, 9)),
        ("24x1", rng.integers(900, 9000, 20)),
    ):
        assert max(imbalances(plan_of(lengths, topology, mask))) <= 1.05


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9000), min_size=1, max_size=30), st.sampled_from(["4x1", "16x1", "12x1", "8x2", "2x8"]))
def test_any_batch_is_balanced(lengths, topology) -> None:
    lengths = [*lengths, 6000]
    plan = plan_of(lengths, topology)
    assert max(imbalances(plan)) <= 1.05


def test_caps_follow_their_options() -> None:
    lengths = [5000, 3000, 400, 300, 200, 100, 100, 60]
    tight = imbalances(plan_of(lengths, "8x1", area_slack=0.01, token_slack=0.02))
    assert tight[0] <= 1.01 and tight[1] <= 1.02
    loose, strict = (plan_of(lengths, "16x1", token_slack=slack) for slack in (0.5, 0.02))
    crossing = [flows(p, p.programs[0][0]).between_nodes(p.problem.node_of) for p in (loose, strict)]
    assert crossing[0] < crossing[1]


@pytest.mark.parametrize("direction", [0, 1])
def test_nothing_crosses_twice_for_a_node(direction: int) -> None:
    for lengths in ([30000], [9000, 8000, 7000, 500, 400, 300, 200]):
        plan = plan_of(lengths, "32x1")
        programs = plan.programs[0][direction]
        crossing = flows(plan, programs).between_nodes(plan.problem.node_of)
        assert crossing == once_per_node_bytes(plan, programs)


def test_documents_that_fill_nodes_and_ranks_stay_whole() -> None:
    plan = plan_of([1000] * 16, "16x1")
    assert flows(plan, plan.programs[0][0]).num_bytes.sum() == 0


@pytest.mark.parametrize("topology", ["1x1", "3x1", "16x1", "64x1", "2x8", "9x2"])
@pytest.mark.parametrize("lengths", [[], [1], [1] * 40, [2, 1], [3000], [1, 1, 2000, 1, 30]], ids=str)
def test_odd_batches_have_plans(lengths, topology) -> None:
    plan_of(lengths, topology, heads="16:4:8")


@pytest.mark.parametrize("heads", ["8:8:8", "9:3:8", "32:8:8", "8:1:8"])
def test_any_head_shape(heads: str) -> None:
    for topology in ("8x1", "24x1", "6x2"):
        plan = plan_of([7000, 900, 40], topology, heads=heads)
        # IntraSP's shares of 9 heads are uneven by themselves.
        area = plan.area_per_column()
        assert area.max() / area.mean() <= 1.05 and imbalances(plan)[1] <= 1.05


def test_nodes_may_be_uneven() -> None:
    plan = plan_of([6000, 3000, 500, 200], "12x1", cluster=hsap.Cluster(ranks_per_node=8, first_rank=5))
    assert max(imbalances(plan)) <= 1.05
    assert np.unique(plan.problem.node_of, return_counts=True)[1].tolist() == [3, 8, 1]


def test_plans_depend_on_nothing_but_the_problem() -> None:
    first, again = (plan_of([4000, 3000, 700, 70], "16x1") for _ in range(2))
    assert first.hash == again.hash


@pytest.mark.parametrize(
    "options,words",
    [({"area_slack": -1.0}, "area_slack"), ({"token_slack": "x"}, "token_slack"), ({"effort": 0}, "effort")],
)
def test_options_that_make_no_sense_are_refused(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        plan_of([100], "2x1", **options)
