"""Compiling: how a micro-batch becomes a plan, without torch, so that processes that only plan can know it too.

What goes to such a process and what comes back is data: the setup and a micro-batch's shape as JSON, the outcome as a
byte that says what it is, then the plan's stored form or a text.
"""

from __future__ import annotations

import json
import struct
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hsap.api import compile
from hsap.ir.layout import Layout
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, problem_from_json, problem_to_json
from hsap.ir.shared import shared_masks
from hsap.ir.summary import summary
from hsap.verify import verify

if TYPE_CHECKING:
    from hsap.data.batch import MicroBatch

_PLANNED, _REFUSED, _FAILED = b"\0", b"\1", b"\2"


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a micro-batch its plan depends on; `MicroBatch` says what the fields are."""

    lengths: tuple[int, ...]
    sequences: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, batch: MicroBatch | Shape) -> Shape:
        """Take the shape of a micro-batch."""
        return cls(batch.lengths, batch.sequences, batch.answers)

    def to_bytes(self) -> bytes:
        """Give it as JSON."""
        return json.dumps(astuple(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Shape:
        """Read what `to_bytes` gives."""
        lengths, sequences, answers = json.loads(data)
        return cls(tuple(lengths), tuple(sequences), tuple(map(tuple, answers)))


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What plans promise, summed over micro-batches; bytes over all layers, both directions."""

    max_area: float = 0.0
    mean_area: float = 0.0
    max_tokens: float = 0.0
    mean_tokens: float = 0.0
    area: float = 0.0
    intra_node_bytes: float = 0.0
    inter_node_bytes: float = 0.0

    @classmethod
    def of(cls, plan: Plan) -> PlanFigures:
        """Read them off a plan."""
        figures = summary(plan)
        area, tokens = np.array(figures["area_per_rank"]), plan.tokens_per_rank
        layers = sum(count for _, count in plan.problem.masks)
        total, between = (
            layers * (figures["forward"][name] + figures["backward"][name])
            for name in ("bytes_total", "bytes_internode")
        )
        balance = (area.max(initial=0), area.mean(), tokens.max(initial=0), tokens.mean(), area.sum())
        return cls(*map(float, (*balance, total - between, between)))

    @classmethod
    def total(cls, figures: Iterable[PlanFigures]) -> PlanFigures:
        """Add them up."""
        return cls(*map(sum, zip(*map(astuple, figures), strict=True)))


_FIGURES = struct.Struct(f"<{len(astuple(PlanFigures()))}d")


@dataclass(frozen=True, slots=True)
class PlanningSetup:
    """How micro-batches become plans: a problem without its layout, the planner and its options."""

    problem: Problem
    planner: str
    options: dict[str, Any]
    verify: bool

    def plan(self, batch: MicroBatch | Shape) -> Plan:
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
        masks: Any = self.problem.masks
        if any(answers):
            masks = tuple((shared_masks(mask, layout.lengths, answers), layers) for mask, layers in masks)
        return compile(replace(self.problem, layout=layout, masks=masks), self.planner, **self.options)

    def outcome(self, shape: Shape) -> bytes:
        """Plan, and say what came of it, errors too, as bytes that `opened` reads. Nothing is raised but by the end."""
        try:
            plan = self.plan(shape)
            return _PLANNED + _FIGURES.pack(*astuple(PlanFigures.of(plan))) + plan.to_bytes()
        except ValueError as error:
            return _REFUSED + str(error).encode()
        except Exception:
            return failure(traceback.format_exc())

    def to_bytes(self) -> bytes:
        """Give it as JSON."""
        problem = problem_to_json(self.problem)
        return json.dumps([problem, self.planner, self.options, self.verify]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PlanningSetup:
        """Read what `to_bytes` gives."""
        problem, *rest = json.loads(data)
        return cls(problem_from_json(problem), *rest)


def failure(text: str) -> bytes:
    """Give the outcome of planning that failed otherwise than by a refusal."""
    return _FAILED + text.encode()


def opened(outcome: bytes, rank: int) -> tuple[Plan, PlanFigures]:
    """Read the outcome of planning on a rank of the SP group.

    ValueError: why there is no such plan. RuntimeError: planning failed there.
    """
    kind, rest = outcome[:1], outcome[1:]
    if kind == _REFUSED:
        raise ValueError(rest.decode())
    if kind == _FAILED:
        raise RuntimeError(f"planning failed on rank {rank}:\n{rest.decode()}")
    # The rank that made it has verified it, unless its user said verify=false.
    return Plan.from_bytes(rest[_FIGURES.size :]).vouched(), PlanFigures(*_FIGURES.unpack_from(rest))
