"""Planners that unequal weight shards may use place tokens the same way whatever the heads."""

import numpy as np
import pytest

import hsap
from hsap.planners import PLANNERS
from hsap.train.tsp.planning import PLACING_WITHOUT_HEADS

LENGTHS = ([61, 1, 130, 7, 44, 2, 19], [5], [])
SHARES = ((6, 2), (3, 1), (2, 1), (1, 1))


def placed_alike(planner: str, lengths: list[int], num_ranks: int) -> bool:
    layout, topology = hsap.Layout.from_lengths(lengths), hsap.Topology(num_ranks, 1)
    plans = [
        hsap.compile(hsap.Problem(layout, hsap.HeadShape(*share, 16, "fp32"), topology), planner) for share in SHARES
    ]
    return all(np.array_equal(p.rank_spans(r), plans[0].rank_spans(r)) for p in plans for r in range(num_ranks))


@pytest.mark.parametrize("planner", PLACING_WITHOUT_HEADS)
def test_places_alike(planner: str) -> None:
    assert all(placed_alike(planner, lengths, ranks) for lengths in LENGTHS for ranks in (2, 4))


def test_others_don_t() -> None:
    """Those that are left out have a reason to be."""
    others = [name for name in PLANNERS if name not in (*PLACING_WITHOUT_HEADS, "dcp")]
    assert others and not any(placed_alike(name, LENGTHS[0], 4) for name in others)
