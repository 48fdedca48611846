"""Updates: what one rank does of an optimizer update: loss and gradient of its rows, judged, and then the weights."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hsap.data.batch import MicroBatch
from hsap.ir.span import positions
from hsap.planning.planned import Planned
from hsap.planning.steps import PlannedStep
from hsap.position import Phase
from hsap.runtime.upload import Upload
from hsap.targets import NO_TARGET
from hsap.train.agreement import check_step
from hsap.train.attention import Attention
from hsap.train.capacity import Capacity
from hsap.train.config import TrainConfig
from hsap.train.engine import Engine, learning_rate
from hsap.train.figures import Spent, StepFigures
from hsap.train.guard.guard import Guard
from hsap.train.inputs import Inputs
from hsap.train.stopping import StopRequest


class Updates:
    """One rank's part of a run's updates. Made collectively over the job, to be closed in the end.

    stop_request: of this rank; with an update all know of it.
    """

    def __init__(self, config: TrainConfig, inputs: Inputs, engine: Engine, stop_request: StopRequest) -> None:
        self.stop_request = stop_request
        self.config, self.inputs, self.engine, self.position = config, inputs, engine, engine.position
        self.mesh = engine.mesh
        self.capacity = Capacity.of(config.packing, config.train.micro_packs, self.mesh.topology.num_ranks)
        self.attention = Attention(config, inputs.model, self.mesh, engine.device, self.capacity.even, engine.position)
        self.session = self.attention.session
        self.exchange = self.attention.exchange
        self.figures = StepFigures(inputs.model, engine, config.cluster.flops_per_s)
        resumed_step = 0 if inputs.checkpoint is None else inputs.checkpoint["step"]
        self.guard = Guard(config, inputs.model, engine, self.attention.module, self.loss_unrecorded, resumed_step)

    def close(self) -> None:
        """End the processes that plan."""
        self.attention.close()

    def make(self, step: PlannedStep, waits: tuple[float, float] = (0.0, 0.0)) -> dict:
        """Make one update, unless the guard leaves it out; returns the step's figures. Collective over the job.

        waits: seconds that the rank has waited for data and for plans.
        """
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
            loss = self.loss(micro, plan)
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
        figures = self.figures.of(step, sums, own, rate, self.stop_request)
        if config.check.error_budget is not None:
            figures["wire_dtype"] = config.wire_dtype
        return figures | self.guard.figures(trouble)

    def loss(self, micro: MicroBatch, plan: Planned, call: Callable[..., Tensor] | None = None, **options) -> Tensor:
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

    def loss_unrecorded(self, micro: MicroBatch, plan: Planned, call: Callable[..., Tensor], **options) -> Tensor:
        """The loss once more, outside of the step: a profile has recorded it already."""
        self.session.recorder = None
        return self.loss(micro, plan, call, **options)
