"""Run: the training loop of one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hsap.data.loader import StepLoader
from hsap.leak.report import LeakReport
from hsap.planning.planned import Exchange
from hsap.planning.steps import PlannedStep, PlannedSteps
from hsap.position import Phase
from hsap.train.agreement import check_job, check_weights
from hsap.train.budget import keep_budget
from hsap.train.checkpoints.saver import Saver, load
from hsap.train.config import TrainConfig
from hsap.train.engine import Engine, build, join, leave, own_device
from hsap.train.evaluation import Evaluation
from hsap.train.facts import settings_of, versions
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
from hsap.train.updates import Updates


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
        engine = build(config, inputs.model, mesh, watch.position)
        trainer = Trainer(config, inputs, engine)
        if settings is not None and dist.get_rank() == 0:
            keep(Path(config.out), settings(changed))
            mark(config.out, os.environ)
        with trainer.stop_request, watch.explaining():
            with trainer:
                trainer.train()
            leave(engine)


class Trainer:
    """One rank's loop over planned steps. To be entered: it has processes that end with it."""

    def __init__(self, config: TrainConfig, inputs: Inputs, engine: Engine) -> None:
        self.config, self.inputs, self.engine, self.position = config, inputs, engine, engine.position
        self.mesh = engine.mesh
        self.stop_request = StopRequest()
        self.updates = Updates(config, inputs, engine, self.stop_request)
        self.evaluation: Evaluation | None = None
        if inputs.eval_data is not None:
            exchange = partial(self._exchange, "eval")
            self.evaluation = Evaluation(config, inputs.eval_data, engine, exchange, self.updates.loss)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.updates.close()

    def train(self) -> None:
        """Train to the last step, evaluating and saving on the way."""
        config = self.config
        state: dict[str, Any] = {"step": 0, "cursor": None}
        if self.inputs.checkpoint is not None:
            state = self.inputs.checkpoint
            load(self.engine, config, state)
        self._check_alike()
        saver = Saver(config, self.inputs.identity, self.position)
        log, out = None, Path(config.out)
        session, dp_rank = self.updates.session, self.mesh.dp_rank
        profile = Profile(config.profile, out, session, dist.get_rank(), dp_rank, state["step"])
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
                if self.stop_request.agreed is not None:
                    break
                self.position.phase(Phase.DATA)
            saver.wait()
            self.position.phase(Phase.END)
        finally:
            steps.close()
            loader.close()
            if log is not None:
                log.close()
        if self.stop_request.agreed is not None and dist.get_rank() == 0:
            told = f"stopped after step {step.batch.step}, which is saved; resume=true out={config.out} goes on"
            print(f"hsap: {self.stop_request.agreed.name}: {told}", file=sys.stderr, flush=True)

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

    def leaks(self, step: PlannedStep) -> list[LeakReport]:
        """Look for leaks in a step's batch: a report of every SP group, on all ranks. Collective, and at most once."""
        module, loss = self.engine.deepspeed.module, self.updates.loss_unrecorded
        return check_leak(step, self.inputs.model, self.mesh, self._exchange("leak"), module, loss)

    def _check_leak(self, step: PlannedStep) -> None:
        reports = self.leaks(step)
        for report in reports:
            report.check()
        if dist.get_rank() == 0:
            remark(str(reports[0]))

    def _saves(self, step: int) -> bool:
        """Tell whether a checkpoint of this step is due: every so many, at the end, and wherever a signal stops.

        A run that goes on from a checkpoint saves its last step whatever is set: what it adds would be lost else.
        """
        train = self.config.train
        if self.stop_request.agreed is not None or (train.save_every and step % train.save_every == 0):
            return True
        return step >= train.steps and self._saves_at_end

    @property
    def _saves_at_end(self) -> bool:
        return self.config.train.save_every > 0 or self.inputs.checkpoint is not None

    def _exchange(self, use: str) -> Exchange:
        return self.updates.exchange(use)

    def _step(self, step: PlannedStep, waits: tuple[float, float], profile: Profile) -> dict:
        """One step and the evaluation that is due after it; returns the step's figures."""
        number, train = step.batch.step, self.config.train
        profile.begin(number)
        figures = self.updates.make(step, waits)
        profile.end(number, step.plans)
        self.position.phase(Phase.EVALUATE)
        if self.evaluation is not None and (number % train.eval_every == 0 or number >= train.steps):
            figures["eval_loss"] = self.evaluation.loss()
        return figures

    def _check_alike(self) -> None:
        """Check that all ranks of the job were started alike and have the same weights. Collective over the job."""
        facts = {f"content of {name}": value for name, value in self.inputs.identity.items()}
        check_job(settings_of(self.config) | facts | versions(), self.engine.device)
        for parameters, group in self.engine.alike():
            check_weights(parameters, group, self.engine.device)
