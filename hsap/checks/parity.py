"""Parity: a configuration's first step on all of its ranks, beside the same in one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hsap.checks.alone import alone
from hsap.checks.difference import Difference, Outcome, difference, errors
from hsap.checks.gradients import tell_gradients
from hsap.runtime.memory import TORCH_DTYPES
from hsap.train.config import TrainConfig
from hsap.train.run import Trainer

SHOWN = 5


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The difference, and the parameters whose gradients are furthest apart. about: what was compared, in words."""

    about: str
    difference: Difference
    worst: tuple[tuple[str, float], ...]

    @property
    def ok(self) -> bool:
        return self.difference.ok

    def __str__(self) -> str:
        d = self.difference
        rows = [("loss", d.loss, d.bars[2]), ("gradient norm", d.norm, d.bars[3]),
                ("all gradients", d.all_gradients, d.bars[1])]  # fmt: skip
        rows += [(name, off, d.bars[0]) for name, off in self.worst]
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{'relative difference':<{width}} {'':>9} {'bar':>9}"]
        lines += [
            f"{name:<{width}} {off:9.1e} {bar:9.0e}{'  OVER' if not off <= bar else ''}" for name, off, bar in rows
        ]
        return "\n".join([self.about, *lines, self.verdict()])

    def verdict(self) -> str:
        """One line on how it went."""
        d = self.difference
        if self.ok:
            return "parity: ok: loss, gradient norm and every parameter's gradient are those of one process"
        return (
            f"parity: FAILED: gradients are up to {d.gradient:.1e} off ({d.parameter}), all together "
            f"{d.all_gradients:.1e}, loss {d.loss:.1e}, norm {d.norm:.1e}: this way of running trains another model. "
            "Look at what was changed last of loss, scale or attention, and try another planner, topology, ZeRO stage "
            "or kernel to find which it is"
        )

    def to_json(self) -> dict[str, Any]:
        d = self.difference
        found = {"loss": d.loss, "norm": d.norm, "all_gradients": d.all_gradients, "gradient": d.gradient}
        bars = dict(zip(("gradient", "all_gradients", "loss", "norm"), d.bars, strict=True))
        return {"ok": self.ok, "about": self.about, "differences": found, "bars": bars, "worst": dict(self.worst)}


def check_parity(trainer: Trainer, reduced: str) -> ParityReport | None:
    """Compare the first step; on rank 0 what came of it, None on the others. Collective over the job.

    reduced: what was made smaller of the batch, in words. The weights are those after one update, afterwards.
    ValueError: a step without targets, of which everything would be equal.
    """
    config = trainer.config
    found: dict[str, torch.Tensor] = {}
    tell_gradients(trainer.engine, found.update)
    step = trainer.first_step()
    if not step.batch.global_num_targets:
        raise ValueError(
            "parity: no token of the first step is a target, so that all gradients are 0 and nothing is compared; "
            "set another train.seed, or look at what gives the data its targets"
        )
    figures = trainer.updates.make(step)
    group = dist.new_group([0])
    if dist.get_rank() != 0:
        return None
    got = Outcome(figures["loss"], _number(figures["grad_norm"]), found)
    want = alone(config, trainer.inputs, trainer.engine.device, group)
    about = (
        f"{_way(config)}, against one process: a step of {config.train.packs_per_step} packs, "
        f"{step.batch.num_tokens:,} tokens" + (f"; made small: {reduced}" if reduced else "")
    )
    dtype = TORCH_DTYPES[config.engine.dtype]
    worst = list(errors(want.gradients, got.gradients)[0].items())[:SHOWN]
    return ParityReport(about, difference(want, got, dtype), tuple(worst))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _way(config: TrainConfig) -> str:
    tsp = f", TSP over {config.tsp_degree}" if config.parallel == "tsp" else ""
    return (
        f"parity of {config.topology}, dp {config.dp}, planner {config.planner.name}, "
        f"ZeRO {config.engine.zero_stage}{tsp}, accumulation {config.accumulation}, {config.engine.dtype}"
    )


def tell(report: ParityReport, as_json: bool) -> None:
    """Print it."""
    print(json.dumps(report.to_json()) if as_json else report, flush=True)
