"""Table: a search's outcome for people and as JSON values."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from hsap.ir.cluster import Cluster
from hsap.tune.found import Found, Row
from hsap.tune.job import Job
from hsap.tune.setting import GIB, TIGHT_SHARE, reserve_bytes
from hsap.tune.trials import Measured

TITLES = ("dp x topology", "planner", "ZeRO", "ckpt", "packs", "step", "tokens/s", "TFLOP/s", "attn", "GiB", "largest",
          "next planner")  # fmt: skip
SHORT = {
    "weights": "weights", "gradients": "gradients", "fp32 master weights": "masters", "Adam moments": "Adam",
    "ZeRO's buffers": "ZeRO buffers", "activations": "activations", "attention's saved tensors": "attention",
    "working set": "working set", "communication arena": "arena", "reserve": "reserve",
}  # fmt: skip


def text(found: Found, measured: dict[int, Measured] | None = None) -> str:
    """Lay out rows, what the columns mean, and what fell out and why. measured: trials, by row."""
    job, measured = found.job, measured or {}
    rows = [cells(job.cluster, row, measured.get(i)) for i, row in enumerate(found.rows)]
    titles = TITLES + (("measured",) if measured else ())
    lines = [
        f"{job.name} on {job.cluster.num_nodes} x {job.cluster.name} ({job.world} ranks of "
        f"{job.cluster.capacity_bytes / GIB:.1f} GiB{_reserve(job.cluster)}), {job.dtype}: steps of "
        f"{job.packs_per_step} packs of {job.seq_len:,} tokens, {job.tokens:,} tokens and {job.flops:.3g} FLOPs in the "
        "first one",
        "",
        *aligned([titles, *rows], "<"),
    ]
    failed = [f"{rows[i][0]}, {rows[i][1]}: {trial.failed}" for i, trial in measured.items() if trial.failed]
    lines += _listed("Trials that failed:", failed)
    lines += ["", _LEGEND]
    if measured:
        lines.append("measured: tokens/s of a short run on this machine.")
    if found.bounded:
        lines.append(f"{found.bounded} more shapes can't be faster than these, however well planned: not planned.")
    lines += _listed("Not in the table:", found.refusals.lines())
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]], side: str) -> list[str]:
    """A line for each row, its cells in columns. side: where cells stand in them, `<` left or `>` right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(f"{cell:{side}{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]


def _listed(title: str, said: list[str]) -> list[str]:
    """A list with its title, nothing where it is empty."""
    lines = [textwrap.fill(line, 118, initial_indent="- ", subsequent_indent="  ") for line in said]
    return ["", title, *lines] if lines else []


_LEGEND = textwrap.fill(
    "topology: InterSP x IntraSP of each of dp groups. ckpt: activation checkpointing. packs: in a micro-step x "
    "micro-steps. *: attention priced by the event clock, else by the stage model. TFLOP/s: model FLOPs per rank, 6 "
    "per weight and token plus 14 x dim per query head and visible pair, recomputation not counted. attn: its share "
    "of the step. GiB: of the fullest rank, the reserve among it, and the largest item; !: less than "
    f"{TIGHT_SHARE:.0%} is free beside the reserve, so that it fails where these estimates are a little off. next "
    "planner: the second best of this shape, and its step. Rates and efficiencies are assumptions of the cluster: "
    "they rank, they don't promise.",
    118,
)


def cells(cluster: Cluster, row: Row, measured: Measured | None = None) -> list[str]:
    """A row's cells, the last one what was measured."""
    s = row.setting
    largest = max((name for name in row.memory), key=row.memory.__getitem__)
    others = f"{row.others[0]} {_seconds(row.others[1])}" if row.others else "-"
    out = [
        f"{s.dp} x {s.topology}", s.planner, str(s.zero_stage), s.checkpointing, f"{s.micro_packs} x {s.accumulation}",
        _seconds(row.step_s) + ("*" if row.clock else ""), f"{row.tokens_per_s:,.0f}", f"{row.tflops:.3g}",
        f"{row.attention_s / row.step_s:.0%}", f"{row.needs_bytes / GIB:.1f}{'!' if is_tight(cluster, row) else ''}",
        f"{SHORT[largest]} {row.memory[largest] / GIB:.1f}", others,
    ]  # fmt: skip
    if measured is None:
        return [*out, ""]
    return [*out, "failed" if measured.tokens_per_s is None else f"{measured.tokens_per_s:,.0f}"]


def figures(found: Found, measured: dict[int, Measured] | None = None) -> dict[str, Any]:
    """The same as JSON values."""
    job = found.job
    return job_figures(job) | {
        "reserve_bytes": reserve_bytes(job.cluster),
        "seq_len": job.seq_len,
        "packs_per_step": job.packs_per_step,
        "tokens": job.tokens,
        "flops": job.flops,
        "rows": [
            _row(job.cluster, row) | (_measured(measured.get(i)) if measured else {})
            for i, row in enumerate(found.rows)
        ],
        "refused": found.refusals.reasons,
        "bounded": found.bounded,
    }


def job_figures(job: Job) -> dict[str, Any]:
    """What was asked, as JSON values."""
    return {
        "model": job.name,
        "cluster": job.cluster.name,
        "nodes": job.cluster.num_nodes,
        "ranks": job.world,
        "capacity_bytes": job.cluster.capacity_bytes,
        "dtype": job.dtype,
    }


def _row(cluster: Cluster, row: Row) -> dict[str, Any]:
    s = row.setting
    return {
        "dp": s.dp, "topology": str(s.topology), "planner": s.planner, "zero_stage": s.zero_stage,
        "checkpointing": s.checkpointing, "micro_packs": s.micro_packs, "accumulation": s.accumulation,
        "step_s": row.step_s, "tokens_per_s": row.tokens_per_s, "tflops_per_rank": row.tflops,
        "attention_s": row.attention_s, "memory_bytes": row.memory, "arena_multiple": row.arena_multiple,
        "tight": is_tight(cluster, row),
        "priced_by": "clock" if row.clock else "stages",
        "next_planner": row.others and {"planner": row.others[0], "step_s": row.others[1]},
    }  # fmt: skip


def _measured(trial: Measured | None) -> dict[str, Any]:
    """What a trial adds to a row; null in both where there was none."""
    return {
        "measured_tokens_per_s": trial and trial.tokens_per_s,
        "trial_failed": trial and trial.failed,
    }


def is_tight(cluster: Cluster, row: Row) -> bool:
    """Whether a row fills its ranks' memory so far that it may not fit after all."""
    return row.needs_bytes > (1 - TIGHT_SHARE) * cluster.capacity_bytes


def _reserve(cluster: Cluster) -> str:
    kept = reserve_bytes(cluster)
    return f", {kept / GIB:.1f} of them a reserve for contexts, communicators and fragments" if kept else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
