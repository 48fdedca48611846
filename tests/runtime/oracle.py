"""Attention by its definition, dense and in float64: the oracle of the runtime's tests."""

from __future__ import annotations

import torch
from torch import Tensor

from hsap.ir import slice as sl
from hsap.ir.problem import Problem


def attention(problem: Problem, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor, mask: int = 0) -> tuple[Tensor, ...]:
    """(o [T, H, D], lse [H, T], dq, dk, dv) of packed tensors in float64; rows without a key have o = 0, lse = -inf."""
    q, k, v = (t.double().detach().requires_grad_() for t in (q, k, v))
    visible = torch.from_numpy(sl.dense(problem.slices(mask), problem.layout.num_tokens) > 0)
    group = problem.heads.group
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * problem.heads.head_dim**-0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(visible, torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]), 0.0)
    o = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1))
    o.backward(grad_o.double())
    return o.detach(), lse.detach(), q.grad, k.grad, v.grad


def tensors(problem: Problem, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random q, k, v and gradient of o for a problem."""
    generator = torch.Generator().manual_seed(seed)
    heads, num_tokens = problem.heads, problem.layout.num_tokens
    counts = (heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_q_heads)
    q, k, v, grad_o = (torch.randn(num_tokens, c, heads.head_dim, generator=generator).to(dtype) for c in counts)
    return q, k, v, grad_o


def rmse(got: Tensor, want: Tensor) -> float:
    """Root of the mean squared error."""
    return float((got.double() - want).square().mean().sqrt())
