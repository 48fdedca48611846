"""Measured: the timelines that a run wrote of its own streams, read back beside the plan.

A run folder has, for every rank of the world, `timeline-rank{r}.jsonl`, and for every plan that they name
`plan-{first 16 characters of its hash}.plan` in the stored form. A line is one execution of one rank's stream:

    plan        content hash of the plan, hex
    group       which SP group of the run, its dp index (0 where left out)
    rank        rank inside the SP group
    step        training step; `micro` its micro-step (0 where left out), `layer` the model's layer
    mask        index of the layer's mask in the plan (0 where left out)
    direction   "forward" or "backward"
    host        name of the machine whose clock was read ("" where left out)
    start_s     when each instruction of the stream began, seconds of the host's monotonic clock, in stream order
    end_s       when it ended; for Wait and AllToAll that includes the standing still
    comm_start_s, comm_end_s   optional: when each Send, Recv or AllToAll was on its way, null for the others

Example: {"plan": "9f…", "rank": 0, "step": 10, "layer": 0, "direction": "forward", "start_s": [5.01, …], "end_s": […]}

Where a line says nothing of its messages they are drawn as long as they can have taken: from the sender's launch to the
end of the receiver's wait. Clocks of one host are comparable; hosts are laid so that their first instructions coincide.
Unknown fields are left alone. `metrics.jsonl` of the run, where there is one, says what the step waited for its plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hsap.ir.check import one_line, shown
from hsap.ir.effects import partners, wait_of
from hsap.ir.plan import Plan
from hsap.ir.program import Op, Programs
from hsap.ir.schedule import DIRECTIONS
from hsap.sim.clock import Times
from hsap.steps import METRICS, read_steps
from hsap.verify import verify
from hsap.view.course import Course

_NUMBERS = {"group": 0, "rank": None, "step": None, "micro": 0, "layer": None, "mask": 0}
"""Integer fields of a line, with what stands for one that is left out (None: it may not be)."""

_LATEST_S = 1e12
"""Beyond this a time is none: 30,000 years on any clock."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """One layer of one step as measured: courses[mask][direction], None where no line of all ranks tells of it."""

    plan: Plan
    step: int
    layer: int
    courses: tuple[tuple[Course | None, Course | None], ...]
    plan_wait_s: float | None


def read_run(folder: str | Path, step: int | None = None, layer: int | None = None, group: int = 0) -> Run:
    """Read a run's timelines of one step and layer (None: the last step, and in it the first layer, that was measured).

    ValueError: no timelines, no sound plan, lines that can't be read, ranks missing; it names file and line.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("timeline-rank*.jsonl"))
    if not paths:
        raise ValueError(
            f"{folder}: no timeline-rank*.jsonl in it; measure some steps of the run: train.py profile.steps=[10,20] "
            f"writes them for steps 10 to 19"
        )
    lines = [line for path in paths for line in _lines(path)]
    if group not in (groups := sorted({line["group"] for line in lines})):
        raise ValueError(f"{folder}: group {group} was not measured; there is {groups or 'nothing'}")
    lines = [line for line in lines if line["group"] == group]
    for name, wanted, pick in (("step", step, max), ("layer", layer, min)):
        known = sorted({line[name] for line in lines})
        chosen = pick(known, default=None) if wanted is None else wanted
        if chosen not in known:
            raise ValueError(
                f"{folder}: {name} {chosen} of group {group} was not measured; there is {known or 'nothing'}"
            )
        lines = [line for line in lines if line[name] == chosen]
    first = min(line["micro"] for line in lines)
    lines = [line for line in lines if line["micro"] == first]
    plan = _plan(folder, lines)
    for line in lines:
        if line["mask"] >= len(plan.programs):
            raise ValueError(f"{line['where']}: mask is {line['mask']}, its plan has {len(plan.programs)}, from 0")
    courses = []
    for mask in range(len(plan.programs)):
        forward, backward = (
            _course(folder, plan, mask, i, [x for x in lines if (x["mask"], x["direction"]) == (mask, direction)])
            for i, direction in enumerate(DIRECTIONS)
        )
        courses.append((forward, backward))
    return Run(plan, lines[0]["step"], lines[0]["layer"], tuple(courses), _plan_wait_s(folder, lines[0]["step"]))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a file with their integer fields filled in and checked; `where` says which line it is."""
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: not JSON ({error}); was the run stopped while it wrote? remove the line"
            ) from None
        if not isinstance(line, dict):
            raise ValueError(f"{where}: expected an object with plan, rank, step, …, found {type(line).__name__}")
        for name, default in _NUMBERS.items():
            value = line.setdefault(name, default)
            if type(value) is not int or value < 0:
                raise ValueError(f"{where}: {name} is {shown(value)}; it must be a whole number of at least 0")
        if line.get("direction") not in DIRECTIONS or not isinstance(line.get("plan"), str):
            raise ValueError(f"{where}: needs direction, one of {', '.join(DIRECTIONS)}, and plan, a content hash")
        yield line | {"where": where, "host": str(line.get("host", ""))}


def _plan(folder: Path, lines: list[dict[str, Any]]) -> Plan:
    hashes = sorted({line["plan"] for line in lines})
    if len(hashes) > 1:
        raise ValueError(
            f"{lines[0]['where']}: the ranks ran different plans in this step: {one_line(', '.join(hashes))}"
        )
    if not hashes[0].isalnum():
        raise ValueError(f"{lines[0]['where']}: plan {shown(hashes[0])} is no content hash")
    path = folder / f"plan-{hashes[0][:16]}.plan"
    if not path.is_file():
        raise ValueError(f"{path}: not there, but {lines[0]['where']} was measured with it; keep plans with the run")
    plan = Plan.load(path)
    if plan.hash != hashes[0]:
        raise ValueError(f"{path}: its content hash is {plan.hash}, {lines[0]['where']} was measured with {hashes[0]}")
    # Times are laid beside its columns, which index one another.
    report = verify(plan)
    if not report.ok:
        raise ValueError(
            f"{path}: not a sound plan, {report.errors[0]}; `hsap verify` shows where, a fresh copy of the run's may do"
        )
    return plan


def _course(folder: Path, plan: Plan, mask: int, direction: int, lines: list[dict[str, Any]]) -> Course | None:
    """Join the ranks' lines of one mask and direction."""
    if not lines:
        return None
    programs = plan.programs[mask][direction]
    by_rank: dict[int, dict[str, Any]] = {}
    for line in lines:
        if (other := by_rank.setdefault(line["rank"], line)) is not line:
            raise ValueError(f"{line['where']}: measured already at {other['where']}; remove one of the two lines")
    if missing := sorted(set(range(plan.num_ranks)) - set(by_rank)):
        raise ValueError(f"{folder}: {lines[0]['where']} was measured, but not on ranks {missing[:8]}; copy all files")
    columns = [np.full(len(programs), np.nan) for _ in range(4)]
    hosts = np.zeros(len(programs), np.int64)
    names = sorted({line["host"] for line in lines})
    for rank in range(plan.num_ranks):
        lo, hi = programs.offsets[rank : rank + 2]
        hosts[lo:hi] = names.index(by_rank[rank]["host"])
        for column, name in zip(columns, ("start_s", "end_s", "comm_start_s", "comm_end_s")):
            column[lo:hi] = _times(by_rank[rank], name, int(hi - lo))
    for host in range(len(names)):
        here = hosts == host
        first = columns[0][here].min(initial=np.inf)
        for column in columns:
            column[here] -= first if np.isfinite(first) else 0.0
    start, end, comm_start, comm_end = columns
    _fill(programs, start, end, comm_start, comm_end)
    stands = (programs.op == Op.WAIT) | (programs.op == Op.ALL_TO_ALL)
    return Course.of(programs, Times(start, np.where(stands, start, end), end, comm_start, comm_end))


def _times(line: dict[str, Any], name: str, count: int) -> np.ndarray:
    """One list of times of a line: float64 [count], NaN where it says null or nothing at all."""
    optional = name.startswith("comm")
    values = line.get(name, [None] * count if optional else None)
    if not isinstance(values, list) or len(values) != count:
        found = len(values) if isinstance(values, list) else values
        raise ValueError(
            f"{line['where']}: {name} must be a list of {count} times, the rank's instructions; got {found}"
        )
    if not all(type(value) in (int, float) or (optional and value is None) for value in values):
        raise ValueError(f"{line['where']}: {name} has a value that is no number of seconds")
    if not all(value is None or abs(value) <= _LATEST_S for value in values):
        raise ValueError(f"{line['where']}: {name} has a time beyond ±{_LATEST_S:g} s; times are seconds of one clock")
    out = np.array([np.nan if value is None else value for value in values], np.float64)
    if name.endswith("end_s"):
        begun = _times(line, name.replace("end", "start"), count)
        if (np.isnan(begun) != np.isnan(out)).any():
            raise ValueError(f"{line['where']}: comm_start_s and comm_end_s must be null in the same places")
        if (out < begun).any():
            raise ValueError(f"{line['where']}: an instruction ends before it starts; both lists are in stream order")
    return out


def _fill(programs: Programs, start: np.ndarray, end: np.ndarray, comm_start: np.ndarray, comm_end: np.ndarray) -> None:
    """Give transfers that nothing was said of the longest time that they can have been on their way."""
    send = np.flatnonzero((programs.op == Op.SEND) & np.isnan(comm_start))
    met = partners(programs)[send]
    waits = wait_of(programs)
    known = (met >= 0) & (waits[met] >= 0)
    send, met = send[known], met[known]
    launches = np.flatnonzero(programs.op == Op.LAUNCH)
    rank, round_ = programs.rank, programs.round
    launched = dict(zip(zip(rank[launches].tolist(), round_[launches].tolist()), launches.tolist()))
    for s, r in zip(send.tolist(), met.tolist()):
        begun = start[launched.get((int(rank[s]), int(round_[s])), s)]
        comm_start[[s, r]] = begun
        comm_end[[s, r]] = max(end[waits[r]], begun)


def _plan_wait_s(folder: Path, step: int) -> float | None:
    """What the run's metrics say of the step's waiting for plans."""
    for figures in read_steps(folder / METRICS):
        if figures.get("step") == step:
            found = figures.get("plan_wait_s")
            return float(found) if isinstance(found, int | float) and 0 <= found <= _LATEST_S else None
    return None
