"""Kernels that run on a CPU against dense float64 attention: random slices, head runs, splits, edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from attention_oracle import (
    RUNS,
    check_kernel,
    make_table,
    oracle,
    relative_rmse,
    run_backward,
    run_forward,
    slice_tables,
    tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.ir import slice as sl
from hsap.runtime.kernels import HeadRun, Work
from hsap.runtime.kernels.cpu_flash import CpuFlashKernel
from hsap.runtime.kernels.math import MathKernel

KERNELS = {"math": MathKernel(), "cpu_flash": CpuFlashKernel(), "cpu_flash32": CpuFlashKernel(float32_output=True)}


@pytest.mark.parametrize("name", ["math", "cpu_flash"])
@settings(max_examples=60, deadline=None)
@given(case=slice_tables(), heads=st.sampled_from(RUNS), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_random_slices(name, case, heads, dtype):
    check_kernel(KERNELS[name], *case, heads, dtype)


@pytest.mark.parametrize("name", ["cpu_flash", "cpu_flash32"])
@settings(max_examples=25, deadline=None)
@given(case=slice_tables(), heads=st.sampled_from(RUNS), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_random_slices_in_half_precision(name, case, heads, dtype):
    check_kernel(KERNELS[name], *case, heads, dtype, dim=16)


@pytest.mark.parametrize("name", ["math", "cpu_flash"])
@settings(max_examples=40, deadline=None)
@given(case=slice_tables(), edges=st.sets(st.integers(1, 39), max_size=4), seed=st.integers(0, 99))
def test_work_split_over_several_attends_adds_up(name, case, edges, seed):
    table, num_q, num_k = case
    bounds = sorted({0, *edges, 40})
    grid = np.array(list(itertools.pairwise(bounds)), dtype=np.int64)
    pieces = sl.cut(table, grid, grid)[0]
    owner = np.random.default_rng(seed).integers(0, 3, len(pieces))
    works = [Work(pieces[owner == part], RUNS[1]) for part in range(3)]
    check_kernel(KERNELS[name], table, num_q, num_k, RUNS[1], torch.float64, seed=seed, works=works)


LARGE = {
    "giant causal document": (1537, 1537, [(0, 1537, 0, 1537, -sl.UNBOUNDED, 0)]),
    "window narrower than a strip": (1100, 1100, [(0, 1100, 0, 1100, -2, 0)]),
    "window wider than a strip": (2600, 2600, [(0, 2600, 0, 2600, -1300, 0)]),
    "band far from the diagonal": (700, 5000, [(0, 700, 0, 5000, 3900, 4250)]),
    "inverse causal": (1200, 1300, [(0, 1200, 0, 1300, 5, sl.UNBOUNDED)]),
    "rows without keys": (300, 300, [(10, 20, 0, 5), (250, 251, 7, 299)]),
    "one-token documents": (40, 40, [(i, i + 1, i, i + 1) for i in range(40)]),
}


@pytest.mark.parametrize("name", ["math", "cpu_flash"])
@pytest.mark.parametrize("case", LARGE)
def test_large_and_odd_masks(name, case):
    num_q, num_k, rows = LARGE[case]
    check_kernel(KERNELS[name], make_table(rows), num_q, num_k, RUNS[0], torch.float64)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("num_q", "num_k"), [(0, 0), (0, 5), (5, 0), (5, 5)])
def test_no_slices_leave_everything_as_it_was(name, num_q, num_k):
    heads = (HeadRun(0, 2, 0, 1),)
    q, kv, do = tensors(num_q, num_k, heads, 8, torch.float32)
    works = [Work(sl.slices([]), heads)]
    o, lse = run_forward(KERNELS[name], works, q, kv)
    dq, dkv = run_backward(KERNELS[name], works, q, kv, do, o, lse)
    assert torch.isneginf(lse).all()
    assert not any(x.any() for x in (o, dq, dkv))


@pytest.mark.parametrize("name", KERNELS)
def test_inputs_are_read_only_and_other_heads_are_untouched(name):
    heads = (HeadRun(1, 2, 1, 1),)
    q, kv, do = tensors(20, 20, (HeadRun(0, 4, 0, 2),), 8, torch.float32)
    before = [x.clone() for x in (q, kv, do)]
    works = [Work(sl.canonical(sl.slices([(0, 20, 0, 20, -sl.UNBOUNDED, 0)])), heads)]
    o, lse = run_forward(KERNELS[name], works, q, kv)
    dq, dkv = run_backward(KERNELS[name], works, q, kv, do, o, lse)
    assert all(torch.equal(x, y) for x, y in zip((q, kv, do), before))
    for x in (o, dq):
        assert not x[:, [0, 3]].any() and x[:, 1:3].any()
    assert torch.isneginf(lse[:, [0, 3]]).all()
    assert not dkv[:, :, 0].any() and dkv[:, :, 1].any()


@pytest.mark.parametrize("name", KERNELS)
def test_scores_far_beyond_what_exp_can_hold(name):
    heads = (HeadRun(0, 1, 0, 1),)
    table = sl.canonical(sl.slices([(0, 30, 0, 30, -sl.UNBOUNDED, 0), (0, 30, 30, 50, 33, 40)]))
    q, kv, do = tensors(30, 50, heads, 8, torch.float32)
    q, scale = q * 1000, 10.0
    want_o, want_lse, *_ = oracle(table, heads, q, kv, do, scale)
    assert float(want_lse[~torch.isneginf(want_lse)].abs().max()) > 1e4
    o, lse = run_forward(KERNELS[name], [Work(piece[None], heads) for piece in table], q, kv, scale)
    assert relative_rmse(o, want_o) < 5e-2
    assert torch.allclose(lse.double(), want_lse, rtol=1e-5)
    dq, dkv = run_backward(KERNELS[name], [Work(table, heads)], q, kv, do, o, lse, scale)
    assert dq.isfinite().all() and dkv.isfinite().all()


def test_work_that_is_not_canonical_is_refused():
    with pytest.raises(ValueError, match="canonical"):
        Work(sl.slices([(0, 4, 0, 4, -sl.UNBOUNDED, 0)]), RUNS[0])
    with pytest.raises(ValueError, match="canonical"):
        Work(sl.slices([(0, 0, 0, 4, 0, 0)]), RUNS[0])


def test_uneven_head_run_is_refused():
    with pytest.raises(ValueError, match="evenly grouped"):
        Work(sl.slices([]), (HeadRun(0, 7, 0, 2),))
