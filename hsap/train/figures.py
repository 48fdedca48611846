"""Figures: what a step is said to have done, over all ranks."""

from __future__ import annotations

import math
import resource
import signal
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.models import ModelConfig
from hsap.planners import PLANNERS
from hsap.planning.compiling import PlanFigures
from hsap.planning.planned import Planned
from hsap.planning.steps import PlannedStep
from hsap.train.agreement import check_cursor, cursor_sums
from hsap.train.engine import Engine
from hsap.train.metrics import ratio
from hsap.train.stopping import StopRequest


@dataclass(frozen=True, slots=True)
class Sums:
    """What all ranks of a step together have, known before its update: sum of the token losses, norm of the gradient
    before clipping, bytes of weights sent, what the plans promise and how many each planner has made."""

    loss: float
    grad_norm: float
    weight_bytes: int
    promised: PlanFigures
    planners: dict[str, int]


@dataclass(frozen=True, slots=True)
class Spent:
    """Where one rank's time of a step went."""

    data_wait_s: float
    plan_wait_s: float
    busy_s: float


class StepFigures:
    """Puts the ranks' parts of a step together. flops_per_s: of a rank."""

    def __init__(self, model: ModelConfig, engine: Engine, flops_per_s: float) -> None:
        self.model, self.engine, self.flops_per_s = model, engine, flops_per_s

    def add_up(self, step: PlannedStep, loss: Tensor, square: Tensor, weight_bytes: int) -> Sums:
        """Add up what each rank has of a step whose gradient is there. Collective over the job.

        loss: sum of this rank's token losses; square: its part of the gradient norm's square: float64 scalars. Ranks
        must be at the same place of the data, or `Diverged` says who isn't.
        """
        batch, promised = step.batch, astuple(step.figures)
        plans = step.plans if self.engine.mesh.sp_rank == 0 else ()  # each SP group's once
        chosen = [sum(plan.planner == name for plan in plans) for name in PLANNERS]
        known = torch.tensor(
            [weight_bytes, *cursor_sums(batch), *promised, *chosen], dtype=torch.float64, device=self.engine.device
        )
        sums = torch.cat([loss.reshape(1), square.reshape(1), known])
        dist.all_reduce(sums)
        loss_sum, squares, sent, digests, of_digests, *rest = sums.tolist()
        check_cursor(batch, digests, of_digests, self.engine.device)
        counts = {name: int(count) for name, count in zip(PLANNERS, rest[len(promised) :], strict=True) if count}
        return Sums(loss_sum, math.sqrt(squares), int(sent), PlanFigures(*rest[: len(promised)]), counts)

    def of(self, step: PlannedStep, sums: Sums, own: Spent, rate: float, stop_request: StopRequest) -> dict:
        """Figures of a step by name; times are the slowest rank's. Collective over the job.

        rate: the learning rate. stop_request: whose signal all ranks are told of.
        """
        batch, figures = step.batch, sums.promised
        # A rank's whole time, not the sum of three maxima: while one waits for data, the others wait for it.
        elapsed_s = own.data_wait_s + own.plan_wait_s + own.busy_s
        # A signal may have reached only some of the ranks.
        peak_bytes, asked_by = _peak_bytes(self.engine.device), stop_request.asked_by or 0
        highest = [own.data_wait_s, own.plan_wait_s, elapsed_s, peak_bytes, asked_by]
        highest = torch.tensor(highest, dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        data_wait_s, plan_wait_s, step_s, peak_bytes, asked_by = highest.tolist()
        stop_request.agreed = signal.Signals(int(asked_by)) if asked_by else None
        flops = self.model.train_flops(batch.num_tokens, figures.area)
        ranks = dist.get_world_size()
        return {
            "step": batch.step,
            "epoch": batch.epoch,
            "loss": ratio(sums.loss, batch.global_num_targets),
            "grad_norm": sums.grad_norm if math.isfinite(sums.grad_norm) else None,
            "lr": rate,
            "tokens": batch.num_tokens,
            "target_tokens": batch.global_num_targets,
            "tokens_per_s": batch.num_tokens / step_s,
            "tokens_per_s_per_rank": batch.num_tokens / step_s / ranks,
            "mfu": flops / step_s / (self.flops_per_s * ranks),
            "padding_share": batch.padding_share,
            "pack_tokens": batch.pack_tokens,
            "planners": sums.planners,
            "area_imbalance": ratio(figures.max_area, figures.mean_area),
            "token_imbalance": ratio(figures.max_tokens, figures.mean_tokens),
            "intra_node_bytes": int(figures.intra_node_bytes),
            "inter_node_bytes": int(figures.inter_node_bytes),
            "weight_bytes": sums.weight_bytes,
            "plan_wait_s": plan_wait_s,
            "data_wait_s": data_wait_s,
            "step_s": step_s,
            "peak_memory_bytes": int(peak_bytes),
            "doc_ids_hash": batch.doc_ids_hash,
        } | _choices(step.plans)


def _choices(plans: Sequence[Planned]) -> dict:
    """What planner auto chose between, for each micro-batch: predicted seconds by candidate, None for one without."""
    made = [plan.choice for plan in plans if plan.choice is not None]
    table = [{name: None if isinstance(s, str) else s for name, s in choice.items()} for choice in made]
    return {"choice": table} if table else {}


def _peak_bytes(device: torch.device) -> int:
    """Peak memory of this rank: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
