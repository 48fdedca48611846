"""Gradients: those of a step, whole and by name, before the optimizer uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hsap.gathering import gather_tensors
from hsap.models.tsp.decoder import ShardedLlama
from hsap.train.engine import Engine
from hsap.train.tsp.sharding import Sharding


def full_grad(parameter: Any) -> torch.Tensor:
    """Give the whole gradient of a parameter, however ZeRO has partitioned it: float32 on the CPU. Collective."""
    from deepspeed.utils import safe_get_full_grad

    grad = safe_get_full_grad(parameter)
    grad = parameter.grad if grad is None else grad
    return grad.detach().float().cpu().clone()


def whole_grads(model: nn.Module, sharding: Sharding | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Give those of all parameters by name, put together from all shards where a rank has a part. Collective."""
    for name, parameter in model.named_parameters():
        mine = full_grad(parameter)
        if sharding is None:
            yield name, mine
            continue
        assert isinstance(model, ShardedLlama)
        whole = torch.full(model.parts[name].whole, torch.nan)
        for index, grad in enumerate(gather_tensors(mine.flatten(), sharding.shards)):
            part = model.part(name, index)
            part.take(whole).copy_(grad.view(part.shape))
        yield name, whole


def tell_gradients(engine: Engine, told: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Have a function called once with all gradients by name, as the first update finds them; on every rank."""
    deepspeed = engine.deepspeed
    update = deepspeed.step

    def step() -> None:
        if deepspeed.is_gradient_accumulation_boundary():
            told(dict(whole_grads(deepspeed.module, engine.sharding)))
            deepspeed.step = update
        update()

    deepspeed.step = step
