"""Show: a plan for people, as figures, grids and streams."""

from __future__ import annotations

import os
import sys
from typing import Any

from hsap.ir.grid import chart_grids, pattern_grid, tinted
from hsap.ir.plan import Plan
from hsap.ir.schedule import DIRECTIONS
from hsap.ir.text import stream_lines


def show(plan: Plan, figures: dict[str, Any], rank: int | None, colour: bool = False) -> None:
    """Print the summary, the block grids, and the streams of one rank or all, mask by mask.

    colour: colour the grids even where stdout is no terminal or NO_COLOR is set.
    """
    colour = colour or takes_colour()
    print(_summary(figures))
    print("\nhome rank of each shard: " + _row(plan.shards.home.tolist()))
    for mask, (masks, layers) in enumerate(plan.problem.masks):
        if len(plan.problem.masks) > 1:
            print(f"\nmask {mask}: {masks if not isinstance(masks, tuple) else 'by document'}, layers: {layers}")
        _grids(plan, mask, colour)
        for direction, name in enumerate(DIRECTIONS):
            for r in range(plan.num_ranks) if rank is None else (rank,):
                print(f"\n{name}\n" + "\n".join(stream_lines(plan, mask, direction, r)))


_PATTERNS = "(A1 causal, A2 full, A3 to A5 with a border of documents inside, B another shape, · nothing visible)"


def takes_colour() -> bool:
    """Say whether stdout is a terminal whose user wants colours (NO_COLOR isn't set)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _grids(plan: Plan, mask: int, colour: bool) -> None:
    grid = pattern_grid(plan.shards, plan.slices[mask])
    if colour:
        grid = tinted(grid, chart_grids(plan, mask)[0])
    print(f"\npatterns, a row per query shard, a column per KV shard\n{_PATTERNS}\n{grid.draw(colour)}")
    charts = plan.chart[mask]
    same = charts[0].tobytes() == charts[1].tobytes()
    for direction, name in enumerate(("forward and backward",) if same else DIRECTIONS):
        ranks, stages = chart_grids(plan, mask, direction)
        print(f"\ncompute rank, {name}\n{ranks.draw(colour)}\n\nstage, {name}\n{stages.draw(colour)}")


def _summary(figures: dict[str, Any]) -> str:
    f = figures
    lines = [
        f"planner {f['planner']}, topology {f['topology']}: {f['ranks']} ranks, {f['tokens']} tokens, stages: "
        f"{f['stages']}, instructions: {f['instructions']}, planned in {f['plan_s'] * 1e3:.1f} ms, "
        f"verified: {'yes' if f['verified'] else 'no'}",
        f"tokens per rank: {_row(f['tokens_per_rank'])} (max/mean {_ratio(f['token_imbalance'])})",
        f"area per rank:   {_row(f['area_per_rank'])} (max/mean {_ratio(f['area_imbalance'])})",
    ]
    for direction in DIRECTIONS:
        d = f[direction]
        lines.append(
            f"{direction + ':':<9} {_size(d['bytes_total'])} sent ({_size(d['bytes_internode'])} between nodes, "
            f"{_size(d['bytes_internode_once_per_node'])} if each row crossed once per node), "
            f"{_size(d['max_recv_bytes_per_rank'])} received by the busiest rank, "
            f"{_size(d['peak_buffer_bytes_per_rank'])} of buffers; partial results travel as {f['wire_dtype']}; "
            f"{_ms(d['predicted_s'])} predicted"
        )
    for name, found in (f["choice"] or {}).items():
        told = found if isinstance(found, str) else f"{_ms(found)} predicted, forward and backward"
        lines.append(f"auto: {name}: {told}" + (", chosen" if name == f["planner"] else ""))
    return "\n".join(lines)


def _row(values: list[Any]) -> str:
    return " ".join(f"{value:.10g}" for value in values)


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _ms(seconds: float | None) -> str:
    return "no time" if seconds is None else f"{seconds * 1e3:.4g} ms a layer"


def _size(num_bytes: float) -> str:
    unit = min(max(int(num_bytes).bit_length() - 1, 0) // 10, 3)
    return f"{num_bytes / (1 << 10 * unit):.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
