"""A planner of one's own: long documents in zigzag over all ranks, the others whole on the rank with least to do.

    python docs/examples/own_planner.py

registers it, compares its attention with float64 mathematics, and prices it beside the planners that ship.
"""

from __future__ import annotations

import hsap

# --8<-- [start:planner]
import heapq

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.problem import Problem
from hsap.ir.schedule import Schedule, Strategy
from hsap.planners.parts import mean_areas, query_home, same_both_ways, split_by_need
from hsap.planners.zigzag import zigzag_chunks


def whole_or_zigzag(problem: Problem, longest: float = 0.5) -> Strategy:
    """Cut a document of more than `longest` of a rank's mean area over all ranks; leave the others whole."""
    num_ranks, documents = problem.topology.inter_sp, problem.layout.document_spans
    areas = mean_areas(problem, documents)
    long = areas > longest * areas.sum() / num_ranks

    spans = [[] for _ in range(num_ranks)]
    for chunks in zigzag_chunks(documents[long], num_ranks):  # 2 · num_ranks spans of one document
        for rank in range(num_ranks):
            spans[rank] += [chunks[rank], chunks[-1 - rank]]

    least = [(0.0, rank) for rank in range(num_ranks)]
    for i in sorted(np.flatnonzero(~long), key=lambda i: -areas[i]):  # the largest first
        load, rank = heapq.heappop(least)
        spans[rank].append(documents[i])
        heapq.heappush(least, (load + areas[i], rank))

    homes = Shards.of([(rank, np.array(sorted(map(tuple, mine)))) for rank, mine in enumerate(spans)])
    shards = split_by_need(problem, homes, query_home)  # so that only rows travel that are seen elsewhere

    def schedule(blocks) -> Schedule:
        q_home, kv_home = shards.home[blocks.q], shards.home[blocks.kv]
        return Schedule.of(blocks, rank=q_home, stage=(q_home != kv_home).astype(np.int64))

    return same_both_ways(problem, shards, schedule)


# --8<-- [end:planner]

# --8<-- [start:register]
from hsap.planners import PLANNERS, Planner

PLANNERS["whole_or_zigzag"] = Planner(whole_or_zigzag, "ours", "long documents in zigzag, the others whole")
# --8<-- [end:register]


# --8<-- [start:check]
def error_against_float64(lengths: list[int], topology: str) -> float:
    """Run a small batch by the plan's own streams, all ranks in this process, and by plain mathematics in float64."""
    import torch

    layout = hsap.Layout.from_lengths(lengths)
    problem = hsap.Problem(layout, hsap.HeadShape(2, 1, 8, "bf16"), hsap.Topology.parse(topology))
    plan = hsap.compile(problem, "whole_or_zigzag")
    report = hsap.verify(plan)
    assert report.ok, str(report)

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(layout.num_tokens, 2, 8, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, layout.num_tokens, 1, 8, dtype=torch.float64, generator=generator)
    o, _ = hsap.reference(plan, q, k, v)

    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (document[:, None] == document).tril()
    scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * 8**-0.5
    exact = torch.einsum("hqk,kd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v[:, 0])
    return (o - exact).abs().max().item()


# --8<-- [end:check]


# --8<-- [start:compare]
def compare(names: tuple[str, ...]) -> list[tuple[str, float, float, float]]:
    """Price planners on one batch: (name, busiest rank's area over the mean, MiB that travel, ms of a layer)."""
    problem = hsap.Problem(
        hsap.Layout.from_lengths(LENGTHS),
        hsap.HeadShape(32, 8, 128, "bf16"),
        hsap.Topology.parse("8x1"),
        cluster=hsap.Cluster.preset("dgx-a100", nodes=1),
    )
    rows = []
    for name in names:
        plan = hsap.compile(problem, name)
        assert hsap.verify(plan).ok
        area, timeline = plan.area_per_column(0, 0), hsap.simulate(plan)
        sent = sum(trace.intra_bytes + trace.inter_bytes for trace in timeline["forward"])
        rows.append((name, area.max() / area.mean(), sent / (1 << 20), timeline.predicted_s * 1e3))
    return rows


# --8<-- [end:compare]


LENGTHS = [24_000, 9_000, 5_000, 4_000, 3_000, 3_000, 2_000, 2_000, *[1_000] * 10, *[500] * 6]


def main() -> None:
    """Say how exact the planner's attention is, and how it stands beside others."""
    print(f"largest error against float64: {error_against_float64([37, 5, 1, 20, 3], '4x1'):.0e}")
    print(f"{'planner':<16} {'area, max/mean':>14} {'MiB forward':>12} {'ms a layer':>11}")
    for name, uneven, sent, ms in compare(("whole_or_zigzag", "zigzag", "ring", "magi", "sap", "nested")):
        print(f"{name:<16} {uneven:>14.2f} {sent:>12.0f} {ms:>11.2f}")


if __name__ == "__main__":
    main()
