"""Accuracy: attention by its definition, dense and in float64, which everything else is measured against.

Memory and time grow with the square of a document's length: a few thousand tokens at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hsap.ir import slice as sl
from hsap.ir.mask import Mask
from hsap.ir.problem import Problem


def exact_attention(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor, mask: int = 0
) -> tuple[Tensor, ...]:
    """Give (o [T, H, D], lse [H, T], dq, dk, dv) of packed tensors in float64.

    q, grad_o: [T, H, D]; k, v: [T, KV heads, D], in token-position order. mask: index into the problem's masks. Rows
    without a key have o = 0, lse = -inf. Document by document, as nothing is visible between documents.
    """
    q, k, v, grad_o = (t.double() for t in (q, k, v, grad_o))
    parts = []
    for document, length in enumerate(problem.layout.lengths):
        start = int(problem.layout.cu_seqlens[document])
        rows = slice(start, start + length)
        masks = problem.masks[mask][0]
        own = masks if isinstance(masks, Mask) else masks[document]
        visible = torch.from_numpy(sl.dense(own.slices(length), length) > 0)
        parts.append(_document(problem, visible, q[rows], k[rows], v[rows], grad_o[rows]))
    if not parts:
        return q, q.new_empty(q.shape[1], 0), q, k, v
    return tuple(torch.cat(part, dim=-1 if i == 1 else 0) for i, part in enumerate(zip(*parts)))


def _document(problem: Problem, visible: Tensor, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    group = problem.heads.group
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * problem.heads.head_dim**-0.5
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(visible, torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]), 0.0)
    o = torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1))
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)


def random_inputs(problem: Problem, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make random q, k, v and gradient of o for a problem: standard normal, rounded to dtype, packed, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    heads, num_tokens = problem.heads, problem.layout.num_tokens
    counts = (heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_q_heads)
    q, k, v, grad_o = (torch.randn(num_tokens, c, heads.head_dim, generator=generator).to(dtype) for c in counts)
    return q, k, v, grad_o


def rmse(got: Tensor, want: Tensor) -> float:
    """Give the root of the mean squared error; 0 of nothing."""
    return float((got.double() - want).square().mean().sqrt()) if got.numel() else 0.0
