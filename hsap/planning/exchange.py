"""Planning ahead: one rank of an SP group has each micro-batch's plan made and publishes it; all load it.

Plans travel as data (`hsap.planning.compiling`) through torch's own store, `data.lookahead` steps before they are
needed. The planning rank goes round the group, node after node, so that plans of neighbouring micro-batches, of all the
steps in advance, are made at the same time in different places. With planner auto it alone compiles the candidates and
chooses, and the others get what it chose. Micro-batches of one shape share a plan as long as the last one is
remembered. An error while planning is published in the plan's place, so that every rank ends with the same message
instead of waiting.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsap.data.batch import MicroBatch
from hsap.ir.plan import Plan
from hsap.planning.compiling import PlanFigures, PlanningSetup, Shape, opened
from hsap.planning.pool import CLOSED, PlanPool
from hsap.position import Planning, Position

_POLL_S = 0.004
_NOTICE_S = 0.1
_KEPT_SHAPES = 8


def planning_turns(node_of: np.ndarray) -> list[int]:
    """Order in which ranks plan: the first of every node, the second of every node, and so on. node_of: [num_ranks]."""
    seen: dict[int, int] = {}
    places = []
    for node in node_of.tolist():
        places.append((seen.get(node, 0), node))
        seen[node] = places[-1][0] + 1
    return sorted(range(len(places)), key=places.__getitem__)


@dataclass(slots=True)
class _Awaited:
    """A plan to come, for all micro-batches of its shape. outcome: where it is made on this rank."""

    number: int
    outcome: futures.Future[bytes] | None = None
    opened: tuple[Plan, PlanFigures] | None = None


class PlanExchange:
    """Publishes and fetches the plans of one SP group.

    store: a key-value store all its ranks reach; None for one rank. name: distinguishes SP groups (dp rank) and uses.
    pool: plans in processes, several at a time and while `publish` returns; None: `publish` itself does.
    All ranks call `publish` with the same micro-batches in the same order. position: where it is noted what is planned
    or waited for.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        rank: int,
        num_ranks: int,
        setup: PlanningSetup,
        pool: PlanPool | None = None,
        position: Position | None = None,
    ) -> None:
        self.position = position or Position()
        self.store, self.name, self.rank, self.setup, self.pool = store, name, rank, setup, pool
        self.closed = threading.Event()
        self._turns = planning_turns(setup.problem.node_of)
        assert len(self._turns) == num_ranks
        self._coming: dict[int, _Awaited] = {}
        self._shapes: OrderedDict[Shape, _Awaited] = OrderedDict()
        self._published: set[int] = set()

    def publish(self, batch: MicroBatch | Shape, number: int) -> None:
        """Have the plan of the group's micro-batch with that running number made, if it's this rank's turn.

        A shape whose plan is remembered needs none. What goes wrong is published too, and raised by every rank's `get`.
        """
        shape = Shape.of(batch)
        awaited = self._shapes.pop(shape, None)
        if awaited is None:
            awaited = _Awaited(number)
            if self._planner_of(number) == self.rank:
                awaited.outcome = self._plan(shape, number)
        self._coming[number] = self._shapes[shape] = awaited
        if len(self._shapes) > _KEPT_SHAPES:
            self._shapes.popitem(last=False)

    def get(self, number: int) -> Plan:
        """Plan of a micro-batch that went through `publish`; see `get_both`."""
        return self.get_both(number)[0]

    def get_both(self, number: int) -> tuple[Plan, PlanFigures]:
        """Plan of a micro-batch, and its figures; waits for it, and may be called once for each.

        ValueError: why there is no such plan. RuntimeError: the planner failed on the rank whose turn it was.
        """
        awaited = self._coming.pop(number)
        if awaited.opened is None:
            planner, own = self._planner_of(awaited.number), awaited.outcome
            self.position.planning(Planning.AWAITS if own is None else Planning.PLANS, awaited.number, planner)
            outcome = self._fetch(awaited.number) if own is None else self._own(own)
            awaited.opened = opened(outcome, planner)
            awaited.outcome = None
            self.position.planning(Planning.NOTHING)
        return awaited.opened

    def forget(self, number: int) -> None:
        """Drop what was published for a micro-batch whose step every rank has begun."""
        if number in self._published:
            self._published.remove(number)
            self.store.delete_key(self._key(number))

    def _planner_of(self, number: int) -> int:
        return self._turns[number % len(self._turns)]

    def _plan(self, shape: Shape, number: int) -> futures.Future[bytes]:
        def publish(outcome: bytes) -> None:
            if self.store is not None:
                self.store.set(self._key(number), outcome)

        if self.store is not None:
            self._published.add(number)
        if self.pool is not None:
            return self.pool.submit(shape, publish)
        self.position.planning(Planning.PLANS, number, self.rank)
        done: futures.Future[bytes] = futures.Future()
        outcome = self.setup.outcome(shape)
        publish(outcome)
        done.set_result(outcome)
        return done

    def _key(self, number: int) -> str:
        return f"hsap/plan/{self.name}/{number}"

    def _own(self, outcome: futures.Future[bytes]) -> bytes:
        """Wait for this rank's own plan, but no longer than somebody wants it."""
        while not futures.wait((outcome,), _NOTICE_S).done:
            if self.closed.is_set():
                raise RuntimeError(CLOSED)
        return outcome.result()

    def _fetch(self, number: int) -> bytes:
        """Wait for another rank's plan, but no longer than somebody wants it: a blocking `get` couldn't be ended."""
        key = self._key(number)
        while not self.store.check([key]):
            if self.closed.is_set():
                raise RuntimeError(CLOSED)
            time.sleep(_POLL_S)
        return self.store.get(key)
