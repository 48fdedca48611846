"""DistFlashAttn's balanced schedule, written out by hand."""

import numpy as np
import pytest

from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.planners import run

HEADS = HeadShape(4, 4, 64)


def table(lengths, ranks, mask="causal"):
    problem = Problem(Layout.from_lengths(lengths), HEADS, Topology(ranks, 1), ((mask, 1),))
    schedule = run("distflash", problem, {}).forward[0]
    rows = zip(schedule.rank, schedule.stage, schedule.blocks.q, schedule.blocks.kv, strict=True)
    return sorted(tuple(map(int, row)) for row in rows)


def test_five_ranks():
    assert table([50], 5) == [
        (0, 0, 0, 0), (0, 1, 4, 0), (0, 2, 3, 0),
        (1, 0, 1, 1), (1, 1, 1, 0), (1, 2, 4, 1),
        (2, 0, 2, 2), (2, 1, 2, 1), (2, 2, 2, 0),
        (3, 0, 3, 3), (3, 1, 3, 2), (3, 2, 3, 1),
        (4, 0, 4, 4), (4, 1, 4, 3), (4, 2, 4, 2),
    ]  # fmt: skip


def test_four_ranks_cover_the_last_distance_once_with_the_early_ranks():
    assert table([40], 4) == [
        (0, 0, 0, 0), (0, 1, 3, 0), (0, 2, 2, 0),
        (1, 0, 1, 1), (1, 1, 1, 0), (1, 2, 3, 1),
        (2, 0, 2, 2), (2, 1, 2, 1),
        (3, 0, 3, 3), (3, 1, 3, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", range(1, 18))
def test_one_document_takes_half_a_rings_stages_and_one_block_a_stage(ranks):
    rows = table([ranks * 7], ranks)
    assert len(rows) == ranks * (ranks + 1) // 2
    assert max(stage for _, stage, _, _ in rows) == ranks // 2
    assert len({(rank, stage) for rank, stage, _, _ in rows}) == len(rows)
    counts = np.bincount([rank for rank, *_ in rows])
    assert counts.max() - counts.min() <= 1


def test_the_pack_is_one_triangle_whatever_the_documents():
    whole = set(table([80], 8))
    assert set(table([34, 20, 10, 3, 3, 10], 8)) < whole


def test_full_masks_leave_no_rank_to_help():
    rows = table([60], 6, "full")
    assert rows == sorted((r, t, r, (r - t) % 6) for r in range(6) for t in range(6))
