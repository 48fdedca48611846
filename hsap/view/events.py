"""Events: scenes as trace-event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process is a node, its threads are its ranks' compute streams and communicators, a flow is a transfer. Masks and
directions follow each other on the time axis. Format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hsap.ir.effects import partners
from hsap.ir.program import Op, Role
from hsap.ir.schedule import DIRECTIONS
from hsap.view.course import Course
from hsap.view.scene import Scene

US = 1e6
"""Trace events count microseconds."""


def trace_events(scenes: Sequence[Scene]) -> dict[str, Any]:
    """Give the JSON value of a trace file; pid: node, a second scene's after the first's; tid: 2 · rank, and + 1."""
    events: list[dict[str, Any]] = []
    first_pid = 0
    for scene in scenes:
        nodes = scene.plan.problem.node_of.tolist()
        events += _names(scene, nodes, first_pid)
        at_s = 0.0
        for mask, pair in enumerate(scene.courses):
            for direction, course in zip(DIRECTIONS, pair):
                if course is not None:
                    category = f"{direction}, mask {mask}"
                    events += _events(course, [first_pid + node for node in nodes], at_s, category, len(events))
                    at_s += course.makespan_s
        first_pid += max(nodes) + 1
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _names(scene: Scene, nodes: list[int], first_pid: int) -> Iterator[dict[str, Any]]:
    for node in sorted(set(nodes)):
        name = {"name": f"{scene.title}, node {node}"}
        yield {"ph": "M", "name": "process_name", "pid": first_pid + node, "args": name}
    for rank, node in enumerate(nodes):
        for tid, what in ((2 * rank, "compute"), (2 * rank + 1, "communicator")):
            name = {"name": f"rank {rank} {what}"}
            yield {"ph": "M", "name": "thread_name", "pid": first_pid + node, "tid": tid, "args": name}
            yield {"ph": "M", "name": "thread_sort_index", "pid": first_pid + node, "tid": tid,
                   "args": {"sort_index": tid}}  # fmt: skip


def _events(course: Course, pids: list[int], at_s: float, category: str, first_flow: int) -> Iterator[dict[str, Any]]:
    """Boxes of all instructions, and a flow from each send to its receive. first_flow: no flow before has it."""
    programs = course.programs
    ranks, met = programs.rank.tolist(), partners(programs).tolist()
    local = (np.arange(len(programs)) - programs.offsets[programs.rank]).tolist()
    on_wire = ~np.isnan(course.comm_start)
    for i, rank in enumerate(ranks):
        op, role = Op(int(programs.op[i])), Role(int(programs.role[i]))
        name = op.name.lower() + (f" {role.name.lower()}" if role != Role.NONE else "")
        common = {"pid": pids[rank], "cat": category}
        told = {"instruction": local[i], "stage": int(programs.stage[i]), "round": int(programs.round[i])}
        # What comes before a rank's stream is counted with its first instruction, which may be a Send.
        if op not in (Op.SEND, Op.RECV) or course.end[i] > course.start[i]:
            yield common | _box(name, 2 * rank, at_s, course.start[i], course.end[i]) | {"args": told}
        if not on_wire[i] or op == Op.LAUNCH:
            continue
        begin, end = course.comm_start[i], course.comm_end[i]
        if met[i] >= 0:
            told["peer"] = int(programs.peer[i])
        yield common | _box(name, 2 * rank + 1, at_s, begin, end) | {"args": told}
        if op == Op.SEND and met[i] >= 0:
            flow = {"name": name, "cat": category, "id": first_flow + i}
            receiver = ranks[met[i]]
            yield flow | {"ph": "s", "pid": pids[rank], "tid": 2 * rank + 1, "ts": (at_s + begin) * US}
            yield flow | {"ph": "f", "bp": "e", "pid": pids[receiver], "tid": 2 * receiver + 1,
                          "ts": (at_s + end) * US}  # fmt: skip


def _box(name: str, tid: int, at_s: float, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "tid": tid, "ts": float(at_s + begin) * US, "dur": float(end - begin) * US}
