"""Attention: seconds of every micro-batch's attention, of which a few are planned and the others lie between them.

Of a step's micro-batches those with the most, the least and the middle attention are planned; the others lie between
them by their area.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hsap.api import compile, simulate
from hsap.data.packing import Pack
from hsap.ir.problem import Topology
from hsap.planners import run
from hsap.tune.choices import Shape
from hsap.tune.job import Job
from hsap.tune.stages import Priced, price
from hsap.tune.step import MicroSteps


@dataclass(slots=True)
class Sampled:
    """Micro-batches of a shape that were planned by one planner, by their area.

    table: a row each, of forward and backward seconds of a layer and the fullest rank's share of the tokens.
    arena_bytes, tokens: the most of any rank. factor: what the event clock says of either direction, of 1.
    """

    areas: list[float] = field(default_factory=list)
    table: list[tuple[float, float, float]] = field(default_factory=list)
    arena_bytes: int = 0
    tokens: int = 0
    factor: tuple[float, float] = (1.0, 1.0)

    def of(self, areas: np.ndarray, tokens: np.ndarray) -> MicroSteps:
        """Predict micro-batches: by area between those that were planned, in proportion where that is one."""
        order = np.argsort(self.areas, kind="stable")
        known, table = np.array(self.areas)[order], np.array(self.table)[order]
        forward, backward, share = (np.interp(areas, known, column) for column in table.T)
        scale = areas / known[0] if len(known) == 1 and known[0] else 1.0
        return MicroSteps(
            (forward * scale * self.factor[0], backward * scale * self.factor[1]), np.ceil(tokens * share)
        )


class Attention:
    """Prices of a job's micro-batches; what was planned once is remembered."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.hands: dict[tuple[int, int], np.ndarray] = {}
        self.prices: dict[tuple[Topology, str, tuple[Pack, ...]], Priced] = {}

    def sizes(self, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
        """Area and tokens of every micro-batch of every SP group: float64 and int64 [dp, num_micro_steps]."""
        loads, dealt = self.job.loads, self._dealt(shape)
        return loads.areas[dealt].sum(axis=2), loads.tokens[dealt].sum(axis=2)

    def documents(self, shape: Shape) -> int:
        """The most documents that a micro-batch has."""
        return int(self.job.loads.documents[self._dealt(shape)].sum(axis=2).max())

    def sampled(self, shape: Shape, planner: str) -> Sampled:
        """Plan and price up to three micro-batches, the one with the most attention first; ValueError: refused."""
        out = Sampled()
        for micro, area in self._samples(shape):
            problem, key = self.job.problem(micro, shape.topology), (shape.topology, planner, micro)
            if key not in self.prices:
                self.prices[key] = price(problem, run(planner, problem, {}))
            found = self.prices[key]
            out.areas.append(area)
            share = found.tokens / max(problem.layout.num_tokens, 1)
            out.table.append((found.layer_s(problem, 0), found.layer_s(problem, 1), share))
            out.arena_bytes = max(out.arena_bytes, found.arena_bytes)
            out.tokens = max(out.tokens, found.tokens)
        return out

    def clocked(self, shape: Shape, planner: str) -> Sampled:
        """The same, put right by the event clock where there is the most attention."""
        out = self.sampled(shape, planner)
        micro, _ = self._samples(shape)[0]
        plan = compile(self.job.problem(micro, shape.topology), planner)
        timeline = simulate(plan)
        told = timeline.seconds("forward"), timeline.seconds("backward")
        forward, backward = (a / b if b else 1.0 for a, b in zip(told, out.table[0]))
        out.factor = forward, backward
        out.arena_bytes = max(int(plan.arena_bytes().max()), out.arena_bytes)
        return out

    def _dealt(self, shape: Shape) -> np.ndarray:
        key = shape.dp, shape.micro_packs
        if key not in self.hands:
            self.hands[key] = self.job.dealt(*key)
        return self.hands[key]

    def _samples(self, shape: Shape) -> list[tuple[tuple[Pack, ...], float]]:
        """Micro-batches with the most, the least and the middle attention, with their areas."""
        micros, areas = self._dealt(shape).reshape(-1, shape.micro_packs), self.sizes(shape)[0].ravel()
        order = np.argsort(-areas, kind="stable").tolist()
        chosen = dict.fromkeys(
            (tuple(self.job.packs[pack] for pack in micros[i].tolist()), float(areas[i]))
            for i in (order[0], order[-1], order[len(order) // 2])
        )
        return list(chosen)
