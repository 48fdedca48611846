"""Truth: a plan run by the reference runtime on memory full of NaN, against float64 attention written out."""

from __future__ import annotations

import torch

from hsap.ir.plan import Plan
from hsap.ir.problem import arena_capacity
from hsap.ir.slice import dense
from hsap.runtime.memory import TORCH_DTYPES
from hsap.runtime.reference import reference

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Largest difference of an element allowed where partial results travel in a format; values are about one."""
STUCK = (RuntimeError, IndexError, ValueError, KeyError, TypeError, AssertionError, OverflowError)


def attention(plan: Plan, mask: int, q, k, v, do) -> tuple[torch.Tensor, ...]:
    """Compute (o, lse, dq, dk, dv) of a problem's mask in float64, every pair at once."""
    q, k, v = (t.double().clone().requires_grad_() for t in (q, k, v))
    visible = torch.from_numpy(dense(plan.problem.slices(mask), len(q)) > 0)
    group = plan.problem.heads.group
    keys, values = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) / plan.problem.heads.head_dim**0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=2)
    seen = visible.any(dim=1)
    weights = torch.where(visible, torch.exp(scores - torch.where(seen, lse, 0.0)[:, :, None]), 0.0)
    o = torch.einsum("hqk,khd->qhd", weights, values)
    grads = torch.autograd.grad(o, (q, k, v), do.double())
    return o.detach(), lse.detach(), *grads


def inputs(plan: Plan, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Draw q, k, v and the gradient of o in the plan's dtype."""
    heads, tokens = plan.problem.heads, plan.problem.layout.num_tokens
    generator = torch.Generator().manual_seed(seed)
    counts = (heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_q_heads)
    drawn = (torch.randn(tokens, n, heads.head_dim, generator=generator, dtype=torch.float64) for n in counts)
    return tuple(t.to(TORCH_DTYPES[heads.dtype]) for t in drawn)


class poisoned:
    """Every tensor that is made without values is full of NaN meanwhile."""

    def __enter__(self) -> None:
        self.before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *_) -> None:
        torch.use_deterministic_algorithms(self.before[0])
        torch.utils.deterministic.fill_uninitialized_memory = self.before[1]


def untrue(plan: Plan, base: Plan | None = None) -> str | None:
    """Say where the reference runtime's answer isn't that of attention, or why it has none; None if it is right.

    base: a plan known to be right, of the same problem and placement, whose masks needn't be run where they are the same.
    """
    heads = plan.problem.heads
    tolerance = max(TOLERANCE[heads.dtype], TOLERANCE[plan.problem.wire_dtype or heads.dtype])
    drawn = inputs(plan)
    for mask in range(len(plan.problem.masks)):
        if base is not None and plan.programs[mask] is base.programs[mask] and plan.slices[mask] is base.slices[mask]:
            continue
        try:
            with poisoned():
                found = reference(plan, *drawn, mask=mask)
        except STUCK as error:
            return f"mask {mask}: {error!r}"
        for name, have, want in zip(("o", "lse", "dq", "dk", "dv"), found, attention(plan, mask, *drawn)):
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
