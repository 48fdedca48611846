"""Experiment: a row of the table as a file that `train.py +experiment=NAME` composes."""

from __future__ import annotations

import re
from pathlib import Path

from hsap.ir.check import Refused
from hsap.tune.job import Job
from hsap.tune.search import Row
from hsap.tune.setting import GIB


def overrides(job: Job, row: Row) -> dict[str, object]:
    """The keys of a row, dotted, with their values: what differs from configs/config.yaml."""
    s = row.setting
    return {
        "topology": str(s.topology),
        "arena_multiple": row.arena_multiple,
        "planner.name": s.planner,
        "engine.zero_stage": s.zero_stage,
        "engine.dtype": s.dtype,
        "engine.device": "cpu" if job.cluster.name == "cpu-gloo" else None,
        "model.checkpointing": s.checkpointing,
        "cluster.preset": job.cluster.name,
        "cluster.ranks_per_node": job.cluster.ranks_per_node,
        "data.pack_tokens": job.seq_len,
        "train.seed": job.seed,
        "train.packs_per_step": job.packs_per_step,
        "train.micro_packs": s.micro_packs,
    }


def experiment(job: Job, row: Row) -> str:
    """Text of the YAML file."""
    s = row.setting
    lines = [
        "# @package _global_",
        f"# By `hsap tune`: {job.name} on {job.cluster.num_nodes} x {job.cluster.name}, {s.world} ranks as {s.dp} SP "
        f"groups of {s.topology}, {s.accumulation} micro-steps a step.",
        f"# Predicted: {row.tokens_per_s:,.0f} tokens/s, {row.step_s:.4g} s a step, {row.needs_bytes / GIB:.1f} GiB on "
        "the fullest rank. Set data.path, data.eval_path and data.tokenizer.",
        "defaults:",
        f"  - override /model: {job.name}",
        "",
    ]
    open_group = None
    for key, value in overrides(job, row).items():
        group, _, name = key.rpartition(".")
        if group and group != open_group:
            lines.append(f"{group}:")
        open_group = group
        lines.append(f"{'  ' if group else ''}{name}: {_yaml(value)}")
    return "\n".join(lines) + "\n"


def write(folder: Path, name: str, job: Job, row: Row) -> Path:
    """Write the file to configs/experiment; ValueError for a name that is none, and where another's would be lost."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise Refused(f"-o {name}: an experiment's name is letters, digits, dots and dashes; choose another")
    path = folder / "experiment" / f"{name.removesuffix('.yaml')}.yaml"
    if path.exists() and "By `hsap tune`" not in path.read_text(encoding="utf-8"):
        raise Refused(f"-o {name}: {path} is there and wasn't written by hsap tune; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(experiment(job, row), encoding="utf-8")
    return path


def _yaml(value: object) -> str:
    if value is None:
        return "null"
    # 4x2 is a word, but 1e5 would be a number: words are quoted where YAML could read something else.
    return str(value) if not isinstance(value, str) or re.fullmatch(r"[a-z][a-z0-9-]*", value) else f'"{value}"'
