"""Timeline: a simulated plan as a value, with its figures and a chart in text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hsap.ir.check import one_of, whole
from hsap.ir.cluster import Cluster
from hsap.ir.effects import flows
from hsap.ir.plan import Plan
from hsap.ir.program import Op, Programs
from hsap.ir.schedule import DIRECTIONS
from hsap.sim.clock import Times, tick
from hsap.sim.cost import Messages, compute_seconds, opening_seconds
from hsap.sim.share import Shares
from hsap.sim.spent import spent

ATTENDING, MOVING, WAITING, IDLE = "█▒·—"
"""Cells of the chart: attention, other work on the compute stream, waiting for messages, done before others are."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One mask and direction of a plan on the time axis.

    seconds: float64 [n], what each instruction costs its compute stream at full speed, a rank's first one with what
    comes before its stream. times: when, see `Times`. spent_s: float64 [num_ranks, 5], what each rank's makespan_s goes
    to, see `hsap.sim.spent`. peak_bytes: int64 [num_ranks], the arena that is used.
    """

    programs: Programs
    seconds: np.ndarray
    times: Times
    makespan_s: float
    spent_s: np.ndarray
    intra_bytes: int
    inter_bytes: int
    peak_bytes: np.ndarray

    @property
    def busy_s(self) -> np.ndarray:
        """Seconds that each rank computes: float64 [num_ranks]."""
        return self.spent_s[:, :2].sum(axis=1)

    @property
    def exposed_s(self) -> np.ndarray:
        """Seconds that each rank waits for messages: float64 [num_ranks]."""
        return self.spent_s[:, 2]

    @property
    def idle_s(self) -> np.ndarray:
        """Seconds that each rank is done before the last one: float64 [num_ranks]."""
        return self.spent_s[:, 3:].sum(axis=1)

    def summary(self) -> dict[str, Any]:
        """Figures as JSON values; seconds of one layer."""
        return {
            "predicted_s": self.makespan_s,
            "busy_s_per_rank": self.busy_s.tolist(),
            "exposed_s_per_rank": self.exposed_s.tolist(),
            "idle_s_per_rank": self.idle_s.tolist(),
            "bytes_intranode": self.intra_bytes,
            "bytes_internode": self.inter_bytes,
            "peak_buffer_bytes_per_rank": int(self.peak_bytes.max(initial=0)),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """When a plan's instructions run on a cluster: traces[mask][direction], direction 0 forward, 1 backward."""

    plan: Plan
    cluster: Cluster
    traces: tuple[tuple[Trace, Trace], ...]

    def __getitem__(self, direction: str) -> tuple[Trace, ...]:
        """Traces of all masks in that direction."""
        index = DIRECTIONS.index(one_of("timeline: unknown direction", direction, DIRECTIONS))
        return tuple(pair[index] for pair in self.traces)

    def seconds(self, direction: str) -> float:
        """Predicted seconds of attention in one layer and direction, the mean over the model's layers."""
        return self._mean([trace.makespan_s for trace in self[direction]])

    @property
    def makespans_s(self) -> tuple[tuple[float, float], ...]:
        """Predicted seconds of a layer of each mask: [mask][direction]."""
        return tuple((forward.makespan_s, backward.makespan_s) for forward, backward in self.traces)

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of attention in one layer, forward and backward, the mean over the model's layers."""
        return sum(self.seconds(direction) for direction in DIRECTIONS)

    def _mean(self, values: Sequence[float]) -> float:
        return float(np.average(values, weights=[layers for _, layers in self.plan.problem.masks]))

    def summary(self) -> dict[str, Any]:
        """Figures as JSON values.

        With several masks seconds and bytes are means weighted by layers, the peak the largest, and `per_mask` has each
        mask's own.
        """
        out = {
            "planner": self.plan.planner,
            "topology": str(self.plan.problem.topology),
            "cluster": self.cluster.name,
            "predicted_s": self.predicted_s,
        }
        layers = [count for _, count in self.plan.problem.masks]
        masks = [{d: trace.summary() for d, trace in zip(DIRECTIONS, pair)} for pair in self.traces]
        for direction in DIRECTIONS:
            parts = [mask[direction] for mask in masks]
            mean = {name: np.average([p[name] for p in parts], axis=0, weights=layers).tolist() for name in parts[0]}
            out[direction] = mean | {"peak_buffer_bytes_per_rank": max(p["peak_buffer_bytes_per_rank"] for p in parts)}
        return out | ({"per_mask": masks} if len(masks) > 1 else {})

    def chart(self, direction: str = "forward", mask: int = 0, width: int = 80) -> str:
        """Draw the compute streams, a line per rank and `width` cells for the makespan.

        A cell shows what took most of its time: █ attention, ▒ other work, · waiting for messages, — done.
        """
        whole("chart: width", width, 1, 1 << 12)
        whole("chart: mask", mask, 0, len(self.traces) - 1)
        trace = self[direction][mask]
        label = len(str(trace.programs.num_ranks - 1)) + 1
        lines = [f"{f'r{r}':>{label}} {_row(trace, r, width)}" for r in range(trace.programs.num_ranks)]
        legend = f"{ATTENDING} attention  {MOVING} copies and sums  {WAITING} waiting  {IDLE} done"
        return "\n".join([*lines, f"{direction}, mask {mask}: {trace.makespan_s * 1e3:.4g} ms; {legend}"])


def simulate(plan: Plan, cluster: Cluster) -> Timeline:
    """Run a plan against the clock on a cluster, which may be another than the problem's.

    Deterministic. Where ranks share nothing, every time is the exact maximum over what must happen before; else also of
    how fast things go meanwhile, see `hsap.sim.clock`. ValueError: the cluster has too few nodes, or the streams don't
    end (those of a verified plan do).
    """
    node_of = replace(plan.problem, cluster=cluster).node_of
    traces = tuple(
        (_trace(plan, pair[0], slices, cluster, node_of), _trace(plan, pair[1], slices, cluster, node_of))
        for slices, pair in zip(plan.slices, plan.programs)
    )
    return Timeline(plan, cluster, traces)


def _trace(plan: Plan, programs: Programs, slices: np.ndarray, cluster: Cluster, node_of: np.ndarray) -> Trace:
    seconds = compute_seconds(plan, programs, slices, cluster)
    opens = np.diff(programs.offsets) > 0
    seconds[programs.offsets[:-1][opens]] += opening_seconds(plan, programs, cluster)[opens]
    carried = flows(plan, programs)
    messages = Messages.of(carried, node_of, cluster)
    times = tick(programs, seconds, carried, messages, Shares.of(cluster, programs.num_ranks))
    inter_bytes = int(carried.num_bytes[messages.crosses].sum())
    return Trace(
        programs,
        seconds,
        times,
        *spent(programs, times),
        int(carried.num_bytes.sum()) - inter_bytes,
        inter_bytes,
        programs.arena_bytes(),
    )


def _row(trace: Trace, rank: int, width: int) -> str:
    """Cells of one rank."""
    if not trace.makespan_s:
        return IDLE * width
    lo, hi = trace.programs.offsets[rank : rank + 2]
    op, start = trace.programs.op[lo:hi], trace.times.start[lo:hi]
    worked = trace.times.worked[lo:hi]
    attends = (op == Op.ATTEND) | (op == Op.ATTEND_GRAD)
    spent = np.zeros((4, width))
    for kind, begins, ends in ((0, start[attends], worked[attends]), (1, start[~attends], worked[~attends]),
                               (2, worked, trace.times.end[lo:hi])):  # fmt: skip
        spent[kind] = _time_in_cells(begins, ends, trace.makespan_s, width)
    spent[3] = trace.makespan_s / width - spent[:3].sum(axis=0)
    return "".join((ATTENDING + MOVING + WAITING + IDLE)[kind] for kind in spent.argmax(axis=0))


def _time_in_cells(begins: np.ndarray, ends: np.ndarray, makespan_s: float, width: int) -> np.ndarray:
    """Time of disjoint intervals that falls into each of `width` equal cells: float64 [width]."""
    borders = np.linspace(0, makespan_s, width + 1)
    points = np.stack([begins, ends], axis=1).ravel()
    elapsed = np.cumsum(np.stack([np.zeros(len(begins)), ends - begins], axis=1).ravel())
    return np.diff(np.interp(borders, points, elapsed)) if len(points) else np.zeros(width)
