"""Pricing: seconds of one attention layer by the event clock, and packs that stand in for the papers' own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hsap import planners
from hsap.api import compile, simulate
from hsap.compiler.pipeline import build
from hsap.ir.cluster import Cluster
from hsap.ir.effects import flows
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.problem import Problem, Topology
from hsap.sim import Timeline

Draw = Callable[[str, int, int], Sequence[int]]
"""Gives document lengths that fill a pack: (data set, tokens, seed); the last one is cut to fit."""


def priced(
    lengths: Sequence[int],
    heads: HeadShape,
    topology: Topology,
    cluster: Cluster,
    planner: str,
    mask: str = "causal",
    **options: Any,
) -> Timeline:
    """Plan one layer's attention of a pack and run it against the clock of `cluster`, forward and backward."""
    layout = Layout.from_lengths(lengths)
    return simulate(compile(Problem(layout, heads, topology, ((Mask.parse(mask), 1),), cluster), planner, **options))


def priced_with_relay(
    lengths: Sequence[int],
    heads: HeadShape,
    topology: Topology,
    cluster: Cluster,
    planner: str,
    mask: str,
    options: dict[str, Any],
) -> tuple[Timeline, Timeline]:
    """The same without and with relayed rows: (as the planner has it, relayed), from one choice of the planner's."""
    problem = Problem(Layout.from_lengths(lengths), heads, topology, ((Mask.parse(mask), 1),), cluster)
    strategy = planners.run(planner, problem, options)
    plain = build(problem, strategy, planner, options)
    relay = build(problem, planners.relayed(strategy), planner, options | {planners.RELAY: True})
    return simulate(plain), simulate(relay)


def received_bytes(timeline: Timeline) -> int:
    """Bytes that the rank which receives most receives in a layer, forward and backward together."""
    plan = timeline.plan
    total = sum(flows(plan, programs).received(plan.num_ranks) for programs in plan.programs[0])
    return int(np.max(total))


def scaled_pack(draw: Draw, dataset: str, num_tokens: int, scale: float, seed: int) -> list[int]:
    """Draw documents `scale` times as long as the data set's that fill a pack; the last one is cut to fit."""
    lengths, room = [], num_tokens
    # Twice what is needed: whole tokens of a scaled length are at least half of it.
    for length in draw(dataset, math.ceil(2 * num_tokens / scale), seed):
        if room == 0:
            break
        lengths.append(min(max(int(length * scale), 1), room))
        room -= lengths[-1]
    assert room == 0, "the draw holds at least the pack"
    return lengths
