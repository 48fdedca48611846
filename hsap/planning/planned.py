"""Planned: what a loop asks of a micro-batch's plans and of what they travel through, be it one plan or several."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from hsap.data.batch import MicroBatch
from hsap.planning.compiling import PlanFigures


class Planned(Protocol):
    """A micro-batch's plan, or its plans, which place tokens alike; `hsap.ir.plan.Plan` says what the names mean."""

    @property
    def hash(self) -> str: ...

    @property
    def planner(self) -> str: ...

    @property
    def choice(self) -> dict[str, float | str] | None: ...

    def rank_spans(self, rank: int) -> np.ndarray: ...


class Exchange(Protocol):
    """What plans of an SP group travel through; `hsap.planning.exchange.PlanExchange` says what the names mean."""

    rank: int
    closed: threading.Event

    def publish(self, batch: MicroBatch, number: int) -> None: ...

    def get(self, number: int) -> Planned: ...

    def get_both(self, number: int) -> tuple[Planned, PlanFigures]: ...

    def forget(self, number: int) -> None: ...
