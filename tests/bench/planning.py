"""Time planning, pass by pass: `python -m tests.bench.planning`, with `--quick` for a few cases.

One row per planner, workload and topology: the median of five runs on the workload's first pack, so that what is timed
is warm. Workloads are document lengths drawn from real corpora, and one document of a whole pack.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from statistics import median

from hsap import planners
from hsap.compiler.buffers import place_buffers
from hsap.compiler.expand import expand, place_rows
from hsap.compiler.lower import lower
from hsap.compiler.order import order
from hsap.compiler.pipeline import build
from hsap.ir.effects import flows
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.ir.schedule import DIRECTIONS, Strategy
from hsap.verify import verify

WORKLOADS = Path(__file__).with_name("planning_workloads.json")
HEADS = HeadShape(32, 8, 128, "bf16")
TOPOLOGIES = ("16x1", "32x1", "8x4", "64x1")
QUICK = (("ldc@131072", "single@131072"), ("16x1", "32x1"))
RUNS = 5
PASSES = ("choose", "order", "lower", "expand", "buffers", "verify")
HEADER = f"{'planner':<10}{'workload':<16}{'ranks':>6}{'instr.':>9}" + "".join(f"{name:>9}" for name in PASSES)
HEADER += f"{'µs/instr.':>11}{'max/mean':>10}{'MiB forward':>13}"


def main() -> None:
    """Print the table; times in ms, µs per instruction over all passes but the planner's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two workloads at 16 and 32 ranks")
    quick = parser.parse_args().quick
    workloads = json.loads(WORKLOADS.read_text(encoding="utf-8"))
    names, topologies = QUICK if quick else (tuple(workloads), TOPOLOGIES)
    print(
        f"median of {RUNS} runs, CPU times in ms; {threading.active_count()} Python thread, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(HEADER)
    for name in names:
        layout = Layout.from_lengths(workloads[name][0])
        for topology in topologies:
            for planner in planners.PLANNERS:
                problem = Problem(layout, HEADS, Topology.parse(topology))
                print(row(planner, name, problem), flush=True)


def row(planner: str, workload: str, problem: Problem) -> str:
    runs = []
    for _ in range(RUNS):
        times: dict[str, float] = {}
        strategy = _timed(times, "choose", planners.run, planner, problem, {})
        _compile(problem, strategy, times)
        plan = build(problem, strategy, planner, {})
        report = _timed(times, "verify", verify, plan)
        assert report.ok, str(report)
        runs.append(times)
    middle = {name: median(run[name] for run in runs) for name in PASSES}
    per_instruction = sum(middle[name] for name in PASSES[1:]) / plan.num_instructions
    area = plan.area_per_column()
    balance = area.max() / area.mean() if area.any() else float("nan")
    mib = flows(plan, plan.programs[0][0]).num_bytes.sum() / 2**20
    cells = "".join(f"{middle[name] * 1e3:>9.1f}" for name in PASSES)
    return (
        f"{planner:<10}{workload:<16}{problem.topology!s:>6}{plan.num_instructions:>9}{cells}"
        f"{per_instruction * 1e6:>11.2f}{balance:>10.3f}{mib:>13.0f}"
    )


def _compile(problem: Problem, strategy: Strategy, times: dict[str, float]) -> None:
    """Run the compiler's passes over both directions of the one mask, adding up the time of each."""
    shards, num_groups, intra = strategy.shards, strategy.num_groups, problem.topology.intra_sp
    rows = _timed(times, "expand", place_rows, problem, shards)
    for direction, schedule in zip(DIRECTIONS, (strategy.forward[0], strategy.backward[0])):
        transfers = _timed(times, "order", order, shards, schedule, direction)
        inter = problem.topology.inter_sp
        draft = _timed(times, "lower", lower, shards, schedule, transfers, direction, inter, num_groups, intra > 1)
        programs = _timed(times, "expand", expand, problem, shards, schedule.blocks, draft, rows, num_groups, direction)
        _timed(times, "buffers", place_buffers, programs)


def _timed(times: dict[str, float], name: str, function, *arguments):
    """Call a function and add its CPU time [s] to times[name]: it is one thread, and other load counts less."""
    start = time.process_time()
    result = function(*arguments)
    times[name] = times.get(name, 0.0) + time.process_time() - start
    return result


if __name__ == "__main__":
    main()
