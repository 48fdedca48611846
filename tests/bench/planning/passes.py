"""Passes: where the time of planning goes, pass by pass.

One row per planner, workload and topology, on the workload's first pack: medians over runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from hsap import planners
from hsap.cli.plan import read_planner
from hsap.compiler.pipeline import build, watched
from hsap.ir.layout import Layout
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology
from hsap.verify import verify
from tests.bench.planning.cases import HEADS, WORKLOADS

COLUMNS = {
    "choose": ("run",),
    "order": ("order", "relay", "prefetch", "without_overlap"),
    "lower": ("widen", "lay", "lower"),
    "expand": ("place_rows", "expand"),
    "buffers": ("place_buffers",),
    "verify": ("verify",),
}
"""Functions that each column of the table adds up: the planner, passes of the pipeline, the verifier."""
HEADER = f"{'planner':<16}{'workload':<16}{'ranks':>6}{'instr.':>9}" + "".join(f"{name:>9}" for name in COLUMNS)
HEADER += f"{'µs/instr.':>11}"


def print_table(names: Sequence[str], workloads: Sequence[str], topologies: Sequence[str], runs: int) -> None:
    """Print the table; times in ms, µs per instruction over all passes but the planner's own."""
    print(f"\npasses: CPU times in ms\n{HEADER}")
    for workload in workloads:
        layout = Layout.from_lengths(WORKLOADS[workload][0])
        for topology in topologies:
            for name in names:
                if read_planner(name)[0] == planners.AUTO:  # it has no passes of its own
                    continue
                problem = Problem(layout, HEADS, Topology.parse(topology))
                print(row(name, workload, problem, runs), flush=True)


def row(planner: str, workload: str, problem: Problem, runs: int) -> str:
    """Time one planner on one problem, as a line of the table."""
    name, options = read_planner(planner)
    taken = []
    for _ in range(runs + 1):  # the first one loads what is compiled, and isn't counted
        times, plan = _plan(problem, name, options)
        taken.append(times)
    middle = {
        column: median(sum(times[name] for name in names) for times in taken[1:]) for column, names in COLUMNS.items()
    }
    per_instruction = (sum(middle.values()) - middle["choose"]) / plan.num_instructions
    cells = "".join(f"{cpu_s * 1e3:>9.1f}" for cpu_s in middle.values())
    return (
        f"{planner:<16}{workload:<16}{problem.topology!s:>6}{plan.num_instructions:>9}{cells}"
        f"{per_instruction * 1e6:>11.2f}"
    )


def _plan(problem: Problem, planner: str, options: dict) -> tuple[Counter[str], Plan]:
    """Plan and verify once: CPU seconds by function, and the plan."""
    times: Counter[str] = Counter()

    def watch(name: str, cpu_s: float, made: object) -> None:
        times[name] += cpu_s

    strategy = watched(watch, planners.run, planner, problem, options)
    plan = build(problem, strategy, planner, options, watch)
    report = watched(watch, verify, plan)
    assert report.ok, str(report)
    return times, plan
