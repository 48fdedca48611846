"""Alone: a step in one process: the whole model, one pack after the other, plain PyTorch and no DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from hsap.checks.difference import Outcome
from hsap.data.loader import StepLoader
from hsap.ir.mask import distinct_masks
from hsap.runtime.attention import PlannedAttention
from hsap.runtime.executor import Session
from hsap.runtime.memory import TORCH_DTYPES
from hsap.train.attention import kernel_options, planning_setup
from hsap.train.config import TrainConfig
from hsap.train.groups import PlannerConfig
from hsap.train.inputs import Inputs
from hsap.train.weights import whole_model


def alone(config: TrainConfig, inputs: Inputs, device: torch.device, group: dist.ProcessGroup) -> Outcome:
    """Run the first step of a configuration in this process alone. group: of this process and no other.

    Loss and gradients are those of the mean over all targets of the step; gradients add up in float32.
    """
    config = replace(config, topology="1x1", parallel="sp", tsp_axis="all", world_size=1, dp=1,
                     planner=PlannerConfig("sap", {}))  # fmt: skip
    dtype = TORCH_DTYPES[config.engine.dtype]
    model = whole_model(config, inputs.model, device)
    session = Session(group, config.kernel, device, dtype, **kernel_options(config))
    attention = PlannedAttention(distinct_masks(inputs.model.layer_masks)[1])
    setup = planning_setup(config, inputs.model, dp_rank=0)
    gradients = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    total = 0.0
    with StepLoader(
        inputs.train_data,
        config.packing,
        packs_per_step=config.train.packs_per_step,
        seed=config.train.seed,
        lookahead=1,
    ) as loader:
        batch = next(loader)
    for micro in batch.micro_batches:
        attention.load(session.load(setup.plan(micro)))
        fields = (torch.from_numpy(field).long().to(device) for field in (micro.tokens, micro.positions, micro.labels))
        tokens, places, targets = fields
        loss = model(tokens, places, attention, targets) / max(batch.global_num_targets, 1)
        loss.backward()
        total += float(loss.detach())
        for name, grad in _taken(model):
            gradients[name] += grad
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in gradients.values()))
    return Outcome(total, norm, gradients)


def _taken(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Gradients by name, in float32 on the CPU; the model has none afterwards."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad.float().cpu()
            parameter.grad = None
