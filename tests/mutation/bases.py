"""Bases: the valid plans that mutants are made from; small, so that an oracle can look at every pair."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hsap.api import compile
from hsap.compiler.pipeline import build
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.plan import Plan
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.planners import PLANNERS
from tests.strategies import scattered

SHAPES = {
    "4x1": ((7, 2, 11), HeadShape(2, 2, 1, "fp64")),
    "2x2": ((9, 1, 4), HeadShape(4, 2, 1, "fp64")),
    "3x2": ((5, 8), HeadShape(3, 1, 1, "fp64")),
    "1x3": ((6, 5), HeadShape(9, 3, 1, "fp64")),
    "8x1": ((13, 1, 3), HeadShape(2, 1, 1, "fp64")),
    "2x3": ((3, 3, 10), HeadShape(5, 5, 1, "fp64")),
    "5x1": ((1, 2), HeadShape(6, 2, 1, "fp64")),
}
"""Documents and heads of each topology: uneven shares, copies of KV heads, more ranks than tokens."""

MASKS = ("causal", "full", "window:4", "lambda:1,3", "blockwise:3,2,1,1", "shared_question:2,20", "prefix:3",
         "chunked:4", "function", "documents")  # fmt: skip
"""Every family, slices of a function of one's own, and another family for each document."""


def dilated(length: int, parts: Sequence[int]) -> list[tuple[int, ...]]:
    """A mask that no family has: diagonals apart from each other, and holes."""
    return [
        (0, length, 0, length, 0, 0),
        (length // 2, length, 0, length // 3, -length, -2),
        (0, length, 0, length, 1, 2),
    ]


def mask_of(name: str, layout: Layout):
    if name == "function":
        return Mask.of(dilated, layout)
    if name == "documents":
        return [MASKS[(3 * i + 2) % 8] for i in range(layout.num_documents)]
    return name


def problem(topology: str, names: Sequence[str] = ("causal",), **more) -> Problem:
    """Small, of two sequences, over several nodes."""
    lengths, heads = SHAPES[topology]
    layout = Layout.from_lengths(lengths, (len(lengths) - 1, 1))
    masks = [(mask_of(name, layout), 1 + i) for i, name in enumerate(names)]
    return Problem(layout, heads, Topology.parse(topology), masks, Cluster(ranks_per_node=2), **more)


def chosen() -> list[Plan]:
    """A few plans for a test: every planner on two topologies in turn, and two made by chance."""
    plans, topologies = [], [*SHAPES][:4]
    for turn in range(2):
        for place, planner in enumerate(PLANNERS):
            topology = topologies[(place + 2 * turn) % len(topologies)]
            masks = ("causal", "window:4") if topology == "2x2" else ("causal",)
            plans.append(compile(problem(topology, masks), planner))
        how = {"relay": True, "detours": True} if turn else {"num_groups": 1, "relay": True, "topology": Topology(2, 2)}
        plans.append(build(problem("4x1"), scattered(problem("4x1"), **how), "scattered", {}))
    return plans


def just_enough(plan: Plan) -> Plan:
    """Set the problem's limits to what the plan needs, and nothing more."""
    tokens, heads = int(plan.tokens_per_rank.max()), plan.problem.heads
    row = tokens * heads.num_q_heads * heads.head_dim * 8
    multiple = max(int(plan.arena_bytes().max()), 1) / row
    return replace(plan, problem=replace(plan.problem, max_tokens_per_rank=tokens, arena_multiple=multiple))


def all_bases(repeats: int = 3) -> Iterator[Plan]:
    """Every planner with every mask, some with several masks, some with limits that are just enough.

    repeats: topologies for each planner and mask, in turn.
    """
    turn = itertools.count()
    for place, (planner, mask) in enumerate(itertools.product(PLANNERS, MASKS)):
        for again in range(repeats):
            topology = [*SHAPES][(place + 3 * again + place // len(MASKS)) % len(SHAPES)]
            i = next(turn)
            names = (mask, MASKS[(i * 7 + 3) % len(MASKS)]) if i % 3 == 0 else (mask,)
            plan = compile(problem(topology, names), planner)
            yield just_enough(plan) if i % 3 == 1 else plan
    for i, mask in enumerate(MASKS):
        topology = [*SHAPES][i % len(SHAPES)]
        how = {"num_groups": 1} if topology in ("3x2", "2x3", "8x1") else {"num_groups": 2 - i % 2}
        one = problem(topology, (mask,))
        strategy = scattered(one, seed=i, relay=bool(i % 2), detours=i % 3 == 0, **how)
        yield build(one, strategy, "scattered", {})
