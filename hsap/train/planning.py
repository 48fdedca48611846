"""Planning ahead: one rank of an SP group compiles each micro-batch's plan, verifies and publishes it; all load it.

Plans travel as data (`Plan.to_bytes`) through torch's own store, `data.lookahead` steps before they are needed. The
compiling rank rotates over the group; with planner auto it alone compiles the candidates and chooses, and the others
get what it chose. An error while planning is published in the plan's place, so that every rank
ends with the same message instead of waiting.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch.distributed as dist

from hsap.api import compile
from hsap.data.batch import MicroBatch
from hsap.data.loader import StepBatch
from hsap.data.prefetch import Prefetch
from hsap.ir.layout import Layout
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem
from hsap.ir.shared import shared_masks
from hsap.ir.summary import summary
from hsap.verify import verify

_OK, _REFUSED, _FAILED = b"\0", b"\1", b"\2"
_POLL_S = 0.004


@dataclass(frozen=True, slots=True)
class PlanningSetup:
    """How micro-batches become plans: a problem without its layout, the planner and its options."""

    problem: Problem
    planner: str
    options: dict
    verify: bool

    def plan(self, batch: MicroBatch) -> Plan:
        """Compile and (by default) verify the plan of a micro-batch; ValueError where that fails."""
        plan = self.compile(Layout.from_lengths(batch.lengths, batch.sequences), batch.answers)
        if self.verify:
            report = verify(plan)
            if not report.ok:
                raise ValueError(f"planner {plan.planner} made a plan that the verifier rejects:\n{report}")
        return plan

    def compile(self, layout: Layout, answers: Sequence[Sequence[int]] = ()) -> Plan:
        """Compile the plan of a layout, with the answers of each document if any has some; ValueError where that fails.

        Each of the model's masks stays an entry of its own, so that layers find theirs by the same index.
        """
        masks = self.problem.masks
        if any(answers):
            masks = tuple((shared_masks(mask, layout.lengths, answers), layers) for mask, layers in masks)
        return compile(replace(self.problem, layout=layout, masks=masks), self.planner, **self.options)


class PlanExchange:
    """Publishes and fetches the plans of one SP group.

    store: a key-value store all its ranks reach. name: distinguishes SP groups (dp rank) and uses.
    """

    def __init__(self, store: dist.Store | None, name: str, rank: int, num_ranks: int, setup: PlanningSetup) -> None:
        self.store, self.name, self.rank, self.num_ranks, self.setup = store, name, rank, num_ranks, setup
        self.closed = threading.Event()
        self._mine: dict[int, Plan | Exception] = {}

    def publish(self, batch: MicroBatch, number: int) -> None:
        """Compile and publish the plan of the group's micro-batch with that running number, if it's this rank's turn.

        What goes wrong is published too, and raised by every rank's `get`.
        """
        if number % self.num_ranks != self.rank:
            return
        try:
            plan = self._mine[number] = self.setup.plan(batch)
            data = _OK + plan.to_bytes() if self.num_ranks > 1 else b""
        except ValueError as error:
            self._mine[number] = error
            data = _REFUSED + str(error).encode()
        except Exception as error:
            self._mine[number] = error
            data = _FAILED + traceback.format_exc().encode()
        if self.num_ranks > 1:
            self.store.set(self._key(number), data)

    def get(self, number: int) -> Plan:
        """Plan of a micro-batch, this rank's own or another's.

        ValueError: why there is no such plan. RuntimeError: the planner failed on the rank whose turn it was.
        """
        if number in self._mine:
            plan = self._mine.pop(number)
            if isinstance(plan, Exception):
                raise plan
            return plan
        data = self._fetch(self._key(number))
        if data[:1] == _REFUSED:
            raise ValueError(data[1:].decode())
        if data[:1] == _FAILED:
            raise RuntimeError(f"planning failed on rank {number % self.num_ranks}:\n{data[1:].decode()}")
        return Plan.from_bytes(data[1:])

    def _key(self, number: int) -> str:
        return f"hsap/plan/{self.name}/{number}"

    def _fetch(self, key: str) -> bytes:
        """Wait for another rank's plan, but no longer than somebody wants it: a blocking `get` couldn't be ended."""
        while not self.store.check([key]):
            if self.closed.is_set():
                raise RuntimeError("planning ends: the run does")
            time.sleep(_POLL_S)
        return self.store.get(key)

    def forget(self, number: int) -> None:
        """Drop a plan that every rank has used."""
        if self.num_ranks > 1 and number >= 0 and number % self.num_ranks == self.rank:
            self.store.delete_key(self._key(number))


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What a step's plans promise, summed over an SP group's micro-batches; bytes over all layers, both directions."""

    max_area: float = 0.0
    mean_area: float = 0.0
    max_tokens: float = 0.0
    mean_tokens: float = 0.0
    area: float = 0.0
    intra_node_bytes: float = 0.0
    inter_node_bytes: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A step's batch with the plan of each of its micro-batches.

    figures: of the SP group's plans on its rank 0, zeros on the others. data_s, plan_s: how long the background thread
    waited for the batch and for the plans.
    """

    batch: StepBatch
    plans: tuple[Plan, ...]
    figures: PlanFigures
    data_s: float
    plan_s: float


class PlannedSteps:
    """Steps with their plans, prepared ahead on a background thread.

    data_wait_s, plan_wait_s: how long the last `next` took, split as the thread's own waiting for that step was.
    """

    def __init__(self, loader: Iterator[StepBatch], exchange: PlanExchange, lookahead: int) -> None:
        self._steps = Prefetch(_planned(loader, exchange, lookahead), lookahead)
        self._exchange = exchange
        self.data_wait_s = self.plan_wait_s = 0.0

    def __iter__(self) -> PlannedSteps:
        return self

    def __next__(self) -> PlannedStep:
        start = time.perf_counter()
        step = next(self._steps)
        waited_s = time.perf_counter() - start
        self.data_wait_s = waited_s * step.data_s / (step.data_s + step.plan_s)
        self.plan_wait_s = waited_s - self.data_wait_s
        return step

    def close(self) -> None:
        """End the background thread."""
        self._exchange.closed.set()
        self._steps.close()


def _planned(loader: Iterator[StepBatch], exchange: PlanExchange, lookahead: int) -> Iterator[PlannedStep]:
    """Plan steps in order; a rank compiles its own share of the next `lookahead` steps before it waits for others."""
    ahead: deque[StepBatch] = deque()
    more = True
    while more or ahead:
        start = time.perf_counter()
        fresh = list(islice(loader, lookahead + 1 - len(ahead))) if more else []
        more = len(ahead) + len(fresh) == lookahead + 1
        got = time.perf_counter()
        for batch in fresh:
            for micro, number in zip(batch.micro_batches, _numbers(batch)):
                exchange.publish(micro, number)
        ahead.extend(fresh)
        if not ahead:
            return
        batch = ahead.popleft()
        numbers = _numbers(batch)
        plans = tuple(exchange.get(number) for number in numbers)
        # All ranks finish a step together, and none is further behind than the queue is long.
        for number in numbers:
            exchange.forget(number - (lookahead + 2) * len(numbers))
        figures = _figures(plans) if exchange.rank == 0 else PlanFigures()
        yield PlannedStep(batch, plans, figures, got - start, time.perf_counter() - got)


def _numbers(batch: StepBatch) -> range:
    """Running numbers of a step's micro-batches."""
    count = len(batch.micro_batches)
    return range(batch.step * count, (batch.step + 1) * count)


def _figures(plans: tuple[Plan, ...]) -> PlanFigures:
    rows = []
    for plan in plans:
        figures = summary(plan)
        area, tokens = np.array(figures["area_per_rank"]), plan.tokens_per_rank
        layers = sum(count for _, count in plan.problem.masks)
        total, between = (
            layers * (figures["forward"][name] + figures["backward"][name])
            for name in ("bytes_total", "bytes_internode")
        )
        balance = (area.max(initial=0), area.mean(), tokens.max(initial=0), tokens.mean(), area.sum())
        rows.append((*balance, total - between, between))
    return PlanFigures(*np.sum(rows, axis=0).tolist())
