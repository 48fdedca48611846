"""Steps: batches of a run with their plans, seen to ahead on a background thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from hsap.data.loader import StepBatch
from hsap.data.prefetch import Prefetch
from hsap.planning.compiling import PlanFigures
from hsap.planning.planned import Exchange, Planned
from hsap.position import Planning, Position


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A step's batch with the plan of each of its micro-batches.

    plans: what the exchange gives for a micro-batch. figures: of the SP group's plans on its rank 0, zeros on the
    others. data_s, plan_s: how long the background thread waited for the batch and for the plans.
    """

    batch: StepBatch
    plans: tuple[Planned, ...]
    figures: PlanFigures
    data_s: float
    plan_s: float


class PlannedSteps:
    """Steps with their plans, prepared ahead on a background thread.

    data_wait_s, plan_wait_s: how long the last `next` took, split as the thread's own waiting for that step was.
    position: where it is noted when the thread reads data.
    """

    def __init__(
        self, loader: Iterator[StepBatch], exchange: Exchange, lookahead: int, position: Position | None = None
    ) -> None:
        self._steps = Prefetch(_planned(loader, exchange, lookahead, position or Position()), lookahead)
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


def _planned(
    loader: Iterator[StepBatch], exchange: Exchange, lookahead: int, position: Position
) -> Iterator[PlannedStep]:
    """Plan steps in order; a rank sees to its own share of the next `lookahead` steps before it waits for others."""
    ahead: deque[StepBatch] = deque()
    more = True
    while more or ahead:
        start = time.perf_counter()
        position.planning(Planning.READS)
        fresh = list(islice(loader, lookahead + 1 - len(ahead))) if more else []
        more = len(ahead) + len(fresh) == lookahead + 1
        got = time.perf_counter()
        position.planning(Planning.NOTHING)
        for batch in fresh:
            for micro, number in zip(batch.micro_batches, _numbers(batch)):
                exchange.publish(micro, number)
        ahead.extend(fresh)
        if not ahead:
            return
        batch = ahead.popleft()
        numbers = _numbers(batch)
        plans, figures = zip(*map(exchange.get_both, numbers))
        # All ranks finish a step together, and none is further behind than the queue is long.
        for number in numbers:
            exchange.forget(number - (lookahead + 2) * len(numbers))
        promised = PlanFigures.total(figures) if exchange.rank == 0 else PlanFigures()
        yield PlannedStep(batch, plans, promised, got - start, time.perf_counter() - got)


def _numbers(batch: StepBatch) -> range:
    """Running numbers of a step's micro-batches."""
    count = len(batch.micro_batches)
    return range(batch.step * count, (batch.step + 1) * count)
