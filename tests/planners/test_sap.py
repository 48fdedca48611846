"""SAP against the paper's Figure 3, and what its area balance promises."""

from collections import defaultdict

import numpy as np
import pytest

from hsap.api import compile
from hsap.compiler.order import order
from hsap.compiler.rounds import assign_rounds
from hsap.ir.block import cut_blocks
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import parse_masks
from hsap.ir.pattern import Pattern, patterns
from hsap.ir.problem import Problem, Topology
from hsap.ir.program import Role
from hsap.ir.summary import summary
from hsap.planners import run
from hsap.planners.parts import equal_shards

HEADS = HeadShape(8, 2, 64)
MULTI_HEAD = HeadShape(8, 8, 64)

FIGURE_3 = Problem(Layout.from_lengths([340, 200, 100, 30, 30, 100]), HEADS, Topology(8, 1))
FIGURE_3_RANKS = [
    [(0, 0), (3, 0), (2, 0)],
    [(1, 1), (1, 0), (3, 1)],
    [(2, 2), (2, 1)],
    [(3, 3), (3, 2), (5, 3)],
    [(4, 4), (4, 3)],
    [(5, 5), (5, 4)],
    [(6, 6), (6, 5)],
    [(7, 7)],
]
FIGURE_3_GRID = """
A1 .  .  .  .  .  .  .
A2 A1 .  .  .  .  .  .
A2 A2 A1 .  .  .  .  .
A3 A3 A3 A1 .  .  .  .
.  .  .  A4 A1 .  .  .
.  .  .  A5 A3 A1 .  .
.  .  .  .  .  A5 A1 .
.  .  .  .  .  .  .  A1
"""


def loads(problem, planner, **options):
    schedule = run(planner, problem, options).forward[0]
    return np.bincount(schedule.rank, weights=schedule.blocks.area, minlength=problem.topology.inter_sp)


def rows_moved(problem, direction, planner, **options):
    strategy = run(planner, problem, options)
    rows = defaultdict(int)
    for table in order(strategy.shards, getattr(strategy, direction)[0], direction):
        for role, shard in zip(table.role.tolist(), table.shard.tolist(), strict=True):
            rows[Role(role).name] += int(strategy.shards.tokens[shard])
    return rows


def elements_moved(problem, planner, **options):
    rows = rows_moved(problem, "forward", planner, **options)
    heads = problem.heads
    return (rows["Q"] + rows["O"]) * heads.num_q_heads + 2 * rows["KV"] * heads.num_kv_heads


def ragged_problem(seed, heads=HEADS, ranks=None):
    rng = np.random.default_rng(seed)
    lengths = np.clip((rng.pareto(1.0, int(rng.integers(1, 60))) * 400).astype(int), 1, 60_000)
    return Problem(Layout.from_lengths(lengths), heads, Topology(ranks or int(rng.integers(2, 17)), 1))


def test_figure_3_blocks_and_stages():
    schedule = run("sap", FIGURE_3, {"balance": "blocks"}).forward[0]
    rows = zip(schedule.rank, schedule.stage, schedule.blocks.q, schedule.blocks.kv, strict=True)
    want = {(r, s, *cell) for r, cells in enumerate(FIGURE_3_RANKS) for s, cell in enumerate(cells)}
    assert {tuple(map(int, row)) for row in rows} == want
    assert len(schedule.block) == len(want)


def test_figure_3_transfers_and_rounds():
    strategy = run("sap", FIGURE_3, {"balance": "blocks"})
    arriving, leaving = order(strategy.shards, strategy.forward[0], "forward")
    got = defaultdict(set)
    for table in (arriving, leaving):
        rows = zip(table.stage, table.role, table.shard, table.src, table.dst, strict=True)
        for stage, role, shard, src, dst in (map(int, row) for row in rows):
            got[stage, Role(role).name].add((shard, src, dst))
    assert got == {
        (0, "KV"): {(0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, 4), (4, 4, 5), (5, 5, 6)},
        (0, "Q"): {(3, 3, 0)},
        (1, "Q"): {(2, 2, 0), (3, 3, 1), (5, 5, 3)},
        (2, "O"): {(3, 0, 3)},
        (3, "O"): {(2, 0, 2), (3, 1, 3), (5, 3, 5)},
    }
    first = arriving.take(arriving.stage == 0)
    assert assign_rounds(first.stage, first.src, first.dst, 8, 0).max() + 1 == 2


def test_figure_3_patterns():
    shards = equal_shards(800, 8)
    blocks = cut_blocks(shards, FIGURE_3.slices(0))
    grid = np.full((8, 8), ".", dtype="<U2")
    grid[blocks.q, blocks.kv] = [Pattern(p).name for p in patterns(shards, blocks)]
    assert grid.tolist() == [line.split() for line in FIGURE_3_GRID.strip().splitlines()]


def test_paper_mode_counts_blocks_evenly_where_documents_allow():
    single = Problem(Layout.from_lengths([1600]), HEADS, Topology(16, 1))
    schedule = run("sap", single, {"balance": "blocks"}).forward[0]
    counts = np.bincount(schedule.rank, minlength=16)
    assert counts.sum() == 136 and counts.max() == 9 and counts.min() == 8
    assert schedule.stage.max() == 8


@pytest.mark.parametrize("seed", range(60))
def test_largest_area_is_never_above_distflash(seed):
    problem = ragged_problem(seed, HEADS if seed % 2 else MULTI_HEAD)
    area, triangle = loads(problem, "sap"), loads(problem, "distflash")
    assert area.sum() == triangle.sum()
    assert area.max() <= max(triangle.max(), 1.05 * area.mean())


@pytest.mark.parametrize("heads", [HEADS, MULTI_HEAD])
@pytest.mark.parametrize("ranks", [4, 16])
def test_long_ragged_packs_are_balanced_to_the_slack(heads, ranks):
    for lengths in ([30_000, 12_000, 5, 9_000, 700, 20_000], [40_000] + [500] * 60, [250] * 200 + [9_001, 3]):
        problem = Problem(Layout.from_lengths(lengths), heads, Topology(ranks, 1))
        area = loads(problem, "sap")
        assert area.max() <= 1.05 * area.mean()


def test_no_more_travels_than_one_long_document_needs():
    problem = Problem(Layout.from_lengths([64_000]), HEADS, Topology(16, 1))
    assert elements_moved(problem, "sap") < elements_moved(problem, "distflash")
    short = Problem(Layout.from_lengths([250] * 64), HEADS, Topology(16, 1))
    assert elements_moved(short, "sap") == 0


def test_only_the_documents_own_rows_travel():
    # One document of 20 tokens lies over the border of two ranks of 1000; they are balanced without it.
    problem = Problem(Layout.from_lengths([30] * 33 + [20] + [30] * 33), HEADS, Topology(2, 1))
    assert sum(rows_moved(problem, "forward", "sap").values()) == 10
    assert sum(rows_moved(problem, "forward", "sap", balance="blocks").values()) >= 1000


def test_each_mask_is_balanced_for_itself():
    lengths = [20_000, 8_000, 300, 300, 12_000]
    masks = (("causal", 3), ("window:1024", 9), ("full", 1))
    problem = Problem(Layout.from_lengths(lengths), HEADS, Topology(8, 1), masks)
    strategy = run("sap", problem, {})
    assert len(strategy.forward) == len(strategy.backward) == 3
    for schedule in strategy.forward:
        area = np.bincount(schedule.rank, weights=schedule.blocks.area, minlength=8)
        assert area.max() <= 1.1 * area.mean()


def test_homes_are_equal_contiguous_shards_whatever_the_pieces():
    for seed in range(20):
        problem = ragged_problem(seed)
        shards = run("sap", problem, {}).shards
        tokens = np.bincount(shards.home, weights=shards.tokens, minlength=problem.topology.inter_sp)
        assert tokens.max() - tokens.min() <= 1
        assert (shards.spans[1:, 0] == shards.spans[:-1, 1]).all() and (shards.tokens > 0).all()


def test_options_are_checked():
    with pytest.raises(ValueError, match="balance='even'"):
        compile(FIGURE_3, "sap", balance="even")
    for slack in (-0.1, float("nan"), float("inf"), "little"):
        with pytest.raises(ValueError, match="slack"):
            compile(FIGURE_3, "sap", slack=slack)
    with pytest.raises(ValueError, match="unknown option 'grain'"):
        compile(FIGURE_3, "sap", grain=3)


def test_a_small_window_beside_a_full_mask_cuts_no_crumbs():
    def plan(*masks):
        return compile(Problem(Layout.from_lengths([84]), HEADS, Topology(16, 1), masks), "sap")

    alone, beside = plan(("full", 1)), plan(("full", 1), ("window:1", 1))
    assert len(beside.shards) <= len(alone.shards)
    assert beside.num_instructions <= 2 * alone.num_instructions


@pytest.mark.parametrize(
    "masks", ["window:1024*5+causal", "lambda:64,4096", "blockwise:256,2,1,1*5+causal", "prefix:5000"]
)
@pytest.mark.parametrize("lengths", [[32768], [11000, 9000, 5500, 3000, 2100, 1300, 500, 368]])
def test_areas_are_even_over_the_layers_sum_whatever_the_mask(lengths, masks):
    problem = Problem(Layout.from_lengths(lengths), HEADS, Topology(8, 2), parse_masks(masks))
    assert summary(compile(problem))["area_imbalance"] <= 1.05
