"""Dumps: OUT/dumps/stepN, a step that went wrong as plain data, to be run once more on one process.

- dump.json: what was seen and found, the whole configuration, the model's shape, of each micro-batch the documents and
  their losses; size and SHA-256 of every other file; last, its own SHA-256.
- rankR.safetensors: the float32 weights of before the step, in a checkpoint's pieces (`hsap.train.checkpoints`).
- groupD.safetensors: tokens, labels and positions of SP group D's micro-batches, as M/tokens and so on.
- groupD-microM.plan: their plans, in the stored form (`hsap.ir.stored`).

Nothing is pickled, and nothing in it is run but plans that the verifier has proved right.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from hsap.data.batch import ARRAYS, MicroBatch
from hsap.data.loader import StepBatch
from hsap.files import replace, sync, write
from hsap.gathering import gather_texts
from hsap.ir.check import MAX_TOKENS, Refused, fields, instance, one_line, shown, whole, wholes
from hsap.ir.mask import Masks, distinct_masks, mask_slices
from hsap.ir.plan import Plan
from hsap.ir.shared import shared_masks
from hsap.models import ModelConfig
from hsap.models.config import FREE
from hsap.runtime.groups import Mesh
from hsap.targets import NO_TARGET
from hsap.tensorfile import write_tensors
from hsap.train.checkpoints import masters
from hsap.train.checkpoints.folder import damage, digest, missing
from hsap.train.checkpoints.tensors import Pieces
from hsap.train.guard.finding import Finding

STATE, FORMAT = "dump.json", "hsap-dump 1"
_FILE = re.compile(r"(rank|group)(0|[1-9][0-9]*)\.safetensors|group(0|[1-9][0-9]*)-micro(0|[1-9][0-9]*)\.plan")
_NEEDED = ("format", "step", "seen", "model", "dtype", "num_targets", "groups", "config", "versions", "files", "sha256")
_MICRO = ("lengths", "sequences", "answers", "document_ids", "losses", "targets")


@dataclass(frozen=True, slots=True, eq=False)
class Dumped:
    """One micro-batch of a dump, with its plan and what each document's losses added up to in training."""

    group: int
    number: int
    batch: MicroBatch
    plan: Plan
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Dump:
    """A dump as it was read and checked. seen: told, loss, grad_norm (NaN where they weren't finite), first, gradients
    and weights as of a `Finding`. dtype: that training computed in. num_targets: of the whole step."""

    path: Path
    step: int
    seen: Mapping[str, Any]
    model: ModelConfig
    dtype: str
    num_targets: int
    micros: tuple[Dumped, ...]
    weights: Pieces


def write_dump(
    out: Path, batch: StepBatch, plans: Sequence[Any], engine, mesh: Mesh, facts: Mapping[str, object],
    seen: Mapping[str, object], finding: Finding, device: torch.device,
) -> Path:  # fmt: skip
    """Write a step down; gives the folder. Collective over the job; ValueError, on all ranks, where that can't be done.

    facts: model, dtype, config and versions. seen: told, loss and grad_norm.
    """
    home = out / "dumps"
    fresh, rank = home / f".step{batch.step}.tmp", dist.get_rank()
    said: dict = {"files": {}, "group": mesh.dp_rank}
    try:
        fresh.mkdir(parents=True, exist_ok=True)
        name = f"rank{rank}.safetensors"
        said["files"][name] = asdict(write_tensors(fresh / name, masters.weights(engine)))
        if mesh.sp_rank == 0:
            said["files"] |= _write_group(fresh, mesh.dp_rank, batch.micro_batches, plans)
            said["micros"] = [
                {key: getattr(micro, key) for key in _MICRO[:4]} | _losses(finding, mesh.dp_rank, number)
                for number, micro in enumerate(batch.micro_batches)
            ]
    except OSError as error:
        said = {"error": f"rank {rank}: {error}"}
    told = [json.loads(text) for text in gather_texts(json.dumps(said), device=device)]
    problem = "; ".join(one["error"] for one in told if "error" in one)
    if rank == 0 and not problem:
        problem = _publish(home, batch, told, facts, seen, finding)
    (problem, *_) = gather_texts(problem, device=device)
    if problem:
        shutil.rmtree(fresh, ignore_errors=True)
        raise ValueError(f"{home / f'step{batch.step}'} couldn't be written ({problem}); {seen['told']}")
    return home / f"step{batch.step}"


def _write_group(folder: Path, group: int, micros: Sequence[MicroBatch], plans: Sequence[Plan]) -> dict[str, dict]:
    arrays = {
        f"{number}/{key}": torch.from_numpy(np.ascontiguousarray(getattr(micro, key), np.int32))
        for number, micro in enumerate(micros)
        for key in ARRAYS
    }
    files = {f"group{group}.safetensors": asdict(write_tensors(folder / f"group{group}.safetensors", arrays))}
    for number, plan in enumerate(plans):
        name = f"group{group}-micro{number}.plan"
        files[name] = asdict(write(folder / name, [plan.to_bytes()]))
    return files


def _losses(finding: Finding, group: int, number: int) -> dict:
    own = [one for one in finding.documents if (one.group, one.micro) == (group, number)]
    return {"losses": [_spelt(one.loss_sum) for one in own], "targets": [one.num_targets for one in own]}


def _publish(
    home: Path, batch: StepBatch, told: Sequence[dict], facts: Mapping, seen: Mapping, finding: Finding
) -> str:
    """On rank 0: make a dump of the files; gives what went wrong, empty if nothing did."""
    fresh, there = home / f".step{batch.step}.tmp", home / f"step{batch.step}"
    content = {
        "format": FORMAT,
        "step": batch.step,
        "epoch": batch.epoch,
        "cursor": batch.cursor,
        "num_targets": batch.global_num_targets,
        **facts,
        "seen": {name: _spelt(value) for name, value in seen.items()}
        | {"first": finding.first, "gradients": finding.gradients, "weights": finding.weights},
        "groups": [one["micros"] for one in sorted(told, key=lambda one: one["group"]) if "micros" in one],
        "files": {name: file for one in told for name, file in one["files"].items()},
    }
    try:
        replace(fresh / STATE, json.dumps({**content, "sha256": digest(content)}, indent=1).encode())
        shutil.rmtree(there, ignore_errors=True)
        os.rename(fresh, there)
        sync(home)
    except OSError as error:
        return str(error)
    return ""


def _spelt(value: object) -> object:
    """A number as JSON has it; one that isn't finite as a word."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_dump(path: Path) -> Dump:
    """Read and check a dump; ValueError says what is damaged, or what no run can have written."""
    state = _state(path)
    if problem := missing(path, state) or damage(path, state, state["files"], STATE):
        raise ValueError(f"{problem}; copy the dump anew from where it is whole")
    try:
        model = ModelConfig.from_mapping({k: v for k, v in state["model"].items() if k not in FREE})
        seen = instance("seen", state["seen"], dict, "an object")
        seen = seen | {name: _number(f"seen.{name}", seen[name]) for name in ("loss", "grad_norm")}
        groups = instance("groups", state["groups"], list, "a list")
        _check_files(state["files"], groups, model)
        micros = tuple(
            _micro(path, model, group, number, micro)
            for group, its in enumerate(groups)
            for number, micro in enumerate(its)
        )
        dtype = state["dtype"]
        if dtype not in ("fp32", "bf16"):
            raise Refused(f"dtype is {shown(dtype)}; it is fp32 or bf16")
        targets = whole("num_targets", state["num_targets"], 0)
        if targets != (held := sum(one.batch.num_targets for one in micros)):
            raise Refused(
                f"num_targets is {targets:,}, and its micro-batches have {held:,}: some are missing or others"
            )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path / STATE} is no dump of a run: {one_line(error)}") from error
    weights = Pieces(path / name for name in state["files"] if name.startswith("rank"))
    return Dump(path, state["step"], seen, model, dtype, targets, micros, weights)


def _check_files(files: Mapping[str, dict], groups: Sequence, model: ModelConfig) -> None:
    """See that all that is read is among the files whose content was checked, weights of the whole model too."""
    needed = []
    for group, its in enumerate(groups):
        needed.append(f"group{group}.safetensors")
        needed += [f"group{group}-micro{i}.plan" for i in range(len(instance("a group", its, list, "a list")))]
    if lacks := [name for name in needed if name not in files]:
        raise Refused(f"files lacks {shown(lacks[0])}")
    size = sum(file["size"] for name, file in files.items() if name.startswith("rank"))
    if size < 4 * model.num_params:
        raise Refused(f"{size:,} bytes of weights are no model of {shown(model.num_params)} parameters")


def _number(name: str, value: object) -> float:
    """A number, or the word that `_spelt` gives for one that isn't finite."""
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in ("nan", "inf", "-inf")):
        raise Refused(f"{name} is {shown(value)}; it must be a number, nan, inf or -inf")
    try:
        return float(value)
    except OverflowError:
        raise Refused(f"{name} is {shown(value)}, more than a float holds") from None


def _state(path: Path) -> dict:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
    except OSError as error:
        there = sorted(str(other.parent) for other in (*path.glob(f"*/{STATE}"), *path.glob(f"dumps/*/{STATE}")))
        like = f", like {there[0]}" if there else ""
        raise ValueError(
            f"{path / STATE} can't be read ({error.strerror}); name a folder OUT/dumps/stepN{like}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path / STATE} can't be read ({one_line(error)}); name a folder OUT/dumps/stepN") from error
    lacks = [name for name in _NEEDED if not isinstance(state, dict) or name not in state]
    if lacks or state["format"] != FORMAT:
        raise ValueError(f"{path / STATE} is no dump of this version (it lacks {', '.join(lacks) or FORMAT})")
    if state["sha256"] != digest({name: value for name, value in state.items() if name != "sha256"}):
        raise ValueError(f"{path / STATE} is damaged: it doesn't have the SHA-256 that it says")
    try:
        whole("step", state["step"], 1)
        for name, file in instance("files", state["files"], dict, "an object").items():
            if not _FILE.fullmatch(name):
                raise Refused(f"files has {shown(name)}, which no dump has")
            fields(f"files.{name}", file, ("size", "sha256"))
            whole(f"files.{name}.size", file["size"], 0)
    except ValueError as error:
        raise ValueError(f"{path / STATE} is no dump of a run: {error}") from error
    return state


def _micro(path: Path, model: ModelConfig, group: int, number: int, told: object) -> Dumped:
    """Read one micro-batch; ValueError where arrays, plan and documents don't fit each other, or the model."""
    name = f"micro-batch {number} of group {group}"
    told = fields(name, told, _MICRO)
    lengths = wholes(f"{name}: lengths", told["lengths"], 1, MAX_TOKENS)
    arrays = _arrays(path / f"group{group}.safetensors", number, sum(lengths), model.vocab_size)
    listed = [instance(f"{name}: {key}", told[key], list, "a list") for key in ("document_ids", "losses", "targets")]
    names = tuple(map(str, listed[0]))
    losses = tuple(_number(f"{name}: a loss", loss) for loss in listed[1])
    if not len(names) == len(losses) == len(listed[2]) == len(lengths):
        raise Refused(f"{name} has {len(lengths)} lengths, {len(names)} documents and {len(losses)} losses")
    plan = Plan.load(path / f"group{group}-micro{number}.plan")
    layout, heads = plan.problem.layout, plan.problem.heads
    shape = (model.num_q_heads, model.num_kv_heads, model.head_dim)
    if layout.lengths != lengths or (heads.num_q_heads, heads.num_kv_heads, heads.head_dim) != shape:
        raise Refused(f"the plan of {name} is for other documents or heads")
    answers = tuple(wholes(f"{name}: answers", one, 0, MAX_TOKENS) for one in told["answers"])
    _check_masks(name, plan, model, answers)
    count = int((arrays["labels"] != NO_TARGET).sum())
    batch = MicroBatch(**arrays, lengths=lengths, sequences=layout.sequences, document_ids=names, num_targets=count,
                       padding_share=0.0, answers=answers)  # fmt: skip
    return Dumped(group, number, batch, plan, losses)


def _check_masks(name: str, plan: Plan, model: ModelConfig, answers: tuple[tuple[int, ...], ...]) -> None:
    """Refuse a plan for other masks than the model's layers have: it would be right, and compute something else."""
    layout = plan.problem.layout
    own = [mask for mask, _ in distinct_masks(model.layer_masks)[0]]
    asked: list[Masks] = [*own]
    if any(answers):
        if len(answers) != len(layout.lengths):
            raise Refused(f"{name} has answers of {len(answers)} documents, and {len(layout.lengths)} lengths")
        for rows, length in zip(answers, layout.lengths, strict=True):
            if any(a >= b for a, b in itertools.pairwise((0, *rows, length))):
                raise Refused(f"{name} has answers at {shown(rows)} in a document of {length} tokens")
        asked = [shared_masks(mask, layout.lengths, answers) for mask in own]
    alike = len(asked) == len(plan.problem.masks) and all(
        np.array_equal(mask_slices(layout, mask), plan.problem.slices(i)) for i, mask in enumerate(asked)
    )
    if not alike:
        raise Refused(f"the plan of {name} is for other masks than the model's")


def _arrays(path: Path, number: int, num_tokens: int, vocab: int) -> dict[str, np.ndarray]:
    try:
        with safe_open(str(path), "np") as file:
            arrays = {key: file.get_tensor(f"{number}/{key}") for key in ARRAYS}
    except SafetensorError as error:
        raise Refused(f"{path} isn't a dump's safetensors file ({one_line(error)})") from error
    for key, array in arrays.items():
        if array.dtype != np.int32 or array.shape != (num_tokens,):
            raise Refused(f"{path}: {number}/{key} is {array.dtype} {array.shape}, not int32 [{num_tokens}]")
        least, most = {"tokens": (0, vocab), "labels": (NO_TARGET, vocab), "positions": (0, MAX_TOKENS)}[key]
        inside = (array >= least) & (array < most) & ((array >= 0) | (array == NO_TARGET))
        if not inside.all():
            raise Refused(f"{path}: {number}/{key} has {array[~inside][0]}, and values are from 0 to {most - 1}")
    return arrays
