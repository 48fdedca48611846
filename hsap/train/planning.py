"""Planning ahead: one rank of an SP group compiles each micro-batch's plan, verifies and publishes it; all load it.

Plans travel as data (`Plan.to_bytes`) through torch's own store, `data.lookahead` steps before they are needed. The
compiling rank rotates over the group. An error while planning is published in the plan's place, so that every rank
ends with the same message instead of waiting.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from hsap.api import compile
from hsap.data.batch import MicroBatch
from hsap.data.loader import StepBatch
from hsap.data.prefetch import Prefetch
from hsap.ir.layout import Layout
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem
from hsap.verify import verify

_OK, _ERROR = b"\0", b"\1"


@dataclass(frozen=True, slots=True)
class PlanningSetup:
    """How micro-batches become plans: a problem without its layout, the planner and its options."""

    problem: Problem
    planner: str
    options: dict
    verify: bool

    def plan(self, batch: MicroBatch) -> Plan:
        """Compile and (by default) verify the plan of a micro-batch; ValueError where that fails."""
        layout = Layout.from_lengths(batch.lengths, batch.sequences)
        p = self.problem
        problem = Problem(
            layout, p.heads, p.topology, p.masks, p.cluster, p.max_tokens_per_rank, p.arena_multiple, p.wire_dtype
        )
        plan = compile(problem, self.planner, **self.options)
        if self.verify:
            report = verify(plan)
            if not report.ok:
                raise ValueError(f"planner {self.planner} made a plan that the verifier rejects:\n{report}")
        return plan


class PlanExchange:
    """Publishes and fetches the plans of one SP group.

    store: a key-value store all its ranks reach. name: distinguishes SP groups (dp rank) and uses.
    """

    def __init__(self, store: dist.Store | None, name: str, rank: int, num_ranks: int, setup: PlanningSetup) -> None:
        self.store, self.name, self.rank, self.num_ranks, self.setup = store, name, rank, num_ranks, setup

    def get(self, batch: MicroBatch, number: int) -> Plan:
        """Plan of the group's micro-batch with that running number: compiled here if it's this rank's turn."""
        if self.num_ranks == 1:
            return self.setup.plan(batch)
        key = f"hsap/plan/{self.name}/{number}"
        if number % self.num_ranks == self.rank:
            try:
                plan = self.setup.plan(batch)
            except Exception as error:
                self.store.set(key, _ERROR + str(error).encode())
                raise
            self.store.set(key, _OK + plan.to_bytes())
            return plan
        data = self.store.get(key)
        if data[:1] == _ERROR:
            raise ValueError(data[1:].decode())
        return Plan.from_bytes(data[1:])

    def forget(self, number: int) -> None:
        """Drop a plan that every rank has used."""
        if self.num_ranks > 1 and number >= 0 and number % self.num_ranks == self.rank:
            self.store.delete_key(f"hsap/plan/{self.name}/{number}")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A step's batch with the plan of each of its micro-batches."""

    batch: StepBatch
    plans: tuple[Plan, ...]


class PlannedSteps:
    """Steps with their plans, prepared ahead on a background thread; `wait_s` is how long the last `next` took."""

    def __init__(self, loader: Iterator[StepBatch], exchange: PlanExchange, lookahead: int) -> None:
        self._steps = Prefetch(_planned(loader, exchange, lookahead), lookahead)
        self.wait_s = 0.0

    def __iter__(self) -> PlannedSteps:
        return self

    def __next__(self) -> PlannedStep:
        start = time.perf_counter()
        step = next(self._steps)
        self.wait_s = time.perf_counter() - start
        return step

    def close(self) -> None:
        """End the background thread."""
        self._steps.close()


def _planned(loader: Iterator[StepBatch], exchange: PlanExchange, lookahead: int) -> Iterator[PlannedStep]:
    for batch in loader:
        count = len(batch.micro_batches)
        first = batch.step * count
        plans = tuple(exchange.get(micro, first + i) for i, micro in enumerate(batch.micro_batches))
        # All ranks finish a step together, and none is further behind than the queue is long.
        for i in range(count):
            exchange.forget(first - (lookahead + 2) * count + i)
        yield PlannedStep(batch, plans)
