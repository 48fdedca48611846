"""Agreement: all ranks of an SP group run the same plans, and together hold every target token."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hsap.ir.span import positions
from hsap.planning.steps import PlannedStep
from hsap.runtime.groups import Mesh
from hsap.targets import NO_TARGET


def agree(step: PlannedStep, mesh: Mesh, device: torch.device) -> None:
    """Check it of a step; RuntimeError where it isn't so.

    One small all-reduce. Equal hashes h are recognised by n · Σh² = (Σh)², which holds only if all are equal.
    """
    mine = 0
    digest = 0
    for micro, plan in zip(step.batch.micro_batches, step.plans):
        rows = positions(plan.rank_spans(mesh.sp_rank))
        mine += int((micro.labels[rows] != NO_TARGET).sum())
        digest = (digest * 31 + int(plan.hash[:6], 16)) % (1 << 24)
    totals = torch.tensor([mine, digest, digest * digest], dtype=torch.int64, device=device)
    dist.all_reduce(totals, group=mesh.sp)
    targets, hashes, squares = totals.tolist()
    expected = sum(micro.num_targets for micro in step.batch.micro_batches)
    if mesh.topology.num_ranks * squares != hashes * hashes or targets != expected:
        raise RuntimeError(
            f"step {step.batch.step}: the ranks of SP group {mesh.dp_rank} disagree: rank {mesh.sp_rank} "
            f"has plan digest {digest:06x}, and together they hold {targets} of {expected} target tokens"
        )
