"""Dense attention in float64 through torch autograd, and random work: independent of every kernel."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from hsap.ir import slice as sl
from hsap.ir.precision import Precision
from hsap.runtime.kernels import HeadRun, Work, reset
from hsap.runtime.kernels.delta import row_delta
from hsap.runtime.memory import DTYPE_NAMES, TORCH_DTYPES

SCALE = 0.3
LSE_DTYPE = torch.float64
RUNS = (
    (HeadRun(0, 1, 0, 1),),
    (HeadRun(0, 4, 0, 2),),
    (HeadRun(0, 3, 0, 3),),
    (HeadRun(0, 6, 0, 2), HeadRun(6, 1, 1, 1)),
    (HeadRun(3, 2, 0, 2), HeadRun(0, 3, 1, 1), HeadRun(5, 4, 0, 2)),
)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a plan for inputs of `dtype` accumulates."""
    return TORCH_DTYPES[Precision.of(DTYPE_NAMES[dtype]).acc]


def num_heads(heads) -> tuple[int, int]:
    return max(run.q.stop for run in heads), max(run.kv.stop for run in heads)


def visible(table, num_q: int, num_k: int) -> np.ndarray:
    """Visible pairs as bool [num_q, num_k]; asserts that slices are disjoint."""
    count = sl.dense(table, max(num_q, num_k, 1))[:num_q, :num_k]
    assert count.max(initial=0) <= 1
    return count > 0


def oracle(table, heads, q, kv, do, scale=SCALE):
    """(o, lse, dq, dkv) in float64 for all slices at once; rows without keys are zeros and -inf."""
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


def tensors(num_q, num_k, heads, dim, dtype, seed=0):
    """Random q, kv, do that are views into larger storage, as the arena's slots are."""
    generator = torch.Generator().manual_seed(seed)
    num_q_heads, num_kv_heads = num_heads(heads)

    def make(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q = make(num_q + 3, num_q_heads + 1, dim)[2 : num_q + 2, 1:]
    kv = make(num_k + 2, 2, num_kv_heads + 2, dim)[1 : num_k + 1, :, :-2]
    do = make(num_q, num_q_heads, dim)
    return q, kv, do


def run_forward(kernel, works, q, kv, scale=SCALE):
    """Fold several works into one fresh accumulator."""
    acc = accumulator_dtype(q.dtype)
    o = torch.empty(q.shape, dtype=acc, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=LSE_DTYPE, device=q.device)
    reset(o, lse)
    for work in works:
        kernel.attend(kernel.prepare(work, q.device), q, kv, o, lse, scale)
    return o, lse


def run_backward(kernel, works, q, kv, do, o, lse, scale=SCALE):
    """Add the gradients of several works, given the global o and lse."""
    acc = accumulator_dtype(q.dtype)
    dq, dkv = (torch.zeros(x.shape, dtype=acc, device=q.device) for x in (q, kv))
    delta = row_delta(do, o)
    for work in works:
        kernel.attend_grad(kernel.prepare(work, q.device), q, kv, do, lse, delta, dq, dkv, scale)
    return dq, dkv


def relative_rmse(value, truth) -> float:
    """RMSE over the root mean square of the truth."""
    value, truth = value.double(), truth.double()
    return float((value - truth).square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(1e-30))


# Forward and backward bounds on the relative RMSE.
BOUNDS = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (2e-6, 5e-6),
    torch.bfloat16: (8e-3, 2e-2),
    torch.float16: (1e-3, 3e-3),
}


def check_kernel(kernel, table, num_q, num_k, heads, dtype, *, dim=8, seed=0, works=None, device="cpu"):
    """Forward and backward of (possibly split) work against the oracle, with the kernel's own global lse."""
    inputs = tensors(num_q, num_k, heads, dim, dtype, seed)
    works = [Work(table, heads)] if works is None else works
    want_o, want_lse, want_dq, want_dkv = oracle(table, heads, *inputs)
    q, kv, do = (x.to(device) for x in inputs)
    o, lse = run_forward(kernel, works, q, kv)
    dq, dkv = run_backward(kernel, works, q, kv, do, o, lse)
    o, lse, dq, dkv = (x.cpu() for x in (o, lse, dq, dkv))
    forward, backward = BOUNDS[dtype]
    blind = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), blind)
    assert not o[blind].any() and not dq[blind].any()
    assert relative_rmse(o, want_o) <= forward
    assert torch.allclose(lse[~blind].double(), want_lse[~blind], rtol=forward, atol=forward)
    # Small sizes can have gradients that cancel to nearly nothing: compare with the larger of the two.
    size = max(float(want_dq.square().mean().sqrt()), float(want_dkv.square().mean().sqrt()))
    assert float((dq.double() - want_dq).square().mean().sqrt()) <= backward * size + 1e-300
    assert float((dkv.double() - want_dkv).square().mean().sqrt()) <= backward * size + 1e-300


@st.composite
def slice_tables(draw, max_rows=40, max_slices=5):
    """Disjoint canonical slices over at most max_rows rows on each side, of any kind: (table, num_q, num_k)."""
    num_q, num_k = draw(st.integers(1, max_rows)), draw(st.integers(1, max_rows))
    q_edges = sorted(draw(st.sets(st.integers(0, num_q), max_size=3)) | {0, num_q})
    k_edges = sorted(draw(st.sets(st.integers(0, num_k), max_size=3)) | {0, num_k})
    rows = []
    for q0, q1 in itertools.pairwise(q_edges):
        for k0, k1 in itertools.pairwise(k_edges):
            bound = st.one_of(st.none(), st.integers(k0 - q1, k1 - q0))
            lo, hi = draw(bound), draw(bound)
            if draw(st.booleans()):
                rows.append((q0, q1, k0, k1, -sl.UNBOUNDED if lo is None else lo, sl.UNBOUNDED if hi is None else hi))
    table = sl.canonical(sl.slices(rows))
    return table[draw(st.permutations(range(len(table))))] if len(table) else table, num_q, num_k


def make_table(rows) -> np.ndarray:
    """Make canonical slices from (q0, q1, k0, k1[, lo[, hi]])."""
    return sl.canonical(sl.slices(sl.Slice(*row) for row in rows))
