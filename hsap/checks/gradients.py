"""Gradients: those of a step, whole and by name, before the optimizer uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hsap.train.engine import Engine
from hsap.train.tsp.sharding import Sharding


def full_grad(parameter: Any) -> torch.Tensor:
    """Give the whole gradient of a parameter, however ZeRO has partitioned it: float32 on the CPU. Collective."""
    from deepspeed.utils import safe_get_full_grad

    grad = safe_get_full_grad(parameter)
    grad = parameter.grad if grad is None else grad
    return grad.detach().float().cpu().clone()


def whole_grad(parameter: Any, sharding: Sharding | None) -> torch.Tensor:
    """Give that of a parameter that may be a part of the model's, put together from all shards. Collective."""
    mine = full_grad(parameter)
    if sharding is None:
        return mine
    parts: list[Any] = [None] * sharding.transport.degree
    dist.all_gather_object(parts, (parameter.part, mine), group=sharding.shards)
    whole = torch.full(parameter.part.whole, torch.nan)
    for part, grad in parts:
        part.take(whole).copy_(grad)
    return whole


def tell_gradients(engine: Engine, told: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Have a function called once with all gradients by name, as the first update finds them; on every rank."""
    deepspeed = engine.deepspeed
    update = deepspeed.step

    def step() -> None:
        if deepspeed.is_gradient_accumulation_boundary():
            told({name: whole_grad(p, engine.sharding) for name, p in deepspeed.module.named_parameters()})
            deepspeed.step = update
        update()

    deepspeed.step = step
