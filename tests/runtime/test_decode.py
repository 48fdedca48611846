"""Decoding: what was cut for planning is whole again where it lies together in a rank's memory."""

import numpy as np
import torch

import hsap
from hsap.compiler.pipeline import build
from hsap.ir.block import Shards, cut_blocks
from hsap.ir.schedule import Schedule, Strategy
from hsap.runtime.decode import Decoder
from hsap.runtime.kernels import select_kernel


def pieces(plan: hsap.Plan, rank: int, direction: int = 0) -> list[list]:
    """Slices of each kernel of a rank, in rows of its buffers."""
    kernel = select_kernel("math", "cpu", torch.float64)
    decoder = Decoder(plan, 0, direction, rank, kernel, plan.precision, None, "cpu")
    return [table.tolist() for table in decoder.pieces.values()]


def planned(homes: list[int], rank_of, mask: str = "causal") -> hsap.Plan:
    """One document of 10 tokens for each home, shards in order; blocks are computed where `rank_of` their sides' is."""
    heads = hsap.HeadShape(2, 1, 4, "fp64")
    problem = hsap.Problem(
        hsap.Layout.from_lengths((10 * len(homes),)),
        heads,
        hsap.Topology(max(homes) + 1, 1),
        ((hsap.Mask.parse(mask), 1),),
    )
    order = np.argsort(homes, kind="stable")
    shards = Shards.of([(homes[i], np.array([[10 * i, 10 * i + 10]])) for i in order])
    blocks = cut_blocks(shards, problem.slices(0))
    rank = rank_of(shards.home[blocks.q], shards.home[blocks.kv])
    schedule = Schedule.of(blocks, rank, np.ones(len(blocks), int))
    plan = build(problem, Strategy(shards, (schedule,), (schedule,)), "made", {})
    assert hsap.verify(plan).ok
    return plan


def test_a_causal_document_in_ten_shards_is_one_piece() -> None:
    plan = planned([0] * 10, lambda q, kv: q)
    for direction in (0, 1):
        assert pieces(plan, 0, direction) == [[[0, 100, 0, 100, -99, 0]]]


def test_a_window_in_ten_shards_is_one_piece() -> None:
    assert pieces(planned([0] * 10, lambda q, kv: q, "window:25"), 0) == [[[0, 100, 0, 100, -24, 0]]]


def test_gathered_rows_are_joined_where_they_lie_together() -> None:
    """Rank 1 has the odd shards: its own keys make a causal kernel, the even ones' a full strip for each of its own."""
    plan = planned([0, 1] * 3, lambda q, kv: q)
    own, gathered = pieces(plan, 1)
    assert own == [[0, 30, 0, 30, -29, 0]]
    assert gathered == [[0, 10, 0, 10, -9, 9], [10, 20, 0, 20, -19, 9], [20, 30, 0, 30, -29, 9]]
