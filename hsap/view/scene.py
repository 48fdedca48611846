"""Scene: all that the page shows of one plan on one time axis, as JSON values and typed columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.effects import Flows, flows, partners, touches
from hsap.ir.mask import Mask
from hsap.ir.pattern import Pattern, patterns
from hsap.ir.plan import Plan
from hsap.ir.program import OPERANDS, Access, Op, Programs, Role, Space
from hsap.ir.schedule import DIRECTIONS, Chart
from hsap.ir.slice import K0, Q0, Kind, kinds
from hsap.ir.spelling import MNEMONICS
from hsap.ir.summary import summary
from hsap.sim.spent import PARTS
from hsap.sim.timeline import Timeline
from hsap.view.columns import Columns
from hsap.view.course import Course
from hsap.view.measured import Run

TICKS = 1 << 26
"""Steps that a course's times are rounded to: a makespan has so many."""
SHAPES = ("mixed", "full", "causal", "inverse causal", "band", "A1", "A2", "A3", "A4", "A5")
"""Names of what a block looks like: the paper's patterns, else the kind that all its slices are."""


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """One plan, one course per mask and direction (None: nothing was measured), and words for the page's head.

    title, note: of a person's choosing, or from a file's name; the page shows them as they are.
    """

    plan: Plan
    courses: tuple[tuple[Course | None, Course | None], ...]
    title: str
    note: str = ""

    @classmethod
    def planned(cls, timeline: Timeline, title: str | None = None) -> Scene:
        """Show a plan on the simulator's clock."""
        courses = tuple((Course.planned(forward), Course.planned(backward)) for forward, backward in timeline.traces)
        note = f"simulated on {timeline.cluster.name}"
        return cls(timeline.plan, courses, timeline.plan.planner if title is None else title, note)

    @classmethod
    def measured(cls, run: Run) -> Scene:
        """Show a plan on the clock of the run that executed it."""
        note = f"measured in step {run.step}, layer {run.layer}"
        if run.plan_wait_s is not None:
            note += f"; the step waited {run.plan_wait_s * 1e3:.4g} ms for its plan"
        return cls(run.plan, run.courses, "measured", note)

    def to_json(self) -> dict[str, Any]:
        """Values for the page; lengths are tokens, times ticks of `tick_s`, sizes bytes."""
        plan, problem = self.plan, self.plan.problem
        columns = Columns()
        columns.add("borders", problem.layout.cu_seqlens, rising=True)
        columns.add("spans", plan.spans, rising=True)
        columns.add("shard.spans", plan.shards.spans, rising=True)
        columns.add("shard.offsets", plan.shards.offsets, rising=True)
        columns.add("shard.home", plan.shards.home)
        masks = [self._mask(mask, columns) for mask in range(len(problem.masks))]
        return {
            "title": self.title,
            "note": self.note,
            "planner": plan.planner,
            "options": {name: str(value) for name, value in plan.options.items()},
            "topology": str(problem.topology),
            "intra": plan.topology.intra_sp,
            "heads": f"{problem.heads.num_q_heads}:{problem.heads.num_kv_heads}:{problem.heads.head_dim}",
            "dtype": problem.heads.dtype,
            "tokens": problem.layout.num_tokens,
            "nodes": problem.node_of.tolist(),
            "figures": self._figures(),
            "masks": masks,
            **columns.packed(),
        }

    def _figures(self) -> dict[str, Any]:
        """Key figures; times are of this scene's clock, means over layers as in a plan's summary."""
        found = summary(self.plan)
        layers = [count for _, count in self.plan.problem.masks]
        names = ("bytes_total", "bytes_internode", "max_recv_bytes_per_rank", "peak_buffer_bytes_per_rank")
        out = {name: found[name] for name in ("area_imbalance", "token_imbalance", "stages", "instructions")}
        for i, direction in enumerate(DIRECTIONS):
            measured = [pair[i] for pair in self.courses]
            times = [course.makespan_s for course in measured if course]
            seconds = float(np.average(times, weights=layers)) if len(times) == len(measured) else None
            out[direction] = {name: found[direction][name] for name in names} | {"seconds": seconds}
        return out

    def _mask(self, mask: int, columns: Columns) -> dict[str, Any]:
        plan = self.plan
        table = plan.slices[mask]
        shards = plan.shards
        blocks = cut_blocks(shards, table)
        key = blocks.q * max(len(shards), 1) + blocks.kv
        _slices(columns, f"{mask}.slice", table, _block_of(shards, table, key))
        columns.add(f"{mask}.block.q", blocks.q, rising=True)
        columns.add(f"{mask}.block.kv", blocks.kv)
        columns.add(f"{mask}.block.area", blocks.area)
        columns.add(f"{mask}.block.shape", _shapes(shards, blocks))
        named, layers = plan.problem.masks[mask]
        words = [str(named)] if isinstance(named, Mask) else sorted({str(each) for each in named})
        directions = []
        for direction, course in enumerate(self.courses[mask]):
            chart = plan.chart[mask][direction]
            num_stages = int(chart[:, Chart.STAGE].max(initial=-1)) + 1
            told = None if course is None else _course(plan, course, f"{mask}.{direction}", columns)
            directions.append(None if told is None else told | {"stages": num_stages})
        return {"name": ", ".join(words), "layers": layers, "directions": directions}


def _course(plan: Plan, course: Course, name: str, columns: Columns) -> dict[str, Any]:
    """Columns of one program's instructions, buffers and links."""
    programs = course.programs
    for field in ("offsets", "stage"):
        columns.add(f"{name}.{field}", getattr(programs, field), rising=True)
    for field in ("op", "role", "peer", "round"):
        columns.add(f"{name}.{field}", getattr(programs, field))
    for pair in ("rows", "slices"):
        for side in (0, 1):
            columns.add(f"{name}.{pair}{side}", getattr(programs, pair)[:, side])
    for operand in range(programs.buf.shape[1]):
        columns.add(f"{name}.buf{operand}", programs.buf[:, operand])
    for part in range(4):
        columns.add(f"{name}.heads{part}", programs.heads[:, part])
    columns.add(f"{name}.index", programs.index, rising=True)
    columns.add(f"{name}.partner", partners(programs))
    tick_s = course.makespan_s / TICKS or 1.0
    for field in ("start", "end", "comm_start", "comm_end"):
        times = getattr(course, field)
        # A message that is nowhere on the clock is before it.
        columns.add(f"{name}.{field}", np.where(np.isnan(times), -1, np.rint(times / tick_s)), rising=True)
    carried = flows(plan, programs)
    sent = np.zeros(len(programs), np.int64)
    np.add.at(sent, carried.at, carried.num_bytes)
    columns.add(f"{name}.bytes", sent)
    _links(columns, name, carried, plan.num_ranks)
    _buffers(columns, name, programs)
    return {
        "tick_s": tick_s,
        "makespan_s": course.makespan_s,
        "spent_s": [[float(f"{part:.6g}") for part in row] for row in course.spent_s.tolist()],
    }


def _slices(columns: Columns, name: str, table: np.ndarray, block: np.ndarray) -> None:
    for i, field in enumerate(("q0", "q1", "k0", "k1", "lo", "hi")):
        columns.add(f"{name}.{field}", table[:, i], rising=True)
    columns.add(f"{name}.block", block, rising=True)


def _block_of(shards: Shards, table: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Block of each slice: int64 [n]. key: of each block, q · num_shards + kv, rising."""
    by_position = np.argsort(shards.spans[:, 0], kind="stable")
    starts = shards.spans[by_position, 0]
    shard_of = np.repeat(np.arange(len(shards)), np.diff(shards.offsets))[by_position]
    q, kv = (shard_of[np.searchsorted(starts, table[:, side], side="right") - 1] for side in (Q0, K0))
    return np.searchsorted(key, q * max(len(shards), 1) + kv)


def _shapes(shards: Shards, blocks: Blocks) -> np.ndarray:
    """Index into `SHAPES` of every block."""
    found = patterns(shards, blocks).astype(np.int64)
    if not len(blocks):
        return found
    kind = kinds(blocks.slices)
    first = blocks.offsets[:-1]
    low, high = (reduce.reduceat(kind, first) for reduce in (np.minimum, np.maximum))
    plain = np.where(low == high, 1 + low, 0)
    return np.where(found == Pattern.OTHER, plain, len(Kind) + found)


def _links(columns: Columns, name: str, carried: Flows, num_ranks: int) -> None:
    pairs, which = np.unique(carried.src * num_ranks + carried.dst, return_inverse=True)
    columns.add(f"{name}.link.src", pairs // num_ranks)
    columns.add(f"{name}.link.dst", pairs % num_ranks)
    columns.add(f"{name}.link.bytes", np.rint(np.bincount(which, carried.num_bytes, len(pairs))))
    columns.add(f"{name}.link.messages", np.bincount(which, minlength=len(pairs)))


def _buffers(columns: Columns, name: str, programs: Programs) -> None:
    """Buffers with their lives: first and last instruction during which they are held, -1 for those never touched."""
    buffers, touched = programs.buffers, touches(programs)
    begin, end = np.full(len(buffers), len(programs)), np.full(len(buffers), -1)
    np.minimum.at(begin, touched.buffer, touched.begin)
    np.maximum.at(end, touched.buffer, touched.end)
    columns.add(f"{name}.held.offsets", buffers.offsets, rising=True)
    columns.add(f"{name}.held.role", buffers.role)
    columns.add(f"{name}.held.space", buffers.space)
    columns.add(f"{name}.held.acc", buffers.acc)
    columns.add(f"{name}.held.bytes", buffers.num_bytes)
    columns.add(f"{name}.held.at", buffers.offset)
    columns.add(f"{name}.held.begin", np.where(end < 0, -1, begin), rising=True)
    columns.add(f"{name}.held.end", end, rising=True)
    for side in (0, 1):
        columns.add(f"{name}.held.rows{side}", buffers.rows[:, side])


def vocabulary() -> dict[str, Any]:
    """Names behind the numbers in columns, the same for every scene."""
    return {
        "ops": [op.name.lower() for op in Op],
        "words": [MNEMONICS[op] for op in Op],
        "operands": [[len(OPERANDS[op]), OPERANDS[op].count(Access.READ)] for op in Op],
        "roles": [role.name.lower() for role in Role if role >= 0],
        "spaces": [space.name.lower() for space in Space],
        "shapes": list(SHAPES),
        "parts": list(PARTS),
        "directions": list(DIRECTIONS),
    }


def check_comparable(scenes: Sequence[Scene]) -> None:
    """Refuse to set plans of different batches side by side: their times and bytes say nothing of each other."""
    layouts = {scene.plan.problem.layout for scene in scenes}
    if len(layouts) > 1:
        raise ValueError(
            "view: the plans are of different batches (their document lengths differ), so their figures can't be "
            "compared; compile both planners for one batch, or view the plans one by one"
        )
