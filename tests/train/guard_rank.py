"""One rank of a world in which runs follow each other, each with something wrong at one step; says what came of each.

Called in a forked process. A case: train.py's arguments and what is made wrong, by name, of `WRONG`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hsap.api import compile
from hsap.ir.problem import Topology
from hsap.planning.steps import PlannedStep
from hsap.runtime.groups import make_mesh
from hsap.train.budget import keep_budget
from hsap.train.checkpoints import masters
from hsap.train.engine import build, join
from hsap.train.inputs import read_inputs
from hsap.train.run import Trainer
from hsap.train.updates import Updates
from tests.parity.rank import configure

BAD_STEP, BAD_RANK, BAD_TOKEN, LATE_STEP = 3, 1, 700, 6
_LIMIT_S = 900


class SickTrainer(Trainer):
    """Trains, but that at `BAD_STEP` something is wrong; notes whether a step left out has changed anything."""

    def __init__(self, wrong: str, *arguments) -> None:
        super().__init__(*arguments)
        self.wrong, self.notes = wrong, {}
        self._bad = False
        self.updates.loss, self.updates.make = self._loss, self._make
        if wrong == "output":
            layer = self.engine.deepspeed.module.model.layers[1].mlp
            layer.register_forward_hook(lambda module, inputs, output: output * torch.nan if self._bad else output)
        if wrong == "gradient":
            layer = self.engine.deepspeed.module.model.layers[0]
            layer.register_forward_hook(lambda module, inputs, output: _Poison.apply(output) if self._bad else output)

    def _exchange(self, use: str):
        # Runs of one world share its store.
        return super()._exchange(f"{self.config.out}/{use}")

    def _loss(self, *arguments, **options) -> Tensor:
        loss = Updates.loss(self.updates, *arguments, **options)
        return loss * torch.nan if self._bad and self.wrong == "loss" else loss

    def _make(self, step: PlannedStep, waits: tuple[float, float]) -> dict:
        bad = step.batch.step == BAD_STEP
        self._bad = bad and dist.get_rank() == BAD_RANK
        if bad and self.wrong == "embedding":
            with torch.no_grad():
                self.engine.deepspeed.module.model.embed_tokens.weight[BAD_TOKEN] = torch.nan
        if self.wrong == "weights turned" and step.batch.step == LATE_STEP:
            # On all ranks, in what weights are made of: the model is as sure as before, of the opposite.
            for shard in masters.shards(self.engine.deepspeed):
                if shard.name == "lm_head.weight":
                    shard.part(shard.master).mul_(-3)
            masters._refresh(self.engine.deepspeed.optimizer)
        if self._bad and self.wrong in WRONG:
            step = WRONG[self.wrong](step)
        before = self._state()
        figures = Updates.make(self.updates, step, waits)
        if figures.get("left_out"):
            same = [torch.equal(a, b) for a, b in zip(before, self._state(), strict=True)]
            self.notes = {"unchanged": all(same), "tensors": len(same)}
        return figures

    def _state(self) -> list[Tensor]:
        """Weights as they are computed with and kept, moments, and counters of steps; nothing before the first one."""
        engine = self.engine.deepspeed
        if engine.global_steps == 0:
            return []
        captured, adam_steps = masters.capture(engine)
        held = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
        counters = [adam_steps, engine.global_steps, engine.global_samples, engine.skipped_steps]
        counters.append(engine.micro_steps % engine.gradient_accumulation_steps())
        return [tensor.detach().clone() for tensor in (*captured.values(), *held)] + [torch.tensor(counters)]


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient / 0.0


def _other(step: PlannedStep, **changes) -> PlannedStep:
    """The step with another last micro-batch."""
    *rest, last = step.batch.micro_batches
    return replace(step, batch=replace(step.batch, micro_batches=(*rest, replace(last, **changes))))


def _changed(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed[5] += 1
    return changed


def _other_plan(step: PlannedStep) -> PlannedStep:
    *rest, last = step.plans
    return replace(step, plans=(*rest, compile(last.problem, "ring")))


WRONG = {
    "tokens": lambda step: _other(step, tokens=_changed(step.batch.micro_batches[-1].tokens)),
    "labels": lambda step: _other(step, labels=_changed(step.batch.micro_batches[-1].labels)),
    "documents": lambda step: _other(step, document_ids=("?", *step.batch.micro_batches[-1].document_ids[1:])),
    "plan": _other_plan,
    "cursor": lambda step: replace(step, batch=replace(step.batch, epoch=7)),
}


def main(rank: int, num_ranks: int, port: int, cases: dict, folder: str) -> None:
    """Run all cases; what came of them is in FOLDER/rankR.json."""
    signal.alarm(_LIMIT_S)  # a rank that waits for ever must not outlive the tests
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    said = {}
    try:
        for number, (name, (wrong, arguments)) in enumerate(cases.items()):
            config = configure(arguments, num_ranks)
            if number == 0:
                join(config)
            said[name] = _one(config, wrong)
            gc.collect()
            dist.barrier()
    except Exception:
        said["world"] = traceback.format_exc()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(said))
    os._exit(0)


def _one(config, wrong: str) -> dict:
    Path(config.out).mkdir(parents=True, exist_ok=True)
    mine = dist.get_rank() == BAD_RANK
    if mine and wrong == "settings":
        config = replace(config, optim=replace(config.optim, lr=0.5))
    inputs = read_inputs(config)
    if config.check.error_budget is not None:
        config, _ = keep_budget(config, inputs, torch.device("cpu"))
    engine = build(config, inputs.model, make_mesh(Topology.parse(config.topology)))
    if mine and wrong == "weights":
        with torch.no_grad():
            engine.deepspeed.module.model.norm.weight[3] += 1e-7
    trainer = SickTrainer(wrong, config, inputs, engine)
    try:
        with trainer:
            trainer.train()
        return {"notes": trainer.notes}
    except Exception as error:
        told = {"kind": type(error).__name__, "error": str(error), "notes": trainer.notes}
        return told if isinstance(error, ValueError) else told | {"trace": traceback.format_exc()}
