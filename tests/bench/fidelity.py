"""Fidelity: how long plans really take against what the simulator says, on a cluster calibrated by microbenchmarks.

    python -m tests.bench.fidelity [--ranks N …] [--nodes N] [--turns N] [--cluster FILE.yaml]

Forward and backward of one attention layer through the executor, one thread a rank, gloo. All plans take turns, so
that what else the machine does hits all alike; a plan's time is that of its slowest rank, and of its turns the median
and the fastest are shown. More ranks than cores share them by time slices; the simulator knows how many there are.

With --nodes the ranks live on emulated nodes (see `tests.bench.namespaces`), inside which the microbenchmarks run, too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import hsap
from hsap import clusters
from hsap.calibrate.machine import calibrate
from hsap.calibrate.measure import num_cores
from hsap.calibrate.processes import Inside, run_ranks
from hsap.ir.cluster import Cluster
from hsap.ir.span import positions
from tests.bench.namespaces import nodes, refusal
from tests.bench.record import RESULTS, conditions, record

HEADS = hsap.HeadShape(8, 2, 64, "fp32")
PLANNERS = ("ring", "zigzag", "distflash", "sap", "allgather", "usp", "flashcp", "nested")
PACKS = {
    "one document": ((2300,), "causal"),
    "two and crumbs": ((1300, 70, 800, 33, 210), "causal"),
    "short documents": ((370, 45, 290, 160, 610, 95, 230, 420, 180, 55, 310, 140), "causal"),
    "long tail": ((1700, 150, 90, 260, 40, 400), "causal"),
    "a window": ((1900, 400), "window:300"),
}
"""Document lengths and mask; none of these sizes is among the microbenchmarks'."""
CLEAR = 0.15
"""Times further apart than this are clearly separated."""


@dataclass(frozen=True, slots=True)
class Row:
    """A plan's times in seconds: the median and the fastest turn, and what was predicted."""

    pack: str
    planner: str
    median_s: float
    fastest_s: float
    predicted_s: float

    def error(self, measured: str = "median_s") -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / getattr(self, measured) - 1


def plans(num_ranks: int, cluster: Cluster) -> list[tuple[str, hsap.Plan]]:
    """Every planner's plan of every pack on a cluster."""
    out = []
    for (pack, (lengths, mask)), planner in itertools.product(PACKS.items(), PLANNERS):
        layout, topology = hsap.Layout.from_lengths(lengths), hsap.Topology(num_ranks, 1)
        problem = hsap.Problem(layout, HEADS, topology, ((mask, 1),), cluster=cluster)
        out.append((pack, hsap.compile(problem, planner)))
    return out


def on_rank(rank: int, stored: list[bytes], turns: int) -> list[list[float]]:
    """Seconds of each plan in each turn on this rank, [turn][plan], after one turn that doesn't count."""
    session = hsap.Session(device="cpu")
    runs = [_prepared(session, hsap.Plan.from_bytes(plan).vouched(), rank) for plan in stored]
    out = []
    for _ in range(turns + 1):
        out.append([])
        for executor, q, k, v, do in runs:
            dist.barrier()
            start = time.perf_counter()
            kept = executor.forward(q, k, v)
            executor.backward(do, kept)
            out[-1].append(time.perf_counter() - start)
    return out[1:]


def _prepared(session: hsap.Session, plan: hsap.Plan, rank: int):
    rows, heads = len(positions(plan.rank_spans(rank))), plan.problem.heads
    q, do = (torch.randn(rows, heads.num_q_heads, heads.head_dim) for _ in range(2))
    k, v = (torch.randn(rows, heads.num_kv_heads, heads.head_dim) for _ in range(2))
    return session.load(plan), q, k, v, do


def measure(
    num_ranks: int, calibrated: Callable[[], Cluster], turns: int, inside: Sequence[Inside] | None = None
) -> tuple[list[Row], list[Cluster]]:
    """Run and predict all plans; a prediction is the mean of those by clusters calibrated before and after the turns.

    A shared machine isn't equally fast all the time. inside: where each rank lives (None: all on this machine).
    """
    found = [calibrated()]
    named = plans(num_ranks, found[0])
    by_rank = run_ranks(num_ranks, on_rank, [plan.to_bytes() for _, plan in named], turns, inside=inside)
    seconds = np.array(by_rank).max(axis=0)
    found.append(calibrated())
    predicted = [np.mean([hsap.simulate(plan, cluster).predicted_s for cluster in found]) for _, plan in named]
    rows = [
        Row(pack, plan.planner, *map(float, times))
        for (pack, plan), *times in zip(named, np.median(seconds, axis=0), seconds.min(axis=0), predicted)
    ]
    return rows, found


def judge(rows: list[Row], measured: str = "median_s") -> dict:
    """Median error, and the part of clearly separated pairs whose order is right: of the same pack, and of all."""
    pairs = {"pairs": [], "pairs_of_all": []}
    for a, b in itertools.combinations(rows, 2):
        real = getattr(a, measured) / getattr(b, measured)
        if max(real, 1 / real) > 1 + CLEAR:
            right = (real > 1) == (a.predicted_s > b.predicted_s)
            pairs["pairs_of_all"].append(right)
            if a.pack == b.pack:
                pairs["pairs"].append(right)
    out = {"median_error": float(np.median([abs(row.error(measured)) for row in rows]))}
    for name, right in pairs.items():
        out |= {name: len(right), f"{name}_in_order": float(np.mean(right)) if right else 1.0}
    return out


def table(rows: list[Row]) -> str:
    """A line a plan."""
    titles = (f"{title:>9}" for title in ("median ms", "fastest", "predicted", "error", "(fastest)"))
    lines = [f"{'pack':<16} {'planner':<10} " + " ".join(titles)]
    lines += [
        f"{row.pack:<16} {row.planner:<10} {row.median_s * 1e3:>9.1f} {row.fastest_s * 1e3:>9.1f} "
        f"{row.predicted_s * 1e3:>9.1f} {row.error():>+7.1%} {row.error('fastest_s'):>+9.1%}"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None, folder: Path = RESULTS) -> int:
    """Print tables and append a line of results for each number of ranks; 2 where nodes can't be emulated."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="in all (default 2, or one on each node)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="emulated, with a network of 1 Gb/s between")
    parser.add_argument("--turns", type=int, default=9, metavar="N")
    parser.add_argument("--cluster", metavar="FILE.yaml", help="default: calibrate first, inside the nodes if any")
    arguments, found = parser.parse_args(argv), conditions()
    num_nodes = arguments.nodes
    many = arguments.ranks or [max(num_nodes, 2)]
    if num_nodes < 1 or any(num_ranks < 1 or num_ranks % num_nodes for num_ranks in many):
        parser.error(f"--ranks {many}: equally many on each of {num_nodes} nodes, so give multiples of that")
    if num_nodes > 1 and (reason := refusal()):
        print(f"bench fidelity: {reason}", file=sys.stderr)
        return 2
    known = None if arguments.cluster is None else clusters.read(arguments.cluster)
    for num_ranks in many:
        per_node = num_ranks // num_nodes
        with nodes(num_nodes, per_node) if num_nodes > 1 else nullcontext() as made:
            inside, place = None, {"num_ranks": 2}
            if made is not None:
                inside = made.inside
                place = {"num_ranks": num_ranks, "ranks_per_node": per_node, "inside": inside, "cores": made.cores}
            calibrated = partial(_calibrated, known, place)
            rows, clusters_found = measure(num_ranks, calibrated, arguments.turns, inside)
        setting = {"ranks": num_ranks, "nodes": num_nodes, "time_sliced": num_ranks > num_cores()}
        figures = _judged(rows, setting, arguments.turns)
        told = [cluster.to_json() for cluster in clusters_found]
        record("fidelity", figures | {"clusters": told}, found, folder)
    return 0


def _calibrated(known: Cluster | None, place: dict) -> Cluster:
    """Give the known cluster, or calibrate one and print what that left."""
    if known is not None:
        return known
    made = calibrate(device="cpu", heads=HEADS, **place)
    print(f"{made.head}\n{made.links}\n{made.table()}\n", flush=True)
    return made.cluster


def _judged(rows: list[Row], setting: dict, turns: int) -> dict:
    """Print the table of a setting, and give its figures."""
    over = f" on {setting['nodes']} emulated nodes" if setting["nodes"] > 1 else ""
    shared = f", time-sliced on {num_cores()} cores" if setting["time_sliced"] else ""
    print(f"\n{setting['ranks']} ranks{over}{shared}, {turns} turns in turn\n{table(rows)}")
    figures = setting | {"cores": num_cores(), "turns": turns}
    for measured in ("median_s", "fastest_s"):
        figures[measured] = judge(rows, measured)
        print(f"of the {measured[:-2]} turn: " + ", ".join(f"{k} {v:.3g}" for k, v in figures[measured].items()))
    lines = [[r.pack, r.planner, *(round(s, 6) for s in (r.median_s, r.fastest_s, r.predicted_s))] for r in rows]
    return figures | {"rows": lines}


if __name__ == "__main__":
    sys.exit(main())
