"""A step's gradient before its update: where each of DeepSpeed's optimizers has it, and how the update is left out.

DeepSpeed itself is no guard: with a gradient that isn't finite ZeRO 0 in bf16, ZeRO 1 and ZeRO 3 leave the update out
and say nothing, and ZeRO 0 in fp32 and ZeRO 2 in bf16 make it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def pieces(engine) -> Iterator[tuple[str, Tensor]]:
    """Give what this rank is to count of the step's averaged gradient, by parameter: each element is one rank's.

    engine: DeepSpeed's, after the backward of the last micro-step.
    """
    optimizer = engine.optimizer
    parameters = dict(engine.module.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    # Under TSP: another rank has the same part, or DeepSpeed's data-parallel group holds one shard.
    counted = {name for name, p in parameters.items() if not getattr(p, "ds_pipe_replicated", False)}
    if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):  # ZeRO 1 in bf16
        for name, parameter in parameters.items():
            if (mapping := parameter._hp_mapping) is not None and name in counted:
                place = mapping.hp_fragment_address
                flat = optimizer.fp32_groups_gradient_flat_partition[mapping.param_group_index]
                yield name, flat.narrow(0, place.start, place.numel)
    elif hasattr(optimizer, "averaged_gradients"):  # ZeRO 1 to 3
        groups = optimizer.fp16_groups if hasattr(optimizer, "fp32_partitioned_groups_flat") else None
        groups = optimizer.params_in_partition if groups is None else groups
        for i, group in enumerate(groups):
            # Behind a partition's own there may be padding.
            for parameter, gradient in zip(group, optimizer.averaged_gradients[i] or ()):
                if (name := names[id(parameter)]) in counted:
                    yield name, gradient
    else:  # ZeRO 0: averaged where they were made, the same on all ranks
        alike = None if engine.mpu is None else engine.mpu.get_data_parallel_group()
        if dist.get_rank(alike) == 0:
            yield from ((name, p.grad) for name, p in parameters.items() if p.grad is not None and name in counted)


def square(engine, device: torch.device) -> Tensor:
    """Sum of this rank's squares of the gradient, a float64 scalar; over all ranks, the norm's square.

    In float64, as DeepSpeed does it: a float32 sum over an embedding is wrong in the fifth digit, and its squares
    overflow long before the gradient does.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for _, gradient in pieces(engine)]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def non_finite(engine) -> dict[str, int]:
    """Count the elements of the gradient that aren't finite, by parameter; parameters without any are left out."""
    counts: dict[str, int] = {}
    for name, gradient in pieces(engine):
        if number := int((~torch.isfinite(gradient)).sum()):
            counts[name] = counts.get(name, 0) + number
    return counts


def leave_out(engine) -> None:
    """End the step without its update: weights, moments and counters stay as they are, bit for bit. Collective.

    DeepSpeed's own step runs, because each of its optimizers knows best what to tidy up, with torch's underneath idle:
    weights are then made of the same masters as before.
    """
    optimizer = engine.optimizer
    before = {name: getattr(engine, name) for name in _COUNTERS}
    with _idle(optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer):
        engine.step()
    for name, value in before.items():
        setattr(engine, name, value)


@contextmanager
def _idle(optimizer: Any) -> Iterator[None]:
    own = vars(optimizer).get("step")
    setattr(optimizer, "step", lambda *arguments, **options: None)  # noqa: B010  (a method, to mypy)
    try:
        yield
    finally:
        if own is None:
            del optimizer.step
        else:
            setattr(optimizer, "step", own)  # noqa: B010
