"""Oracle: attention in float64 through torch's autograd, independent of every kernel, and how far one may be off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hsap.ir import slice as sl
from hsap.ir.heads import HeadRun
from hsap.ir.precision import Precision
from hsap.runtime.kernels import Kernel, Work, reset
from hsap.runtime.kernels.delta import row_delta
from hsap.runtime.memory import DTYPE_NAMES, TORCH_DTYPES

SCALE = 0.3
LSE_DTYPE = torch.float64
BOUNDS = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (2e-6, 5e-6),
    torch.bfloat16: (8e-3, 2e-2),
    torch.float16: (1e-3, 3e-3),
}
"""Bounds on the relative RMSE of what a kernel gives, forward and backward, by the dtype of its inputs."""


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype in which a plan for inputs of `dtype` accumulates."""
    return TORCH_DTYPES[Precision.of(DTYPE_NAMES[dtype]).acc]


def num_heads(heads: Sequence[HeadRun]) -> tuple[int, int]:
    """Count the query heads and the KV heads that head runs reach."""
    return max(run.q.stop for run in heads), max(run.kv.stop for run in heads)


def visible(table: np.ndarray, num_q: int, num_k: int) -> np.ndarray:
    """Give the visible pairs as bool [num_q, num_k]; slices must be disjoint."""
    count = sl.dense(table, max(num_q, num_k, 1))[:num_q, :num_k]
    assert count.max(initial=0) <= 1
    return count > 0


def oracle(
    table: np.ndarray, heads: Sequence[HeadRun], q: Tensor, kv: Tensor, do: Tensor, scale: float = SCALE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attend over all slices at once in float64: (o, lse, dq, dkv); rows without keys are zeros and -inf."""
    q, kv = (x.detach().double().requires_grad_() for x in (q, kv))
    seen = torch.from_numpy(visible(table, len(q), len(kv)))
    outs, lses = torch.zeros_like(q).detach(), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for run in heads:
        group = run.q_count // run.kv_count
        for i in range(run.q_count):
            head, kv_head = run.q_first + i, run.kv_first + i // group
            score = (q[:, head] @ kv[:, 0, kv_head].T * scale).masked_fill(~seen, -torch.inf)
            some = seen.any(1)
            weight = torch.zeros_like(score).masked_scatter(some[:, None].expand_as(score), score[some].softmax(-1))
            out = weight @ kv[:, 1, kv_head]
            outs[:, head] = out.detach()
            lses[:, head] = score.detach().logsumexp(-1)
            total = total + (out * do[:, head].double()).sum()
    dq, dkv = torch.autograd.grad(total, (q, kv))
    return outs, lses, dq, dkv


def tensors(
    num_q: int, num_k: int, heads: Sequence[HeadRun], dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, kv and do that are views into larger storage, as the arena's slots are."""
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = num_heads(heads)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q = make(num_q + 3, num_q_heads + 1, dim)[2 : num_q + 2, 1:]
    kv = make(num_k + 2, 2, num_kv_heads + 2, dim)[1 : num_k + 1, :, :-2]
    do = make(num_q, num_q_heads, dim)
    return q, kv, do


def run_forward(
    kernel: Kernel, works: Sequence[Work], q: Tensor, kv: Tensor, scale: float = SCALE
) -> tuple[Tensor, Tensor]:
    """Fold several works into one fresh accumulator: (o, lse)."""
    acc = accumulator_dtype(q.dtype)
    o = torch.empty(q.shape, dtype=acc, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=LSE_DTYPE, device=q.device)
    reset(o, lse)
    for work in works:
        kernel.attend(kernel.prepare(work, q.device), q, kv, o, lse, scale)
    return o, lse


def run_backward(
    kernel: Kernel,
    works: Sequence[Work],
    q: Tensor,
    kv: Tensor,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float = SCALE,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of several works, given the global o and lse: (dq, dkv)."""
    acc = accumulator_dtype(q.dtype)
    dq, dkv = (torch.zeros(x.shape, dtype=acc, device=q.device) for x in (q, kv))
    delta = row_delta(do, o)
    for work in works:
        kernel.attend_grad(kernel.prepare(work, q.device), q, kv, do, lse, delta, dq, dkv, scale)
    return dq, dkv


def relative_rmse(value: Tensor, truth: Tensor) -> float:
    """RMSE over the root mean square of the truth."""
    value, truth = value.double(), truth.double()
    return float((value - truth).square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(1e-30))
