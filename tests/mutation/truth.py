"""Truth: a plan run by the reference runtime on memory full of NaN, against float64 attention written out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hsap.ir.plan import Plan
from hsap.ir.problem import arena_capacity
from hsap.runtime.memory import TORCH_DTYPES
from hsap.runtime.reference import reference
from tests.runtime.oracle import attention, tensors

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Largest difference of an element allowed where partial results travel in a format; values are about one."""
STUCK = (RuntimeError, IndexError, ValueError, KeyError, TypeError, AssertionError, OverflowError)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill every tensor that is made without values with NaN meanwhile."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    # The public function imports torch's compiler, which takes seconds.
    torch._C._set_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def untrue(plan: Plan, base: Plan | None = None) -> str | None:
    """Say where the reference runtime's answer isn't that of attention, or why it has none; None if it is right.

    base: a plan known to be right, of the same problem and placement; masks that are the same in both aren't run.
    """
    heads = plan.problem.heads
    tolerance = max(TOLERANCE[heads.dtype], TOLERANCE[plan.problem.wire_dtype or heads.dtype])
    drawn = tensors(plan.problem, TORCH_DTYPES[heads.dtype])
    if not plan.problem.layout.lengths:
        return None
    for mask in range(len(plan.problem.masks)):
        if base is not None and plan.programs[mask] is base.programs[mask] and plan.slices[mask] is base.slices[mask]:
            continue
        try:
            with poisoned():
                found = reference(plan, *drawn, mask=mask)
        except STUCK as error:
            return f"mask {mask}: {error!r}"
        for name, have, want in zip(("o", "lse", "dq", "dk", "dv"), found, attention(plan.problem, *drawn, mask)):
            if not torch.allclose(have.double(), want, rtol=tolerance, atol=tolerance):
                return f"mask {mask}: wrong {name}"
    return None


def beyond_limits(plan: Plan) -> str | None:
    """Say which of the limits that the problem sets isn't kept."""
    problem, most = plan.problem, int(plan.tokens_per_rank.max(initial=0))
    if problem.max_tokens_per_rank is not None and most > problem.max_tokens_per_rank:
        return f"{most} tokens on a rank"
    used = int(plan.arena_bytes().max(initial=0))
    sizes = [int(programs.buffers.num_bytes.sum()) for pair in plan.programs for programs in pair]
    room = max(sizes, default=0) + 256 * sum(len(p.buffers) for pair in plan.programs for p in pair)
    if problem.arena_multiple is not None:
        room = arena_capacity(problem, most)
    return f"{used} bytes of arena, of {room}" if used > room else None
