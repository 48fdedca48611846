"""Kernels beside the dense float64 attention that `hsap doctor` has too, and random work."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import strategies as st

from hsap.doctor.oracle import (  # noqa: F401
    BOUNDS,
    LSE_DTYPE,
    SCALE,
    accumulator_dtype,
    num_heads,
    oracle,
    relative_rmse,
    run_backward,
    run_forward,
    tensors,
    visible,
)
from hsap.ir import slice as sl
from hsap.runtime.kernels import HeadRun, Work

RUNS = (
    (HeadRun(0, 1, 0, 1),),
    (HeadRun(0, 4, 0, 2),),
    (HeadRun(0, 3, 0, 3),),
    (HeadRun(0, 6, 0, 2), HeadRun(6, 1, 1, 1)),
    (HeadRun(3, 2, 0, 2), HeadRun(0, 3, 1, 1), HeadRun(5, 4, 0, 2)),
)


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
