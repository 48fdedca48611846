"""Agreement: ranks that should hold the same hold the same, or the run ends with both sides shown.

- Plans and batch, within an SP group: small sums in an all-reduce of their own, before a step (`check_step`) and before
  an evaluation (`check_held_out`).
- Where in the data a step is, over the job: small sums in the all-reduce that its figures travel in (`cursor_sums`,
  `check_cursor`).
- Settings, versions and weights, over the job: once, before the first step (`check_job`, `check_weights`).

Equal numbers h on n ranks are recognised by n · Σh² = (Σh)², which holds only if all are equal; what the sums say is
known to all who took part, so that all of them go on to the rare collectives that find the first difference
(`hsap.train.difference`).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hsap.data.batch import ARRAYS, MicroBatch
from hsap.data.loader import StepBatch
from hsap.gathering import gather_texts
from hsap.ir.span import positions
from hsap.runtime.groups import Mesh
from hsap.targets import NO_TARGET
from hsap.train.difference import differing, sides, step_difference

_BITS, _CURSOR_BITS = 24, 20
"""Of digests that are summed: squares of thousands of ranks stay exact, in int64 and in float64."""
_WORDS = 1 << 20


class Diverged(ValueError):
    """Ranks hold different things where they must hold the same."""


def batch_digest(micros: Iterable[MicroBatch]) -> int:
    """A checksum of micro-batches, all that goes into training: CRC-32, a millisecond for a million tokens' bytes."""
    crc = 0
    for micro in micros:
        for name in ARRAYS:
            crc = zlib.crc32(np.ascontiguousarray(getattr(micro, name)).data, crc)
        crc = zlib.crc32("\n".join(micro.document_ids).encode(), crc)
    return crc


def plans_digest(plans: Iterable) -> int:
    """A checksum of plans, by their hashes: CRC-32."""
    return zlib.crc32("".join(plan.hash for plan in plans).encode())


def check_step(batch: StepBatch, plans: Sequence, mesh: Mesh, device: torch.device) -> None:
    """Check that all ranks of the SP group run the same plans on the same batch and together hold every target token.

    One small all-reduce. plans: one a micro-batch, with `hash` and `rank_spans`. `Diverged`, on every rank of the
    group, shows who holds what and names the first difference.
    """
    mine = 0
    for micro, plan in zip(batch.micro_batches, plans, strict=True):
        mine += int((micro.labels[positions(plan.rank_spans(mesh.sp_rank))] != NO_TARGET).sum())
    alike, targets = _alike((batch_digest(batch.micro_batches), plans_digest(plans)), mesh, device, mine)
    if not alike:
        raise Diverged(
            f"step {batch.step}: the ranks of SP group {mesh.dp_rank} don't hold the same: "
            f"{step_difference(batch, plans, mesh, device)}. Nothing was trained of this step. All ranks of an SP "
            "group must run the same code and packages on the same data; if they do, a machine among them computes "
            "wrongly. resume=true goes on from the newest checkpoint"
        )
    expected = sum(micro.num_targets for micro in batch.micro_batches)
    if targets != expected:
        raise Diverged(
            f"step {batch.step}: the ranks of SP group {mesh.dp_rank} hold {targets} target tokens together, and their "
            f"micro-batches have {expected}: a plan places a token nowhere or twice; set verify=true"
        )


def check_held_out(micros: Sequence[MicroBatch], plans: Sequence, mesh: Mesh, device: torch.device) -> None:
    """Check that all ranks of the SP group evaluate the same data by the same plans. One small all-reduce.

    `Diverged`, on every rank of the group, shows who holds what.
    """
    digests = data, planned = batch_digest(micros), plans_digest(plans)
    if not _alike(digests, mesh, device)[0]:
        held = gather_texts(f"data {data:08x}, plans {planned:08x}", mesh.sp, device)
        raise Diverged(
            f"evaluation: the ranks of SP group {mesh.dp_rank} don't hold the same: "
            f"{sides(held, 'rank', dist.get_process_group_ranks(mesh.sp))}. All ranks must run the same code and "
            "packages on the same held-out data (data.eval_path); if they do, a machine among them computes wrongly. "
            "resume=true goes on from the newest checkpoint"
        )


def _alike(digests: Sequence[int], mesh: Mesh, device: torch.device, count: int = 0) -> tuple[bool, int]:
    """Whether digests are the same on all ranks of the SP group, and the sum of their counts. One small all-reduce."""
    short = [digest % (1 << _BITS) for digest in digests]
    totals = torch.tensor([count, *short, *(digest**2 for digest in short)], dtype=torch.int64, device=device)
    dist.all_reduce(totals, group=mesh.sp)
    counted, *sums = totals.tolist()
    totals_and_squares = zip(sums[: len(short)], sums[len(short) :])
    return all(equal(mesh.topology.num_ranks, *both) for both in totals_and_squares), counted


def equal(ranks: int, total: int | float, squares: int | float) -> bool:
    """Whether numbers whose sum and whose squares' sum these are, one a rank, are all the same."""
    return ranks * squares == total * total


def cursor_sums(batch: StepBatch) -> list[float]:
    """What `check_cursor` wants summed over the job: digest and square of where in the data a step is."""
    digest = zlib.crc32(json.dumps(_cursor_of(batch)).encode()) % (1 << _CURSOR_BITS)
    return [float(digest), float(digest**2)]


def check_cursor(batch: StepBatch, total: float, squares: float, device: torch.device) -> None:
    """Check that all ranks of the job are at the same step of the same data. `Diverged`, on all, says who isn't."""
    if not equal(dist.get_world_size(), total, squares):
        told = differing(_cursor_of(batch), device)
        raise Diverged(
            f"step {batch.step}: the ranks of the job aren't at the same place of the data: {told}; no update was made "
            "of this step. Start all ranks from the same data, settings and checkpoint (resume=true)"
        )


def check_job(facts: Mapping[str, object], device: torch.device) -> None:
    """Check that facts of a run, JSON values by name, are the same on all ranks of the job. Collective over it."""
    text = json.dumps(facts, sort_keys=True, default=str)
    digests = gather_texts(hashlib.sha256(text.encode()).hexdigest(), device=device)
    if len(set(digests)) > 1:
        told = differing(facts, device)
        raise Diverged(
            f"the ranks of the job weren't started alike: {told}; start all of them with the same code, packages "
            "and arguments"
        )


def check_weights(parameters: Mapping[str, Tensor], group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Check that parameters which all ranks of a group hold alike are alike, bit for bit. Collective over the group."""
    digests = {name: content(parameter) for name, parameter in parameters.items()}
    whole = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()
    if len(set(gather_texts(whole, group, device))) > 1:
        found = [json.loads(one) for one in gather_texts(json.dumps(digests), group, device)]
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        name = next(name for name in digests if len({one[name] for one in found}) > 1)
        told = sides([f"{one[name] % (1 << 32):08x}" for one in found], "rank", ranks)
        differing = sum(len({one[name] for one in found}) > 1 for name in digests)
        raise Diverged(
            f"before the first step the ranks don't hold the same weights: {differing} of {len(digests)} parameters "
            f"differ, the first is {name}, whose checksum is {told}; the same files and packages must be on all nodes"
        )


@torch.no_grad()
def content(tensor: Tensor) -> int:
    """A checksum of a tensor's bits, the same on every device: words times odd numbers, added up modulo 2⁶⁴."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = 0
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        odd = torch.arange(start, start + len(part), device=part.device) * -7046029254386353131 | 1
        total += int((part.long() * (odd ^ (odd >> 31) << 1)).sum())
    return (total * 31 + len(words)) % (1 << 64)


def _cursor_of(batch: StepBatch) -> dict:
    return {
        "step": batch.step,
        "epoch": batch.epoch,
        "documents": batch.doc_ids_hash,
        "targets": batch.global_num_targets,
        "cursor": zlib.crc32(json.dumps(batch.cursor, sort_keys=True).encode()),
    }
