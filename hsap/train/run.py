"""Run: the training loop of one rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hsap.data.batch import MicroBatch
from hsap.data.loader import StepLoader
from hsap.ir.span import positions
from hsap.leak.report import LeakReport
from hsap.planning.planned import Exchange, Planned
from hsap.planning.steps import PlannedStep, PlannedSteps
from hsap.position import Phase, Position
from hsap.runtime.upload import Upload
from hsap.targets import NO_TARGET
from hsap.train.agreement import check_job, check_step, check_weights, settings_of, versions
from hsap.train.attention import Attention
from hsap.train.budget import keep_budget
from hsap.train.capacity import Capacity
from hsap.train.checkpoints.saver import Saver, load
from hsap.train.config import TrainConfig
from hsap.train.engine import Engine, build, join, learning_rate, leave, own_device
from hsap.train.evaluation import Evaluation
from hsap.train.figures import Spent, StepFigures
from hsap.train.guard.guard import Guard
from hsap.train.hang import Watch
from hsap.train.inputs import Inputs, read_inputs
from hsap.train.leak import check_leak
from hsap.train.metrics import MetricsLog
from hsap.train.opening import opening
from hsap.train.profile import Profile
from hsap.train.restarts import mark
from hsap.train.settings import keep
from hsap.train.stopping import StopRequest
from hsap.train.told import remark


def run(config: TrainConfig, settings: Callable[[Mapping[str, object]], str] | None = None) -> None:
    """Train as configured: every rank of the job calls this. ValueError for what the user can mend.

    settings: gives the configuration as text, to be kept in the run's folder once nothing speaks against the run; it is
    given what the run itself has changed, by key.
    After an error the process groups are left as they are: the process is about to end, and leaving a group in order
    may wait for ranks that no longer answer.
    """
    inputs = read_inputs(config)
    with Watch(config.guard, config.out) as watch:
        mesh = join(config, watch.meeting, watch.position)
        watch.ranks_of = dist.get_process_group_ranks(mesh.sp)
        changed = {}
        if config.check.error_budget is not None:
            wire = config.wire_dtype
            config, told = keep_budget(config, inputs, own_device(config))
            changed = {} if config.wire_dtype == wire else {"wire_dtype": config.wire_dtype}
            inputs = replace(inputs, notices=(*inputs.notices, told))
        engine = build(config, inputs.model, mesh)
        trainer = Trainer(config, inputs, engine, watch.position)
        if settings is not None and dist.get_rank() == 0:
            keep(Path(config.out), settings(changed))
            mark(config.out, os.environ)
        with trainer.stop_request, watch.explaining():
            trainer.train()
            leave(engine)


class Trainer:
    """One rank's loop over planned steps. position: where it notes what it is at."""

    def __init__(self, config: TrainConfig, inputs: Inputs, engine: Engine, position: Position | None = None) -> None:
        self.config, self.inputs, self.engine, self.position = config, inputs, engine, position or Position()
        self.mesh = engine.mesh
        self.capacity = Capacity.of(config.packing, config.train.micro_packs, self.mesh.topology.num_ranks)
        self.attention = Attention(config, inputs.model, self.mesh, engine.device, self.capacity.even)
        self.session = self.attention.session
        self.session.position = engine.position = self.position
        self.figures = StepFigures(inputs.model, engine, config.cluster.flops_per_s)
        self.evaluation: Evaluation | None = None
        if inputs.eval_data is not None:
            self.evaluation = Evaluation(config, inputs.eval_data, engine, partial(self._exchange, "eval"), self._loss)
        self.stop_request = StopRequest()

    def train(self) -> None:
        """Train to the last step, evaluating and saving on the way."""
        config = self.config
        state: dict[str, Any] = {"step": 0, "cursor": None}
        if self.inputs.checkpoint is not None:
            state = self.inputs.checkpoint
            load(self.engine, config, state)
        self._check_alike()
        self.guard = self._guard(state["step"])
        saver = Saver(config, self.inputs.identity, self.position)
        log, out = None, Path(config.out)
        profile = Profile(config.profile, out, self.session, dist.get_rank(), self.mesh.dp_rank, state["step"])
        if dist.get_rank() == 0:
            told = opening(config, self.inputs, state["step"], self._saves_at_end)
            print(*told, sep="\n", file=sys.stderr, flush=True)
            log = MetricsLog(out, config.train.steps, state["step"], config.train.tensorboard, config.train.log_every)
        loader, steps = self.steps(max(config.train.steps - state["step"], 0), state["cursor"])
        try:
            for step in steps:
                if config.check.leak and step.batch.step == state["step"] + 1:
                    self._check_leak(step)
                figures = self._step(step, (steps.data_wait_s, steps.plan_wait_s), profile)
                # Before the checkpoint: what a crash leaves beyond the newest one is cut off, a gap would stay.
                if log is not None:
                    log.write(figures)
                if self._saves(step.batch.step):
                    saver.save(self.engine, step.batch.step, step.batch.cursor)
                self.position.done()
                if self.figures.stopped_by is not None:
                    break
                self.position.phase(Phase.DATA)
            saver.wait()
            self.position.phase(Phase.END)
        finally:
            steps.close()
            loader.close()
            self.attention.close()
            if log is not None:
                log.close()
        if self.figures.stopped_by is not None and dist.get_rank() == 0:
            told = f"stopped after step {step.batch.step}, which is saved; resume=true out={config.out} goes on"
            print(f"hsap: {self.figures.stopped_by.name}: {told}", file=sys.stderr, flush=True)

    def steps(self, count: int, cursor: dict | None = None) -> tuple[StepLoader, PlannedSteps]:
        """So many steps, planned ahead, those behind the cursor or the first ones; both are to be closed, these first.

        Exactly as many: beyond the last one, a rank might wait for a plan that nobody makes any more.
        """
        config = self.config
        loader = StepLoader(
            self.inputs.train_data,
            config.packing,
            packs_per_step=config.train.packs_per_step,
            micro_packs=config.train.micro_packs,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
            seed=config.train.seed,
            lookahead=config.data.lookahead,
            cursor=cursor,
        )
        steps = PlannedSteps(islice(loader, count), self._exchange("train"), config.data.lookahead, self.position)
        return loader, steps

    def first_step(self) -> PlannedStep:
        """The first step alone, for who doesn't train."""
        loader, steps = self.steps(1)
        try:
            return next(steps)
        finally:
            steps.close()
            loader.close()

    def update(self, step: PlannedStep) -> dict:
        """One optimizer update outside of `train`; returns the step's figures. Collective over the job."""
        self.guard = self._guard(step.batch.step - 1)
        return self._update(step, (0.0, 0.0))

    def leaks(self, step: PlannedStep) -> list[LeakReport]:
        """Look for leaks in a step's batch: a report of every SP group, on all ranks. Collective, and at most once."""
        module = self.engine.deepspeed.module
        return check_leak(step, self.inputs.model, self.mesh, self._exchange("leak"), module, self._looked_at)

    def _check_leak(self, step: PlannedStep) -> None:
        reports = self.leaks(step)
        for report in reports:
            report.check()
        if dist.get_rank() == 0:
            remark(str(reports[0]))

    def _guard(self, step: int) -> Guard:
        return Guard(self.config, self.inputs.model, self.engine, self.attention.module, self._looked_at, step)

    def _saves(self, step: int) -> bool:
        """Tell whether a checkpoint of this step is due: every so many, at the end, and wherever a signal stops.

        A run that goes on from a checkpoint saves its last step whatever is set: what it adds would be lost else.
        """
        train = self.config.train
        if self.figures.stopped_by is not None or (train.save_every and step % train.save_every == 0):
            return True
        return step >= train.steps and self._saves_at_end

    @property
    def _saves_at_end(self) -> bool:
        return self.config.train.save_every > 0 or self.inputs.checkpoint is not None

    def _exchange(self, use: str) -> Exchange:
        return self.attention.exchange(use)

    def _step(self, step: PlannedStep, waits: tuple[float, float], profile: Profile) -> dict:
        """One step and the evaluation that is due after it; returns the step's figures."""
        number, train = step.batch.step, self.config.train
        profile.begin(number)
        figures = self._update(step, waits)
        profile.end(number, step.plans)
        self.position.phase(Phase.EVALUATE)
        if self.evaluation is not None and (number % train.eval_every == 0 or number >= train.steps):
            figures["eval_loss"] = self.evaluation.loss()
        return figures

    def _update(self, step: PlannedStep, waits: tuple[float, float]) -> dict:
        """One optimizer update; returns the step's figures."""
        begin, sent = time.perf_counter(), self.engine.weight_bytes
        batch, config = step.batch, self.config
        self.position.phase(Phase.AGREE, batch.step)
        self.position.micro(0)
        check_step(batch, step.plans, self.mesh, self.engine.device)
        rate = learning_rate(config.optim, batch.step, config.train.steps)
        for group in self.engine.deepspeed.optimizer.param_groups:
            group["lr"] = rate
        # Gradients are averaged and divided by accumulation; the loss is a mean over all targets.
        scale = self.engine.num_averaged * config.accumulation / max(batch.global_num_targets, 1)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        for i, (micro, plan) in enumerate(zip(batch.micro_batches, step.plans)):
            if self.session.recorder is not None:
                self.session.recorder.micro = i
            self.position.micro(i)
            self.position.phase(Phase.FORWARD)
            loss = self._loss(micro, plan)
            loss_sum += loss.detach()
            self.engine.backward(loss * scale)
        # From here on all ranks know the same, so that they all make the update, or none does.
        self.position.phase(Phase.JUDGE)
        sums = self.figures.add_up(step, loss_sum, self.engine.square(), self.engine.weight_bytes - sent)
        trouble = self.guard.check(step, sums.loss, sums.grad_norm, scale)
        if trouble is not None and trouble.action == "skip":
            self.engine.leave_out(sums.grad_norm)
        else:
            self.engine.update(sums.grad_norm)
        self.engine.wait()  # so that the clock is read after the work
        own = Spent(*waits, time.perf_counter() - begin)
        self.position.phase(Phase.FIGURES)
        figures = self.figures.of(step, sums, own, rate, self.stop_request.asked_by)
        if config.check.error_budget is not None:
            figures["wire_dtype"] = config.wire_dtype
        return figures | self.guard.figures(trouble)

    def _check_alike(self) -> None:
        """Check that all ranks of the job were started alike and have the same weights. Collective over the job."""
        facts = {f"content of {name}": value for name, value in self.inputs.identity.items()}
        check_job(settings_of(self.config) | facts | versions(), self.engine.device)
        for parameters, group in self.engine.alike():
            check_weights(parameters, group, self.engine.device)

    def _looked_at(self, micro: MicroBatch, plan: Planned, call: Callable[..., Tensor], **options) -> Tensor:
        """The loss once more, outside of the step: a profile has recorded it already."""
        self.session.recorder = None
        return self._loss(micro, plan, call, **options)

    def _loss(self, micro: MicroBatch, plan: Planned, call: Callable[..., Tensor] | None = None, **options) -> Tensor:
        """Sum of the token losses of this rank's rows of a micro-batch. Only these rows come to the device.

        call: what the model is called by, None: DeepSpeed's engine; options: more of its arguments.
        """
        rows = positions(plan.rank_spans(self.mesh.sp_rank))
        num_rows = self.capacity.padded(len(rows)) if self.config.train.pad_rows else len(rows)
        self.attention.load(plan, num_rows)
        padding, upload = (0, num_rows - len(rows)), Upload(self.engine.device)
        fields = [
            upload.put(np.pad(field[rows], padding, constant_values=value))
            for field, value in ((micro.tokens, 0), (micro.positions, 0), (micro.labels, NO_TARGET))
        ]
        upload.flush()
        tokens, places, targets = (field.long() for field in fields)
        return (call or self.engine.deepspeed)(tokens, places, self.attention.module, targets, **options)
