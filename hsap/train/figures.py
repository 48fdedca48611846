"""Figures: what a step is said to have done, over all ranks."""

from __future__ import annotations

import math
import resource
import signal
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from hsap.models import ModelConfig
from hsap.planners import PLANNERS
from hsap.planning.compiling import PlanFigures
from hsap.planning.planned import Planned
from hsap.planning.steps import PlannedStep
from hsap.train.engine import Engine
from hsap.train.metrics import ratio


@dataclass(frozen=True, slots=True)
class Spent:
    """One rank's part of a step: sum of its token losses, bytes of weights it sent, and where its time went."""

    loss: float
    weight_bytes: int
    data_wait_s: float
    plan_wait_s: float
    busy_s: float


class StepFigures:
    """Puts the ranks' parts of a step together. flops_per_s: of a rank.

    stopped_by: the signal that asked some rank to stop, as all ranks agree; None if none has.
    """

    def __init__(self, model: ModelConfig, engine: Engine, flops_per_s: float) -> None:
        self.model, self.engine, self.flops_per_s = model, engine, flops_per_s
        self.stopped_by: signal.Signals | None = None

    def of(self, step: PlannedStep, own: Spent, rate: float, asked_by: signal.Signals | None) -> dict:
        """Figures of a step by name; times are the slowest rank's. Collective over the job.

        rate: the learning rate. asked_by: the signal that came to this rank. ValueError: the loss isn't finite.
        """
        batch, promised = step.batch, astuple(step.figures)
        plans = step.plans if self.engine.mesh.sp_rank == 0 else ()  # each SP group's once
        chosen = [sum(plan.planner == name for plan in plans) for name in PLANNERS]
        device = self.engine.device
        sums = torch.tensor([own.loss, own.weight_bytes, *promised, *chosen], dtype=torch.float64, device=device)
        # A rank's whole time, not the sum of three maxima: while one waits for data, the others wait for it.
        elapsed_s = own.data_wait_s + own.plan_wait_s + own.busy_s
        # A signal may have reached only some of the ranks.
        highest = [own.data_wait_s, own.plan_wait_s, elapsed_s, _peak_bytes(device), asked_by or 0]
        highest = torch.tensor(highest, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        loss, weight_bytes, *totals = sums.tolist()
        if not math.isfinite(loss):
            raise ValueError(
                f"step {batch.step}: the loss is {loss}; training has diverged. Lower optim.lr, lengthen "
                "optim.warmup_steps or set optim.clip, and start anew or from the newest checkpoint (resume=true)"
            )
        figures, chosen = PlanFigures(*totals[: len(promised)]), totals[len(promised) :]
        data_wait_s, plan_wait_s, step_s, peak_bytes, asked_by = highest.tolist()
        self.stopped_by = signal.Signals(int(asked_by)) if asked_by else None
        flops = self.model.train_flops(batch.num_tokens, figures.area)
        ranks = dist.get_world_size()
        return {
            "step": batch.step,
            "epoch": batch.epoch,
            "loss": ratio(loss, batch.global_num_targets),
            "grad_norm": self.engine.grad_norm(),
            "lr": rate,
            "tokens": batch.num_tokens,
            "target_tokens": batch.global_num_targets,
            "tokens_per_s": batch.num_tokens / step_s,
            "tokens_per_s_per_rank": batch.num_tokens / step_s / ranks,
            "mfu": flops / step_s / (self.flops_per_s * ranks),
            "padding_share": batch.padding_share,
            "pack_tokens": batch.pack_tokens,
            "planners": {name: int(count) for name, count in zip(PLANNERS, chosen) if count},
            "area_imbalance": ratio(figures.max_area, figures.mean_area),
            "token_imbalance": ratio(figures.max_tokens, figures.mean_tokens),
            "intra_node_bytes": int(figures.intra_node_bytes),
            "inter_node_bytes": int(figures.inter_node_bytes),
            "weight_bytes": int(weight_bytes),
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
