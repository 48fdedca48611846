"""Draw the documentation's pictures from real plans: `python docs/scripts/pictures.py` writes docs/pictures/*.svg.

The batch is that of HSAP's Figure 3: documents of 340, 200, 100, 30, 30 and 100 tokens on 8 ranks. Nothing is drawn by
hand; a test holds the files to what this script draws.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np

import hsap
from hsap.ir.block import cut_blocks
from hsap.ir.effects import flows
from hsap.ir.families import MASKS
from hsap.ir.pattern import Pattern, patterns
from hsap.ir.program import Op, Role
from hsap.ir.schedule import Chart
from hsap.view import Course

sys.path.insert(0, str(Path(__file__).parent))
from svg import DOCUMENTS, INK, INTER, INTRA, LINE, MUTED, PLOT, RANKS, ROLES, WAIT, WORK, Drawing, ink_on, outline

FOLDER = Path(__file__).parents[1] / "pictures"
LENGTHS = (340, 200, 100, 30, 30, 100)


@functools.cache
def plan_of(planner: str, topology: str = "8x1", ranks_per_node: int = 8, **options) -> hsap.Plan:
    """Compile the batch of the pictures."""
    problem = hsap.Problem(
        hsap.Layout.from_lengths(LENGTHS),
        hsap.HeadShape(8, 2, 128, "bf16"),
        hsap.Topology.parse(topology),
        cluster=hsap.Cluster(ranks_per_node=ranks_per_node),
    )
    return hsap.compile(problem, planner, **options)


def figure_3() -> hsap.Plan:
    """Give the plan of the paper's Figure 3."""
    return plan_of("sap", balance="blocks")


def pack() -> Drawing:
    """Draw the documents of a pack, and who is home to which tokens under three planners."""
    plans = (("sap", figure_3()), ("zigzag", plan_of("zigzag")), ("nested", plan_of("nested")))
    out = Drawing(860, 96 + 52 * len(plans), "A pack of six documents, and who is home to its tokens")
    left, scale = 96, 740 / sum(LENGTHS)
    out.word(left - 10, 40, "documents", anchor="end")
    at = 0
    for i, length in enumerate(LENGTHS):
        colour = DOCUMENTS[i]
        out.box(left + at * scale, 22, length * scale - 1.5, 28, colour, radius=3, tip=f"document {i}: {length} tokens")
        if length > 50:
            out.word(left + (at + length / 2) * scale, 41, f"{length}", fill=ink_on(colour), anchor="middle")
        else:
            out.word(left + (at + length / 2) * scale, 41, f"{length}", 10, ink_on(colour), "middle")
        at += length
    for row, (name, plan) in enumerate(plans):
        y = 78 + 52 * row
        out.word(left - 10, y + 19, name, anchor="end")
        for rank in range(plan.num_ranks):
            for start, stop in plan.rank_spans(rank).tolist():
                wide = (stop - start) * scale
                out.box(left + start * scale, y, wide, 28, RANKS[rank], tip=f"rank {rank}: {start} to {stop - 1}")
                if wide > 16:
                    out.word(left + start * scale + wide / 2, y + 19, rank, 11, ink_on(RANKS[rank]), "middle")
        for border in np.cumsum(LENGTHS)[:-1]:
            out.line(left + border * scale - 0.75, y - 4, left + border * scale - 0.75, y + 32, INK, 1.2)
    out.word(
        left, 90 + 52 * len(plans), "Colours and numbers: the home rank. Black lines: borders of documents.", 11, MUTED
    )
    return out


MASK_EXAMPLES = ("causal", "full", "window:10", "lambda:4,8", "blockwise:8,2,1,1", "shared_question:3,20", "prefix:14",
                 "chunked:12")  # fmt: skip


def masks() -> Drawing:
    """Draw every family of masks on one document of 48 tokens, slice by slice."""
    size, gap, tokens = 168, 34, 48
    out = Drawing(860, 2 * (size + gap) + 34, "The families of masks, as slices")
    scale = size / tokens
    for i, text in enumerate(MASK_EXAMPLES):
        x, y = 40 + (i % 4) * (size + gap), 34 + (i // 4) * (size + gap)
        out.word(x, y - 8, text, 12, INK)
        out.box(x, y, size, size, PLOT, LINE)
        for number, piece in enumerate(hsap.Mask.parse(text).slices(tokens).tolist()):
            points = [(x + k * scale, y + q * scale) for k, q in outline(piece)]
            out.polygon(points, RANKS[number % len(RANKS)], "#ffffff", 0.85)
    assert {text.partition(":")[0] for text in MASK_EXAMPLES} == set(MASKS), "a family has no picture"
    return out


BLOCKS_LEGEND = """\
A row is a shard of queries,
a column one of keys.

r3 s1: computed by rank 3
in stage 1.

A1 causal, on the diagonal
A2 cross: one document
     covers both shards
A3 cross-up: it ends in
     the query shard
A4 cross-right: it begins in
     the key shard
A5 cross-corner: both

The rest isn't visible:
no block, no work, no bytes.
"""


def blocks() -> Drawing:
    """Draw the attention matrix cut into blocks: pattern, who computes it, and in which stage."""
    plan = figure_3()
    out = Drawing(860, 640, "The attention matrix of a pack, cut into blocks")
    left, top, scale, num_tokens = 56, 44, 576 / sum(LENGTHS), sum(LENGTHS)
    side = num_tokens * scale
    out.box(left, top, side, side, PLOT, LINE)
    found = cut_blocks(plan.shards, plan.slices[0])
    names = patterns(plan.shards, found)
    place = {(row[Chart.Q_SHARD], row[Chart.KV_SHARD]): row for row in plan.chart[0][0].tolist()}
    for i in range(len(found)):
        row = place[int(found.q[i]), int(found.kv[i])]
        for piece in found.slices[found.offsets[i] : found.offsets[i + 1]].tolist():
            out.polygon([(left + k * scale, top + q * scale) for k, q in outline(piece)], RANKS[row[Chart.RANK]])
    for border in range(0, num_tokens + 1, 100):
        out.line(left + border * scale, top, left + border * scale, top + side)
        out.line(left, top + border * scale, left + side, top + border * scale)
    for i in range(len(found)):
        row = place[int(found.q[i]), int(found.kv[i])]
        pieces = found.slices[found.offsets[i] : found.offsets[i + 1]]
        k, q = np.mean(outline(pieces[0].tolist()), axis=0)
        x, y, ink = left + k * scale, top + q * scale, ink_on(RANKS[row[Chart.RANK]])
        out.word(x, y, f"r{row[Chart.RANK]} s{row[Chart.STAGE]}", 10.5, ink, "middle", bold=True)
        out.word(x, y + 10, Pattern(int(names[i])).name, 9, ink, "middle")
    for rank in range(plan.num_ranks):
        middle = (rank + 0.5) * 100 * scale
        out.word(left - 8, top + middle + 4, f"q {rank}", 11, MUTED, "end")
        out.word(left + middle, top - 8, f"kv {rank}", 11, MUTED, "middle")
    x = left + side + 24
    for i, line in enumerate(BLOCKS_LEGEND.splitlines()):
        out.word(x, top + 14 + 19 * i, line, 12.5)
    return out


def schedule() -> Drawing:
    """Draw a schedule: the blocks of every rank by stage, and what travels for them."""
    plan = figure_3()
    chart = plan.chart[0][0]
    programs = plan.programs[0][0]
    num_stages = int(programs.stage[programs.op == Op.SEND].max()) + 1
    wide, tall, left, top = 160, 40, 76, 44
    out = Drawing(860, top + tall * plan.num_ranks + 44, "A schedule: blocks of ranks by stage, and transfers")
    for stage in range(num_stages):
        out.word(left + wide * stage + 50, 26, f"stage {stage}", 12.5, INK, "middle", bold=True)
    out.word(left + wide * num_stages + 50, 26, "at home", 12.5, INK, "middle", bold=True)
    for rank in range(plan.num_ranks):
        y = top + tall * rank
        out.word(left - 14, y + 21, f"rank {rank}", 12, INK, "end")
        out.line(left, y + tall - 3, 840, y + tall - 3, "#eceae4")
        for row in chart[chart[:, Chart.RANK] == rank].tolist():
            x = left + wide * row[Chart.STAGE]
            text = f"q {row[Chart.Q_SHARD]} × kv {row[Chart.KV_SHARD]}"
            out.box(x, y, 100, 30, RANKS[rank], radius=3, tip=f"{text}: {row[Chart.AREA]} pairs")
            out.word(x + 50, y + 20, text, 11.5, ink_on(RANKS[rank]), "middle")
    carried = flows(plan, programs)
    sends = programs.op[carried.at] == Op.SEND
    for at, src, dst in zip(carried.at[sends], carried.src[sends].tolist(), carried.dst[sends].tolist()):
        role, stage = Role(int(programs.role[at])), int(programs.stage[at])
        y0, y1 = top + tall * src + 15, top + tall * dst + 15
        colour = ROLES[role.name.lower()]
        x0, x1 = left + wide * stage + 100, left + wide * (stage + 1) - 2
        out.line(x0 + 2, y0, x1, y1, colour, 1.6, arrow=True)
    for i, (role, what) in enumerate((("kv", "keys and values"), ("q", "queries"), ("o", "partial results, home"))):
        x = left + 190 * i
        out.line(x, out.size[1] - 20, x + 26, out.size[1] - 20, ROLES[role], 2.2, arrow=True)
        out.word(x + 34, out.size[1] - 16, what, 11.5, MUTED)
    return out


def stream() -> Drawing:
    """Draw all ranks' instruction streams on the simulator's clock: work above, messages under it."""
    plan = figure_3()
    course = Course.planned(hsap.simulate(plan, "dgx-a100").traces[0][0])
    programs = course.programs
    left, top, tall = 70, 20, 46
    out = Drawing(860, top + tall * plan.num_ranks + 40, "Instruction streams of all ranks, simulated")
    scale = 760 / course.makespan_s
    for rank in range(plan.num_ranks):
        y = top + tall * rank
        out.word(left - 12, y + 16, f"rank {rank}", 12, INK, "end")
        out.box(left, y, 760, 34, PLOT)
        first, last = programs.offsets[rank : rank + 2].tolist()
        for i in range(first, last):
            op = Op(int(programs.op[i]))
            start, wide = course.start[i] * scale, (course.end[i] - course.start[i]) * scale
            tip = f"rank {rank} #{i - first}: {op.name.lower()}"
            if op == Op.WAIT:
                out.box(left + start, y, wide, 20, WAIT, tip=tip)
            elif wide > 0:
                fill = RANKS[rank] if op in (Op.ATTEND, Op.ATTEND_GRAD) else WORK
                out.box(left + start, y, wide, 20, fill, tip=tip)
            if op == Op.SEND and not np.isnan(course.comm_start[i]):
                begin, end = course.comm_start[i] * scale, course.comm_end[i] * scale
                colour = ROLES[Role(int(programs.role[i])).name.lower()]
                out.box(left + begin, y + 23, end - begin, 9, colour, tip=f"{tip} to rank {programs.peer[i]}")
    y = out.size[1] - 24
    sent = [(ROLES[role], f"sends {role}") for role in ("kv", "q", "o")]
    keys = [(RANKS[0], "attend"), (WORK, "copy, merge"), (WAIT, "wait"), *sent]
    for i, (colour, what) in enumerate(keys):
        out.box(left + 122 * i, y, 16, 11, colour)
        out.word(left + 122 * i + 22, y + 10, what, 11.5, MUTED)
    return out


def layers() -> Drawing:
    """Draw 4x2 on four nodes: who sends how much to whom, all-to-all in the node and point to point between nodes."""
    plan = plan_of("sap", "4x2", 2)
    programs = plan.programs[0][0]
    carried = flows(plan, programs)
    exchange = programs.op[carried.at] == Op.ALL_TO_ALL
    out = Drawing(860, 420, "InterSP between nodes, IntraSP inside them")
    x_of, y_of = (lambda rank: 110 + 210 * (rank // 2)), (lambda rank: 120 + 150 * (rank % 2))
    for node in range(4):
        out.box(60 + 210 * node, 50, 110, 300, PLOT, LINE, 8)
        out.word(115 + 210 * node, 40, f"node {node}: shard {node}", 12.5, INK, "middle", bold=True)
    spans = [plan.rank_spans(rank).tolist() for rank in range(plan.num_ranks)]
    for src in range(plan.num_ranks):
        for dst in range(plan.num_ranks):
            which = (carried.src == src) & (carried.dst == dst)
            kib = float(carried.num_bytes[which].sum()) / 1024
            if not kib:
                continue
            inside = bool(exchange[which].any())
            bend = 14 if inside else 34 + 20 * max(abs(src // 2 - dst // 2) - 1, 0)
            dx = np.sign(x_of(dst) - x_of(src)) * 30
            dy = np.sign(y_of(dst) - y_of(src)) * 24
            ends = (x_of(src) + 5 + dx, y_of(src) + dy, x_of(dst) + 5 - dx, y_of(dst) - dy)
            out.curve(*ends, bend, INTRA if inside else INTER, 1.0 + kib / 150)
    for rank in range(plan.num_ranks):
        x, y = x_of(rank) + 5, y_of(rank)
        tokens = int(plan.tokens_per_rank[rank])
        tip = ", ".join(f"{a} to {b - 1}" for a, b in spans[rank])
        out.box(x - 28, y - 22, 56, 44, RANKS[rank // 2], radius=6, tip=f"tokens {tip}")
        out.word(x, y - 3, f"rank {rank}", 11.5, ink_on(RANKS[rank // 2]), "middle")
        out.word(x, y + 12, f"{tokens} tokens", 9.5, ink_on(RANKS[rank // 2]), "middle")
    out.line(80, 386, 110, 386, INTRA, 2.4, arrow=True)
    out.word(120, 390, "IntraSP: all-to-all trades tokens for heads inside a node", 12, MUTED)
    out.line(470, 386, 500, 386, INTER, 2.4, arrow=True)
    out.word(510, 390, "InterSP: what another node must see, point to point", 12, MUTED)
    return out


PICTURES = {"pack": pack, "masks": masks, "blocks": blocks, "schedule": schedule, "stream": stream, "layers": layers}


def main() -> None:
    """Write every picture and say which ones changed."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", draw().text()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"drew {name}")


if __name__ == "__main__":
    main()
