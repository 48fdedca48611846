"""Splitting costs no accuracy: errors against float64, split over many Attends and not, in the same kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_oracle import make_table, oracle, relative_rmse, run_backward, run_forward, tensors

from hsap.ir import slice as sl
from hsap.runtime.kernels import HeadRun, Work
from hsap.runtime.kernels.cpu_flash import CpuFlashKernel

NUM_TOKENS = 640
HEADS = (HeadRun(0, 4, 0, 2),)
SCALE = 0.125
MASKS = {
    "causal": [(0, NUM_TOKENS, 0, NUM_TOKENS, -sl.UNBOUNDED, 0)],
    "full": [(0, NUM_TOKENS, 0, NUM_TOKENS)],
    "documents": [(a, b, a, b, -sl.UNBOUNDED, 0) for a, b in ((0, 50), (50, 410), (410, 411), (411, NUM_TOKENS))],
}


def errors(kernel, works, inputs, truth, dtype):
    """Relative RMSE of o, dq, dk, dv after they were rounded to dtype."""
    q, kv, do = inputs
    o, lse = run_forward(kernel, works, q, kv, SCALE)
    dq, dkv = run_backward(kernel, works, q, kv, do, o, lse, SCALE)
    got = (o, dq, dkv[:, 0], dkv[:, 1])
    want = (truth[0], truth[2], truth[3][:, 0], truth[3][:, 1])
    return np.array([relative_rmse(x.to(dtype), y) for x, y in zip(got, want)])


@pytest.mark.parametrize("mask", MASKS)
# Native half-precision output is judged as accumulated: rounding the sum once more costs up to a factor of sqrt(2).
# Float32 output doesn't pay that, so it's judged as the model gets it.
@pytest.mark.parametrize(
    ("dtype", "float32_output", "judged", "bar"),
    [
        # Halves are merged by log-sum-exps that are rounded, which shows where the kernel's own error is small.
        (torch.float32, False, torch.float64, 1.2),
        (torch.bfloat16, False, torch.float32, 1.2),
        (torch.bfloat16, True, torch.bfloat16, 1.1),
    ],
    ids=["fp32", "bf16", "bf16 with float32 output"],
)
def test_error_of_split_attention_stays_within_the_bar(mask, dtype, float32_output, judged, bar):
    kernel = CpuFlashKernel(float32_output)
    table = make_table(MASKS[mask])
    inputs = tensors(NUM_TOKENS, NUM_TOKENS, HEADS, 64, dtype, seed=1)
    truth = oracle(table, HEADS, *inputs, SCALE)
    whole = errors(kernel, [Work(table, HEADS)], inputs, truth, judged)
    for degree in (2, 8):
        edges = np.linspace(0, NUM_TOKENS, degree + 1).astype(np.int64)
        grid = np.stack([edges[:-1], edges[1:]], axis=1)
        pieces = sl.cut(table, grid, grid)[0]
        split = errors(kernel, [Work(piece[None], HEADS) for piece in pieces], inputs, truth, judged)
        assert (split <= bar * whole).all(), (degree, split / whole)
