"""Difference: who holds what of things that ranks should hold alike, and the first thing in which they differ.

What finds it is collective, and rare: `hsap.train.agreement` has seen by sums, which all ranks know, that it is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from hsap.data.batch import ARRAYS, MicroBatch
from hsap.data.loader import StepBatch
from hsap.gathering import broadcast_bytes, gather_texts
from hsap.ir.check import one_line, shown
from hsap.ir.plan import Plan
from hsap.runtime.groups import Mesh

_LISTS = ("lengths", "sequences", "answers", "document_ids")


def differing(facts: Mapping[str, object], device: torch.device) -> str:
    """Say which of some facts differ among the ranks of the job, and how. Collective over it."""
    text = json.dumps(facts, sort_keys=True, default=str)
    found = [json.loads(one) for one in gather_texts(text, device=device)]
    known = dict.fromkeys(name for one in found for name in one)
    names = [name for name in known if any(one.get(name) != found[0].get(name) for one in found)]
    told = [f"{name} is {sides([shown(one.get(name)) for one in found], 'rank')}" for name in names[:3]]
    return "; ".join(told) + (f" (and {len(names) - 3} more)" if len(names) > 3 else "")


def sides(values: Sequence[str], noun: str, ranks: Sequence[int] | None = None) -> str:
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


def step_difference(batch: StepBatch, plans: Sequence, mesh: Mesh, device: torch.device) -> str:
    """Say who holds what of a step's batch and plans, and the first difference. Collective over the SP group."""
    digest = hashlib.sha256()
    for _, _, field in _fields(batch):
        digest.update(field)
    plan_hash = hashlib.sha256("".join(plan.hash for plan in plans).encode()).hexdigest()
    held = gather_texts(f"batch {digest.hexdigest()[:12]}, plans {plan_hash[:12]}", mesh.sp, device)
    camps: dict[str, list[int]] = {}
    for index, one in enumerate(held):
        camps.setdefault(one, []).append(index)
    first, second = (camp[0] for camp in sorted(camps.values(), key=len, reverse=True)[:2])
    told = sides(held, "rank", dist.get_process_group_ranks(mesh.sp))
    return f"{told}. The first difference: {_difference(batch, plans, (first, second), mesh, device)}"


def _fields(batch: StepBatch) -> Iterable[tuple[str, MicroBatch | None, bytes]]:
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
    ranks = [dist.get_process_group_ranks(mesh.sp)[index] for index in two]
    fields = [*_fields(batch)]
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
