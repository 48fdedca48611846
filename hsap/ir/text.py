"""Text: a plan as people read it, line by line (`hsap.ir.reader` reads it back).

    hsap-plan-text 1
    planner "ring"
    topology 1x2                    only where the planner runs the ranks at another shape than the problem's
    problem lengths [7, 5]          one line for each part of the problem, as JSON
    shard 0 home 0 [0,6)            token positions of each shard
    spans 0 [0,6) [6,12)            the span table, from entry 0 on
    column 0 rows 0:1               an InterSP shard is these entries of the span table
    rank 0 rows 0:1                 and a rank's local rows are these
    mask 0
    slice 0 q [0,6) k [0,6) lo -5 hi 0
    direction forward
    block q 0 kv 0 group 0 rank 0 stage 0 area 21
    index 0 0:3 7                   the slices that kernels attend: 0, 1, 2 and 7, from entry 0 of the index on
    stream rank 0
    b0 $q input rows 0:1 heads q0:8 kv0:2 bytes 24576
    stage 0
    #0 create $send-op $kv %1 round 2 b1 rows 0:1

What follows `;` is for people. Heads are `first:count` (a buffer without has none), other pairs half-open ranges.
Buffers b0, b1, … are a rank's own; `->` stands between those that are read and those that are written. `slices` of an
instruction are a range of the index. An instruction without heads is for its rank's whole share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hsap.ir.problem import problem_to_json
from hsap.ir.program import NONE, OPERANDS, Access, Buffers, Op, Programs, Role, Space
from hsap.ir.schedule import DIRECTIONS
from hsap.ir.slice import Kind, kinds
from hsap.ir.spelling import HEADER, MNEMONICS, ROLES, place_names, whole_share

if TYPE_CHECKING:
    from hsap.ir.plan import Plan

SPANS_A_LINE = 8
SPANS_SHOWN = 3
RUNS_A_LINE = 16


def print_plan(plan: Plan) -> str:
    """Print a plan; `hsap.parse` gives it back with the same content hash."""
    lines = [HEADER, f"; content hash {plan.hash}", f"planner {json.dumps(plan.planner)}"]
    lines.append(f"options {json.dumps(plan.options)}")
    if plan.own_topology is not None:
        lines.append(f"topology {plan.own_topology}")
    if plan.choice is not None:
        lines.append(f"choice {json.dumps(plan.choice)}")
    lines += [f"problem {name} {json.dumps(value)}" for name, value in problem_to_json(plan.problem).items()]
    lines += _placement(plan)
    for mask in range(len(plan.slices)):
        lines += ["", f"mask {mask}"]
        names = [Kind(kind).name.lower() for kind in kinds(plan.slices[mask]).tolist()]
        for i, (q0, q1, k0, k1, lo, hi) in enumerate(plan.slices[mask].tolist()):
            lines.append(f"slice {i} q [{q0},{q1}) k [{k0},{k1}) lo {lo} hi {hi}  ; {names[i]}")
        for direction, name in enumerate(DIRECTIONS):
            lines += ["", f"direction {name}"]
            for q, kv, group, rank, stage, area in plan.chart[mask][direction].tolist():
                lines.append(f"block q {q} kv {kv} group {group} rank {rank} stage {stage} area {area}")
            lines += _index(plan.programs[mask][direction].index)
            for rank in range(plan.num_ranks):
                lines += ["", *stream_lines(plan, mask, direction, rank)]
    return "\n".join(lines) + "\n"


def stream_lines(plan: Plan, mask: int, direction: int, rank: int) -> list[str]:
    """Print one rank's buffers and instructions, a line each."""
    programs = plan.programs[mask][direction]
    lo, hi = (int(i) for i in programs.offsets[rank : rank + 2])
    first_buffer, stop_buffer = (int(i) for i in programs.buffers.offsets[rank : rank + 2])
    lines = [f"stream rank {rank}"]
    lines += [f"b{i - first_buffer} {_buffer(plan, programs.buffers, i)}" for i in range(first_buffer, stop_buffer)]
    share = whole_share(plan.problem.heads, plan.topology.intra_sp, rank)
    stage = None
    for i in range(lo, hi):
        if stage != int(programs.stage[i]):
            stage = int(programs.stage[i])
            lines.append(f"stage {stage}")
        lines.append(f"#{i - lo} " + _instruction(plan, mask, programs, i, rank, share))
    return lines


def _placement(plan: Plan) -> list[str]:
    lines = []
    offsets = plan.shards.offsets.tolist()
    for i, home in enumerate(plan.shards.home.tolist()):
        lines.append(f"shard {i} home {home} {_spans(plan.shards.spans[offsets[i] : offsets[i + 1]])}".rstrip())
    for i in range(0, len(plan.spans), SPANS_A_LINE):
        lines.append(f"spans {i} {_spans(plan.spans[i : i + SPANS_A_LINE])}")
    lines += [f"column {i} rows {a}:{b}" for i, (a, b) in enumerate(plan.column_rows.tolist())]
    return lines + [
        f"rank {i} rows {a}:{b}{_positions(plan, (a, b))}" for i, (a, b) in enumerate(plan.rank_rows.tolist())
    ]


def _index(index: np.ndarray) -> list[str]:
    """Print an index as runs of slices, several a line."""
    first = np.flatnonzero(np.append(True, np.diff(index.astype(np.int64)) != 1)[: len(index)])
    stop = np.append(first[1:], len(index)) if len(first) else first
    runs = [f"{index[a]}" if b - a == 1 else f"{index[a]}:{index[a] + b - a}" for a, b in zip(first, stop)]
    return [f"index {first[i]} {' '.join(runs[i : i + RUNS_A_LINE])}" for i in range(0, len(runs), RUNS_A_LINE)]


def _spans(table: np.ndarray) -> str:
    return " ".join(f"[{a},{b})" for a, b in table.tolist())


def _buffer(plan: Plan, buffers: Buffers, i: int) -> str:
    role = Role(int(buffers.role[i]))
    words = ["scratch" if role == Role.NONE else f"${ROLES[role]}", Space(int(buffers.space[i])).name.lower()]
    if buffers.acc[i]:
        words.append("acc")
    words += _rows(buffers.rows[i])
    if buffers.heads[i].any():
        words.append(_heads(buffers.heads[i].tolist()))
    words.append(f"bytes {buffers.num_bytes[i]}")
    if buffers.offset[i] != NONE:
        words.append(f"at {buffers.offset[i]}")
    return " ".join(words) + _positions(plan, buffers.rows[i])


def _instruction(plan: Plan, mask: int, programs: Programs, i: int, rank: int, share: list[int]) -> str:
    op, role, peer = Op(int(programs.op[i])), Role(int(programs.role[i])), int(programs.peer[i])
    words = [_operation(programs, i, rank, op, role)]
    if peer != NONE or op in (Op.SEND, Op.RECV):
        words.append(f"%{peer}")
    if programs.round[i] != NONE:
        words.append(f"round {programs.round[i]}")
    first_buffer = int(programs.buffers.offsets[rank])
    operands = ["-" if b == NONE else f"b{b - first_buffer}" for b in programs.buf[i].tolist()]
    while len(operands) > len(OPERANDS[op]) and operands[-1] == "-":
        operands.pop()
    if num_read := OPERANDS[op].count(Access.READ) if len(OPERANDS[op]) > 1 else 0:
        operands.insert(num_read, "->")
    words += operands + _rows(programs.rows[i])
    seen = ""
    if tuple(programs.slices[i].tolist()) != (NONE, NONE):
        a, b = programs.slices[i].tolist()
        words.append(f"slices {a}:{b}")
        seen = _pairs(plan.slices[mask], programs.index, a, b)
    heads = programs.heads[i].tolist()
    if heads != share:
        words.append(_heads(heads))
    return " ".join(words) + (seen or _positions(plan, programs.rows[i]))


def _operation(programs: Programs, i: int, rank: int, op: Op, role: Role) -> str:
    if op == Op.COPY:
        source, target = place_names(programs.buffers, rank, programs.buf[i, :2].tolist())
        return f"copy{'-' + ROLES[role] if role != Role.NONE else ''} ${source} ${target}"
    named = role != Role.NONE or op in (Op.SEND, Op.RECV)
    return MNEMONICS[op] + (f" ${role.name.lower()}" if named else "")


def _rows(pair: np.ndarray) -> list[str]:
    a, b = pair.tolist()
    return [] if (a, b) == (NONE, NONE) else [f"rows {a}:{b}"]


def _heads(heads: list[int]) -> str:
    return "heads q{}:{} kv{}:{}".format(*heads)


def _positions(plan: Plan, pair: Sequence[int]) -> str:
    """Comment with the token positions of a row range; nothing where a damaged plan points outside the table."""
    a, b = (int(i) for i in pair)
    if not 0 <= a < b <= len(plan.spans):
        return ""
    more = f" and {b - a - SPANS_SHOWN} more" if b - a > SPANS_SHOWN else ""
    return f"  ; {_spans(plan.spans[a : min(b, a + SPANS_SHOWN)])}{more}"


def _pairs(slices: np.ndarray, index: np.ndarray, a: int, b: int) -> str:
    """Comment with the rectangles that a range of the index is."""
    if not 0 <= a < b <= len(index):
        return ""
    which = index[a : min(b, a + SPANS_SHOWN)]
    if which.min() < 0 or which.max() >= len(slices):
        return ""
    shown = slices[which]
    names = [Kind(kind).name.lower() for kind in kinds(shown).tolist()]
    drawn = [f"[{q0},{q1})×[{k0},{k1}) {n}" for (q0, q1, k0, k1, _, _), n in zip(shown.tolist(), names)]
    more = f" and {b - a - SPANS_SHOWN} more" if b - a > SPANS_SHOWN else ""
    return f"  ; {', '.join(drawn)}{more}"
