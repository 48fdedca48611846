"""Experiment: a row of the table as a file that `train.py +experiment=NAME` composes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from hsap import clusters
from hsap.ir.check import Refused
from hsap.ir.cluster import Cluster
from hsap.tune.found import Row
from hsap.tune.job import Job
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
        "engine.device": "cpu" if job.cluster.is_host else None,
        "model.checkpointing": s.checkpointing,
        "data.pack_tokens": job.seq_len,
        "train.seed": job.seed,
        "train.packs_per_step": job.packs_per_step,
        "train.micro_packs": s.micro_packs,
        **{f"cluster.{key}": value for key, value in cluster_fields(job.cluster).items()},
    }


_OF_A_RUN = ("num_nodes", "first_rank")


def chosen(job: Job) -> dict[str, str]:
    """Files that a job's runs take from Hydra's groups."""
    name = job.cluster.name
    return {"model": job.name} | ({"cluster": name} if name in clusters.names() else {})


def cluster_fields(cluster: Cluster) -> dict[str, object]:
    """Fields of a cluster, where it has other ones than the file of its name, or all where there is none.

    How many nodes there are, and where on them a group starts, is for a run's launcher to say.
    """
    names = [field.name for field in fields(Cluster) if field.name not in _OF_A_RUN]
    if cluster.name in clusters.names():
        base = clusters.read(cluster.name)
        names = [name for name in names if getattr(cluster, name) != getattr(base, name)]
    else:
        names = [name for name in names if getattr(cluster, name) is not None]
    return {name: getattr(cluster, name) for name in names}


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
        *(f"  - override /{group}: {name}" for group, name in chosen(job).items()),
        "",
    ]
    open_group = None
    for key, value in overrides(job, row).items():
        group, _, name = key.rpartition(".")
        if group and group != open_group:
            lines.append(f"{group}:")
        open_group = group
        lines.append(f"{'  ' if group else ''}{name}: {spelled(value)}")
    return "\n".join(lines) + "\n"


def write(folder: Path, name: str, job: Job, row: Row) -> Path:
    """Write the file to configs/experiment; ValueError as `path_of` has it."""
    path = path_of(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(experiment(job, row), encoding="utf-8")
    return path


def path_of(folder: Path, name: str) -> Path:
    """Where an experiment goes; ValueError for a name that is none, and where another's would be lost."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise Refused(f"{name!r}: an experiment's name is letters, digits, dots and dashes; choose another")
    path = folder / "experiment" / f"{name.removesuffix('.yaml')}.yaml"
    if path.exists() and "By `hsap tune`" not in path.read_text(encoding="utf-8"):
        raise Refused(f"{name}: {path} is there and wasn't written by hsap tune; choose another name")
    return path


def spelled(value: object) -> str:
    """Spell a value as both YAML and Hydra's overrides read it."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, float) and "e" in (text := repr(value)):
        # YAML 1.1 takes 1e-05 for a word: it wants a point.
        return text if "." in text else text.replace("e", ".0e")
    # 4x2 is a word, but 1e5 would be a number: words are quoted where YAML could read something else.
    return str(value) if not isinstance(value, str) or re.fullmatch(r"[a-z][a-z0-9-]*", value) else f'"{value}"'
