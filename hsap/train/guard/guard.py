"""The guard of a run: judges every step between backward and update, and sees to what is set for those gone wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from hsap.ir.plan import Plan
from hsap.models import ModelConfig
from hsap.planning.steps import PlannedStep
from hsap.steps import METRICS, read_steps
from hsap.train.config import TrainConfig
from hsap.train.engine import Engine
from hsap.train.facts import settings_of, versions
from hsap.train.guard.dump import write_dump
from hsap.train.guard.finding import Finding, Search, told_of
from hsap.train.guard.judge import Judge, Trouble
from hsap.train.told import remark

_ADVICE = {
    "non_finite": "training has diverged. Lower optim.lr, lengthen optim.warmup_steps or set optim.clip, and start "
    "anew or from the newest checkpoint (resume=true)",
    "spike": "go on from the newest checkpoint (resume=true), with guard.on_spike=skip or warn, or a lower optim.lr",
}


class Guard:
    """One rank's guard; made and called alike on all ranks of the job.

    attention: what the model calls. losses: as `Search.find` wants them. resumed_step: of the checkpoint that the run
    goes on from, whose last steps are in the metrics; 0 for a new one.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: ModelConfig,
        engine: Engine,
        attention: object,
        losses: Callable[..., Tensor],
        resumed_step: int,
    ) -> None:
        self.config, self.model, self.engine, self.losses = config, model, engine, losses
        self.search = Search(engine.deepspeed, config.engine.zero_stage, attention, engine.mesh, engine.device)
        past = read_steps(Path(config.out) / METRICS) if resumed_step else ()
        known = ((one.get("step"), one) for one in past)
        self.judge = Judge(config.guard, (one for step, one in known if isinstance(step, int) and step <= resumed_step))

    def check(self, step: PlannedStep, loss_sum: float, norm: float, scale: float) -> Trouble | None:
        """Judge a step: None where it is to be trusted, else what is wrong; the update is to be left out if so.

        loss_sum: over all ranks. scale: what losses were multiplied by for backward. Collective over the job if
        something is wrong. ValueError where the run is to end.
        """
        batch = step.batch
        loss = loss_sum / max(batch.global_num_targets, 1)
        trouble = self.judge.judge(loss, norm)
        if trouble is None:
            return None
        finding = self.search.find(batch, step.plans, self.losses, scale)
        told = f"step {batch.step}: {trouble.told}"
        found = told_of(finding, loss)
        match trouble.action:
            case "warn" | "skip":
                done = "" if trouble.action == "warn" else "; its update is left out"
                if dist.get_rank() == 0:
                    remark(f"{told}{done}; {found}")
                return trouble
            case "dump":
                dump = self._dump(step, loss, norm, told, finding)
                raise ValueError(f"{told}; {found}; hsap replay {dump} computes it once more; {_ADVICE[trouble.kind]}")
            case _:
                raise ValueError(f"{told}; {_ADVICE[trouble.kind]}; {found}")

    def figures(self, trouble: Trouble | None) -> dict:
        """What the metrics say of a step: updates left out so far, and what was wrong with this one, if it was."""
        told = {} if trouble is None else {trouble.kind: trouble.told}
        if trouble is not None and trouble.action == "skip":
            told["left_out"] = trouble.kind
        return {"skipped_steps": self.judge.skipped} | told

    def _dump(self, step: PlannedStep, loss: float, norm: float, told: str, finding: Finding) -> Path:
        facts = {
            "model": json.loads(json.dumps(asdict(self.model))),
            "dtype": self.config.engine.dtype,
            "config": settings_of(self.config),
            "versions": versions(),
        }
        seen = {"told": told, "loss": loss, "grad_norm": norm}
        engine = self.engine
        # Of one plan each: dumps aren't there beside TSP, which has several.
        plans = [plan for plan in step.plans if isinstance(plan, Plan)]
        return write_dump(
            Path(self.config.out), step.batch, plans, engine.deepspeed, engine.mesh, facts, seen, finding,
            engine.device,
        )  # fmt: skip
