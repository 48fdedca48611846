"""Interpreter: what the executor's own code costs per instruction, with nothing to compute and nobody to talk to.

A plan's streams run, rank after rank in one process, on a machine whose kernels, merges, resharding copies and
transport return at once. What is left is the interpreter: the loop over steps, finding buffers, cutting rows and heads
out of them, listing a round's messages. Sums and copies have no function that could be replaced: they run, on packs
made so small that they cost what a call of torch costs, which is counted too. The figure is the fastest of many runs
over all instructions, those that decoding has joined to a launch included, as the plan counts them.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import hsap
from hsap.ir.heads import HeadShape
from hsap.ir.plan import Plan
from hsap.runtime.machine import BACKWARD, FORWARD, Machine
from hsap.runtime.memory import Arena
from tests.bench.packs import scaled

SMALL_TOKENS, SMALL_DIM = 1024, 1
_SILENCED = ("hsap.runtime.decode.merge", "hsap.runtime.decode.reset", "hsap.runtime.resharding._copy")


@dataclass(frozen=True, slots=True)
class Dispatch:
    """us_per_instruction: of both directions over all ranks. us_by_step: mean of each kind of step, with a clock around
    it. instructions: of the small plan that was run."""

    us_per_instruction: float
    us_by_step: dict[str, float]
    instructions: int


def miniature(plan: Plan) -> Plan:
    """Plan the same documents, far shorter, with the same planner for the same ranks."""
    problem = plan.problem
    heads = HeadShape(problem.heads.num_q_heads, problem.heads.num_kv_heads, SMALL_DIM, problem.heads.dtype)
    layout = hsap.Layout.from_lengths(scaled(problem.layout.lengths, SMALL_TOKENS))
    small = hsap.Problem(layout, heads, problem.topology, problem.masks, problem.cluster)
    return hsap.compile(small, plan.planner, **plan.options)


def dispatch(plan: Plan, runs: int = 30) -> Dispatch:
    """Measure the interpreter on the miniature of a plan."""
    small = miniature(plan)
    best, by_step = 0.0, defaultdict(list)
    with ExitStack() as stack:
        for name in _SILENCED:
            stack.enter_context(mock.patch(name, lambda *_: None))
        for rank in range(small.num_ranks):
            for direction in (FORWARD, BACKWARD):
                machine = _machine(small, rank, direction)
                best += min(_run(machine, direction) for _ in range(runs))
                _run_by_step(machine, direction, runs, by_step)
    by_kind = {kind: 1e6 * sum(times) / len(times) for kind, times in sorted(by_step.items())}
    return Dispatch(1e6 * best / small.num_instructions, by_kind, small.num_instructions)


class _Silent:
    """A kernel and a transport that do nothing."""

    name = "silent"

    def prepare(self, *_):
        return None

    def attend(self, *_):
        return None

    attend_grad = launch = attend

    def wait(self, _):
        return True


def _machine(plan: Plan, rank: int, direction: int) -> Machine:
    """A rank's machine whose buffers are all there."""
    silent = _Silent()
    machine = Machine(plan, rank, silent, silent, Arena("cpu"))
    decoded = machine.decode(0, direction)
    memory = decoded.memory
    for places in memory.outside.values():
        for place in places:
            memory.allocate(decoded.buffers, place)
    return machine


def _run(machine: Machine, direction: int) -> float:
    decoded = machine.decoded[0, direction]
    views, transport = decoded.memory.views, machine.transport
    place = machine.position.words
    start = time.perf_counter()
    # As `Machine._run` does it.
    for place[0], step in zip(decoded.codes, decoded.steps):
        while step(views, transport) is False:
            pass
    return time.perf_counter() - start


def _run_by_step(machine: Machine, direction: int, runs: int, by_step: dict[str, list[float]]) -> None:
    """Add each step's fastest time to the list of its kind."""
    decoded = machine.decoded[0, direction]
    views, transport, best = decoded.memory.views, machine.transport, [math.inf] * len(decoded.steps)
    for _ in range(runs):
        for i, step in enumerate(decoded.steps):
            start = time.perf_counter()
            step(views, transport)
            best[i] = min(best[i], time.perf_counter() - start)
    for name, seconds in zip(decoded.names, best):
        by_step[name.split()[1] if " " in name else name].append(seconds)
