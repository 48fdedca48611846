"""Block grids against HSAP's Figure 3 and against a look at every pair."""

import re

import numpy as np
import pytest

from hsap.api import compile
from hsap.ir.block import Shards
from hsap.ir.grid import MAX_DRAWN, Grid, chart_grids, pattern_grid, tinted
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, mask_slices
from hsap.ir.problem import Problem, Topology
from hsap.ir.slice import dense
from hsap.planners.parts import equal_shards

CAUSAL = Mask()
FIGURE_3 = """
A1 · · · · · · ·
A2 A1 · · · · · ·
A2 A2 A1 · · · · ·
A3 A3 A3 A1 · · · ·
· · · A4 A1 · · ·
· · · A5 A3 A1 · ·
· · · · · A5 A1 ·
· · · · · · · A1
"""


def patterns(lengths, num_ranks, mask=CAUSAL):
    layout = Layout.from_lengths(lengths)
    return pattern_grid(equal_shards(layout.num_tokens, num_ranks), mask_slices(layout, mask)).rows()


def test_figure_3():
    want = [line.split() for line in FIGURE_3.strip().split("\n")]
    assert patterns([340, 200, 100, 30, 30, 100], 8) == want


def by_pairs(layout, borders):
    """Name the cells of causal documents by looking at the dense mask and at the documents' borders."""
    visible = dense(mask_slices(layout, Mask()), layout.num_tokens)
    document = np.repeat(np.arange(layout.num_documents), layout.lengths)
    rows = []
    for q0, q1 in borders:
        row = []
        for k0, k1 in borders:
            name = "·"
            if visible[q0:q1, k0:k1].any():
                name = "A1"
                if k1 <= q0:
                    shared = document[k1 - 1]
                    ends, begins = document[q1 - 1] != shared, document[k0] != shared
                    name = {(0, 0): "A2", (1, 0): "A3", (0, 1): "A4", (1, 1): "A5"}[ends, begins]
            row.append(name)
        rows.append(row)
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_causal_documents_against_a_look_at_every_pair(seed):
    draw = np.random.default_rng(seed)
    layout = Layout.from_lengths(draw.integers(1, [2, 8, 40][seed % 3] + 1, size=draw.integers(1, 15)))
    num_ranks = int(draw.integers(1, 9))
    shards = equal_shards(layout.num_tokens, num_ranks)
    found = pattern_grid(shards, mask_slices(layout, Mask())).rows()
    assert found == by_pairs(layout, shards.spans.tolist())


def test_cells_that_are_no_causal_pattern_are_b():
    assert patterns([8], 2, Mask("full")) == [["B", "B"], ["A2", "B"]]
    assert patterns([12], 3, Mask("window", (3,))) == [["B", "·", "·"], ["B", "B", "·"], ["·", "B", "B"]]
    # A window that covers the shard leaves its diagonal causal.
    assert patterns([12], 3, Mask("window", (4,))) == [["A1", "·", "·"], ["B", "A1", "·"], ["·", "B", "A1"]]


def test_a_window_as_wide_as_its_document_is_causal():
    assert patterns([12], 3, Mask("window", (12,))) == patterns([12], 3)


def test_shards_of_several_spans_are_b_and_nothing_stays_nothing():
    shards = Shards.of([(0, np.array([[0, 2], [6, 8]])), (1, np.array([[2, 6]]))])
    found = pattern_grid(shards, mask_slices(Layout.from_lengths([8]), Mask())).rows()
    assert found == [["B", "B"], ["B", "A1"]]
    assert pattern_grid(Shards.of([]), mask_slices(Layout.from_lengths([]), Mask())).rows() == []


def test_ring_is_computed_at_the_query_and_one_hop_a_stage():
    problem = Problem(Layout.from_lengths([12]), HeadShape(2, 1, 4), Topology(3, 1))
    ranks, stages = chart_grids(compile(problem, "ring"))
    assert ranks.rows() == [["0", "·", "·"], ["1", "1", "·"], ["2", "2", "2"]]
    assert stages.rows() == [["0", "·", "·"], ["1", "0", "·"], ["2", "1", "0"]]


def test_drawing_lines_cells_up_and_colour_only_adds_escapes():
    grid = Grid(2, np.array([0, 1, 1]), np.array([0, 0, 1]), np.array(["A1", "B", "10+3"]), np.array([0, 40, -1]))
    plain = grid.draw()
    assert plain.split("\n") == ["         0    1", "q 0 |   A1    ·", "q 1 |    B 10+3"]
    painted = grid.draw(colour=True)
    for escape in {part.split("m")[0] for part in painted.split("\x1b[")[1:]}:
        painted = painted.replace(f"\x1b[{escape}m", "")
    assert painted == plain


def test_a_pattern_has_the_colour_of_the_rank_that_computes_it():
    plan = compile_many(3)
    ranks, stages = chart_grids(plan)
    drawn = [
        tinted(pattern_grid(plan.shards, plan.slices[0]), ranks).draw(colour=True),
        ranks.draw(colour=True),
        stages.draw(colour=True),
    ]
    patterns, ranks, stages = (re.findall(r"\x1b\[48;5;(\d+);38;5;\d+m *(\w+)", text) for text in drawn)
    assert [ground for ground, _ in patterns] == [ground for ground, _ in ranks]
    for cells in (ranks, stages):
        assert len({ground for ground, _ in cells}) == len({number for _, number in cells}) == len(set(cells)) == 3


def test_many_shards_are_drawn_as_runs():
    drawn = chart_grids(compile_many(MAX_DRAWN + 1))[0].draw().split("\n")
    assert len(drawn) == MAX_DRAWN + 2
    assert drawn[-1] == f"q {MAX_DRAWN}: 0-{MAX_DRAWN} {MAX_DRAWN}"
    layout = Layout.from_lengths([70, 2, 3])
    drawn = pattern_grid(equal_shards(75, 75), mask_slices(layout, Mask())).draw().split("\n")
    assert drawn[3] == "q 2: 0-1 A2, 2 A1"
    assert drawn[-1] == "q 74: 72-73 A2, 74 A1"


def compile_many(num_ranks):
    problem = Problem(Layout.from_lengths([2 * num_ranks]), HeadShape(1, 1, 1), Topology(num_ranks, 1))
    return compile(problem, "ring")
