"""Agreement: ranks that should hold the same hold the same, or the run ends with both sides shown.

- Plans and batch of a step, within an SP group: small sums in the all-reduce that a step begins with (`StepDigest`).
- Which step it is, over the job: small sums in the all-reduce that a step's figures travel in (`place`).
- Settings, versions and weights, over the job: once, before the first step (`check_job`, `check_weights`).

Equal numbers h on n ranks are recognised by n · Σh² = (Σh)², which holds only if all are equal; what the sums say is
known to all who took part, so that all of them go on to the rare collectives that find the first difference.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hsap.data.batch import MicroBatch
from hsap.data.loader import StepBatch
from hsap.gathering import broadcast_bytes, gather_texts
from hsap.ir.check import one_line, shown
from hsap.ir.plan import Plan
from hsap.ir.span import positions
from hsap.runtime.groups import Mesh
from hsap.targets import NO_TARGET

ARRAYS = ("tokens", "labels", "positions")
"""Fields of a micro-batch with a number for each token."""
_LISTS = ("lengths", "sequences", "answers", "document_ids")
_BITS, _PLACE_BITS = 24, 20
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


def check_step(batch: StepBatch, plans: Sequence, mesh: Mesh, device: torch.device) -> None:
    """Check that all ranks of the SP group run the same plans on the same batch and together hold every target token.

    One small all-reduce. plans: one a micro-batch, with `hash` and `rank_spans`. `Diverged`, on every rank of the
    group, shows who holds what and names the first difference.
    """
    mine, plan_digest = 0, 0
    for micro, plan in zip(batch.micro_batches, plans, strict=True):
        rows = positions(plan.rank_spans(mesh.sp_rank))
        mine += int((micro.labels[rows] != NO_TARGET).sum())
        plan_digest = (plan_digest * 31 + int(plan.hash[:6], 16)) % (1 << _BITS)
    data = batch_digest(batch.micro_batches) % (1 << _BITS)
    sums = [mine, plan_digest, plan_digest**2, data, data**2]
    totals = torch.tensor(sums, dtype=torch.int64, device=device)
    dist.all_reduce(totals, group=mesh.sp)
    targets, *rest = totals.tolist()
    ranks = mesh.topology.num_ranks
    if not all(equal(ranks, *rest[i : i + 2]) for i in (0, 2)):
        raise _step_divergence(batch, plans, mesh, device)
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
    data = batch_digest(micros) % (1 << _BITS)
    planned = zlib.crc32("".join(plan.hash for plan in plans).encode()) % (1 << _BITS)
    totals = torch.tensor([data, data**2, planned, planned**2], dtype=torch.int64, device=device)
    dist.all_reduce(totals, group=mesh.sp)
    sums, ranks = totals.tolist(), mesh.topology.num_ranks
    if not all(equal(ranks, *sums[i : i + 2]) for i in (0, 2)):
        held = gather_texts(f"data {data:06x}, plans {planned:06x}", mesh.sp, device)
        raise Diverged(
            f"evaluation: the ranks of SP group {mesh.dp_rank} don't hold the same: "
            f"{_sides(held, 'rank', dist.get_process_group_ranks(mesh.sp))}. All ranks must run the same code and "
            "packages on the same held-out data (data.eval_path); if they do, a machine among them computes wrongly. "
            "resume=true goes on from the newest checkpoint"
        )


def equal(ranks: int, total: int | float, squares: int | float) -> bool:
    """Whether numbers whose sum and whose squares' sum these are, one a rank, are all the same."""
    return ranks * squares == total * total


def place(batch: StepBatch) -> list[float]:
    """What `check_place` wants summed over the job: digest and square of where in the data a step is."""
    digest = zlib.crc32(json.dumps(_place(batch)).encode()) % (1 << _PLACE_BITS)
    return [float(digest), float(digest**2)]


def check_place(batch: StepBatch, total: float, squares: float, device: torch.device) -> None:
    """Check that all ranks of the job are at the same step of the same data. `Diverged`, on all, says who isn't."""
    if not equal(dist.get_world_size(), total, squares):
        told = _differing(_place(batch), device)
        raise Diverged(
            f"step {batch.step}: the ranks of the job aren't at the same place of the data: {told}; no update was made "
            "of this step. Start all ranks from the same data, settings and checkpoint (resume=true)"
        )


def check_job(facts: Mapping[str, object], device: torch.device) -> None:
    """Check that facts of a run, JSON values by name, are the same on all ranks of the job. Collective over it."""
    text = json.dumps(facts, sort_keys=True, default=str)
    digests = gather_texts(hashlib.sha256(text.encode()).hexdigest(), device=device)
    if len(set(digests)) > 1:
        told = _differing(facts, device)
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
        told = _sides([f"{one[name] % (1 << 32):08x}" for one in found], "rank", ranks)
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


def versions() -> dict[str, str]:
    """Of what computes: packages whose versions must be the same on all ranks."""
    from importlib.metadata import version

    names = ("torch", "numpy", "deepspeed", "numba", "safetensors")
    return {f"version of {name}": version(name) for name in names}


def settings_of(config) -> dict[str, object]:
    """A configuration as facts for `check_job`, by dotted name."""
    return dict(_flat("", json.loads(json.dumps(asdict(config), default=_plain))))


def _flat(prefix: str, value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _place(batch: StepBatch) -> dict:
    return {
        "step": batch.step,
        "epoch": batch.epoch,
        "documents": batch.doc_ids_hash,
        "targets": batch.global_num_targets,
        "cursor": zlib.crc32(json.dumps(batch.cursor, sort_keys=True).encode()),
    }


def _differing(facts: Mapping[str, object], device: torch.device) -> str:
    """Say which of some facts differ among the ranks of the job, and how. Collective over it."""
    text = json.dumps(facts, sort_keys=True, default=str)
    found = [json.loads(one) for one in gather_texts(text, device=device)]
    known = dict.fromkeys(name for one in found for name in one)
    names = [name for name in known if any(one.get(name) != found[0].get(name) for one in found)]
    told = [f"{name} is {_sides([shown(one.get(name)) for one in found], 'rank')}" for name in names[:3]]
    return "; ".join(told) + (f" (and {len(names) - 3} more)" if len(names) > 3 else "")


def _sides(values: Sequence[str], noun: str, ranks: Sequence[int] | None = None) -> str:
    """Say who holds what: `A on ranks 0, 1, 3; B on rank 2`, those whom most agree with first."""
    ranks = ranks or range(len(values))
    holders: dict[str, list[int]] = {}
    for rank, value in zip(ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    told = []
    for value, some in sorted(holders.items(), key=lambda item: -len(item[1]))[:4]:
        listed = ", ".join(map(str, some[:8])) + (f" and {len(some) - 8} more" if len(some) > 8 else "")
        told.append(f"{one_line(value)} on {noun}{'s' if len(some) > 1 else ''} {listed}")
    return "; ".join(told)


def _step_divergence(batch: StepBatch, plans: Sequence, mesh: Mesh, device: torch.device) -> Diverged:
    """Find who holds what and the first difference. Collective over the SP group."""
    digest = hashlib.sha256()
    for _, _, field in _fields(batch, plans):
        digest.update(field)
    plan_hash = hashlib.sha256("".join(plan.hash for plan in plans).encode()).hexdigest()
    held = gather_texts(f"batch {digest.hexdigest()[:12]}, plans {plan_hash[:12]}", mesh.sp, device)
    ranks = dist.get_process_group_ranks(mesh.sp)
    camps: dict[str, list[int]] = {}
    for index, one in enumerate(held):
        camps.setdefault(one, []).append(index)
    first, second = (camp[0] for camp in sorted(camps.values(), key=len, reverse=True)[:2])
    difference = _difference(batch, plans, (first, second), mesh, device)
    return Diverged(
        f"step {batch.step}: the ranks of SP group {mesh.dp_rank} don't hold the same: {_sides(held, 'rank', ranks)}. "
        f"The first difference: {difference}. Nothing was trained of this step. All ranks of an SP group must run the "
        "same code and packages on the same data; if they do, a machine among them computes wrongly. resume=true goes "
        "on from the newest checkpoint"
    )


def _fields(batch: StepBatch, plans: Sequence) -> Iterable[tuple[str, MicroBatch | None, bytes]]:
    """What an SP group's ranks must all hold, by name, in the order in which a difference is told."""
    head = {"step": batch.step, "epoch": batch.epoch, "micro-batches": len(batch.micro_batches)}
    yield "the step", None, json.dumps(head).encode()
    for i, micro in enumerate(batch.micro_batches):
        for name in _LISTS:
            yield f"micro-batch {i}, {name}", None, json.dumps(getattr(micro, name)).encode()
        for name in ARRAYS:
            yield (
                f"micro-batch {i}, {name}",
                micro,
                np.ascontiguousarray(getattr(micro, name), dtype=np.int64).tobytes(),
            )


def _difference(batch: StepBatch, plans: Sequence, two: tuple[int, int], mesh: Mesh, device: torch.device) -> str:
    """Name the first thing in which two ranks of the group differ, as all of its ranks then know."""
    ranks = [dist.get_process_group_ranks(mesh.sp)[place] for place in two]
    fields = [*_fields(batch, plans)]
    # Fields of another number would be other collectives; the first one tells of it.
    for name, micro, field in fields:
        one, other = (broadcast_bytes(field, source, mesh.sp, device) for source in two)
        if one == other:
            continue
        if micro is None:
            return _listed(name, json.loads(one), json.loads(other), ranks)
        values = [np.frombuffer(side, np.int64) for side in (one, other)]
        at = int(np.argmax(values[0] != values[1]))
        document = int(np.searchsorted(np.cumsum(micro.lengths), at, side="right"))
        row = at - sum(micro.lengths[:document])
        return (
            f"{name}, row {at:,} of {len(values[0]):,}, which is row {row:,} of document "
            f"{shown(micro.document_ids[document])}: "
            f"{values[0][at]} on rank {ranks[0]}, {values[1][at]} on rank {ranks[1]}"
        )
    return _plan_difference(plans, two, ranks, mesh, device)


def _listed(name: str, one: object, other: object, ranks: Sequence[int]) -> str:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        name, one, other = f"{name}, number {at} of {len(one)}", one[at], other[at]
    return f"{name}: {shown(one)} on rank {ranks[0]}, {shown(other)} on rank {ranks[1]}"


def _plan_difference(
    plans: Sequence, two: tuple[int, int], ranks: Sequence[int], mesh: Mesh, device: torch.device
) -> str:
    for i, plan in enumerate(plans):
        # Comments hold the hash itself.
        lines = (line for one in _whole(plan) for line in one.text().splitlines() if not line.startswith(";"))
        text = "\n".join(lines).encode()
        one, other = (broadcast_bytes(text, source, mesh.sp, device).decode().splitlines() for source in two)
        if one != other:
            at = next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
            told = [shown(lines[at]) if at < len(lines) else "nothing" for lines in (one, other)]
            return (
                f"micro-batch {i}, line {at + 1} of the plan's text: {told[0]} on rank {ranks[0]}, {told[1]} on rank "
                f"{ranks[1]}"
            )
    return "none that shows in a plan's text, though their hashes differ"


def _whole(plan) -> Sequence[Plan]:
    """The plans of a micro-batch: one, or under TSP one for each distinct share of the heads."""
    return getattr(plan, "plans", (plan,))
