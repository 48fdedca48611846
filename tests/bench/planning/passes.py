"""Passes: where the time of planning goes, pass by pass.

One row per planner, workload and topology, on the workload's first pack: medians over runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from hsap import planners
from hsap.cli.plan import read_planner
from hsap.compiler.buffers import place_buffers
from hsap.compiler.expand import expand, place_rows
from hsap.compiler.lower import lower
from hsap.compiler.order import order
from hsap.compiler.pipeline import build
from hsap.compiler.relay import relay
from hsap.compiler.trays import SpanTable
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.ir.schedule import DIRECTIONS, Strategy
from hsap.verify import verify
from tests.bench.planning.cases import HEADS, WORKLOADS

PASSES = ("choose", "order", "lower", "expand", "buffers", "verify")
HEADER = f"{'planner':<16}{'workload':<16}{'ranks':>6}{'instr.':>9}" + "".join(f"{name:>9}" for name in PASSES)
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
        times: dict[str, float] = {}
        strategy = _timed(times, "choose", planners.run, name, problem, options)
        _compile(problem, strategy, times)
        plan = build(problem, strategy, name, options)
        report = _timed(times, "verify", verify, plan)
        assert report.ok, str(report)
        taken.append(times)
    middle = {part: median(times[part] for times in taken[1:]) for part in PASSES}
    per_instruction = sum(middle[part] for part in PASSES[1:]) / plan.num_instructions
    cells = "".join(f"{middle[part] * 1e3:>9.1f}" for part in PASSES)
    return (
        f"{planner:<16}{workload:<16}{problem.topology!s:>6}{plan.num_instructions:>9}{cells}"
        f"{per_instruction * 1e6:>11.2f}"
    )


def _compile(problem: Problem, strategy: Strategy, times: dict[str, float]) -> None:
    """Run the compiler's passes over both directions of the one mask, adding up the time of each."""
    problem = replace(problem, topology=strategy.topology or problem.topology)
    shards, num_groups = strategy.shards, strategy.num_groups
    inter, intra = problem.topology.inter_sp, problem.topology.intra_sp
    spans, *rows = _timed(times, "expand", place_rows, problem, shards)
    table = SpanTable.of(shards, spans)
    for direction, schedule in zip(DIRECTIONS, (strategy.forward[0], strategy.backward[0])):
        transfers = _timed(times, "order", order, shards, schedule, direction)
        if strategy.relay:
            nodes = problem.node_of[::intra]
            transfers = _timed(times, "order", relay, shards, schedule, transfers, problem.heads, nodes)
        draft = _timed(times, "lower", lower, table, schedule, transfers, direction, inter, num_groups, intra > 1)
        programs = _timed(times, "expand", expand, problem, draft, *rows, num_groups, direction)
        table = draft.table
        _timed(times, "buffers", place_buffers, programs)


def _timed(times: dict[str, float], name: str, function, *arguments):
    """Call a function and add its CPU time [s] to times[name]: it is one thread, and other load counts less."""
    start = time.process_time()
    result = function(*arguments)
    times[name] = times.get(name, 0.0) + time.process_time() - start
    return result
