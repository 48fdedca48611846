"""Summary: a plan in figures, as JSON values with fixed names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hsap.ir.crossing import once_per_node_bytes
from hsap.ir.effects import attended_pairs, flows
from hsap.ir.mask import Mask
from hsap.ir.plan import Plan
from hsap.ir.program import Programs
from hsap.ir.schedule import DIRECTIONS, Chart


def summary(plan: Plan, predicted_s: Sequence[Sequence[float]] | None = None) -> dict[str, Any]:
    """Give a plan's balance, traffic and size.

    predicted_s: [mask][direction] times of a cost model, to stand among the figures (None: not there).

    area_per_rank: visible pairs a rank computes forward, times its part of the query heads, so that the ranks add up
    to the mask's area. imbalance: max / mean, None where there is nothing. Bytes are what instructions carry, rows and
    statistics in wire_dtype's width where they are partial results; `once_per_node_bytes` says what counts once per
    node. With several masks areas, bytes and times are means weighted by layers, peaks and stages the largest, and
    `per_mask` has each mask's own. own_topology is there where the planner runs the ranks at another shape than the
    problem's.
    """
    layers = np.array([count for _, count in plan.problem.masks])
    masks = [_mask(plan, mask) for mask in range(len(layers))]
    for mask, times in zip(masks, predicted_s or ()):
        for direction, time in zip(DIRECTIONS, times, strict=True):
            mask[direction]["predicted_s"] = float(time)
    area = np.average([mask["area_per_rank"] for mask in masks], axis=0, weights=layers)
    tokens = plan.tokens_per_rank
    out = {
        "planner": plan.planner,
        "topology": str(plan.problem.topology),
        "ranks": plan.num_ranks,
        "tokens": int(tokens.sum()),
        "area_per_rank": [_plain(a) for a in area],
        "tokens_per_rank": tokens.tolist(),
        "area_imbalance": _imbalance(area),
        "token_imbalance": _imbalance(tokens),
        "stages": max(mask["stages"] for mask in masks),
        "instructions": plan.num_instructions,
    }
    for direction in DIRECTIONS:
        parts = [mask[direction] for mask in masks]
        out[direction] = {
            name: _plain(np.average([part[name] for part in parts], weights=layers)) for name in parts[0]
        } | {"peak_buffer_bytes_per_rank": max(part["peak_buffer_bytes_per_rank"] for part in parts)}
    out["wire_dtype"] = plan.precision.wire
    out["choice"] = plan.choice
    if plan.own_topology is not None:
        out["own_topology"] = str(plan.own_topology)
    if len(masks) > 1:
        out["per_mask"] = masks
    return out


def _mask(plan: Plan, mask: int) -> dict[str, Any]:
    heads = plan.problem.heads.num_q_heads
    programs = plan.programs[mask][0]
    pairs = np.zeros(plan.num_ranks, np.int64)
    np.add.at(pairs, programs.rank, attended_pairs(programs, plan.slices[mask]))
    stages = max(int(chart[:, Chart.STAGE].max(initial=-1)) + 1 for chart in plan.chart[mask])
    named, layers = plan.problem.masks[mask]
    out = {
        "mask": str(named) if isinstance(named, Mask) else sorted({str(each) for each in named}),
        "layers": layers,
        "area_per_rank": [_plain(a) for a in pairs / heads],
        "area_imbalance": _imbalance(pairs),
        "stages": stages,
    }
    return out | {name: _traffic(plan, plan.programs[mask][i]) for i, name in enumerate(DIRECTIONS)}


def _traffic(plan: Plan, programs: Programs) -> dict[str, Any]:
    carried = flows(plan, programs)
    return {
        "bytes_total": int(carried.num_bytes.sum()),
        "bytes_internode": carried.between_nodes(plan.problem.node_of),
        "bytes_internode_once_per_node": once_per_node_bytes(plan, programs),
        "max_recv_bytes_per_rank": int(carried.received(plan.num_ranks).max()),
        "peak_buffer_bytes_per_rank": int(programs.arena_bytes().max()),
    }


def _imbalance(load: np.ndarray) -> float | None:
    return float(load.max() / load.mean()) if load.sum() else None


def _plain(value: float) -> int | float:
    """A whole number as int, so that JSON shows it as one."""
    return int(value) if float(value).is_integer() else float(value)
