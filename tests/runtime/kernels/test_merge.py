"""Online softmax, reset, delta and the stand-in output against float64 mathematics."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import accumulator_dtype
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.runtime.kernels import merge, reset
from hsap.runtime.kernels.delta import row_delta, stand_in_output

LSE = st.one_of(st.just(-torch.inf), st.floats(-1e4, 1e4))


def exact_merge(parts):
    """Merge (o, lse) parts at once in float64, subtracting the maximum."""
    lse = torch.stack([part[1].double() for part in parts])
    top = lse.amax(0)
    weight = torch.exp(lse - torch.where(torch.isneginf(top), 0.0, top))
    total = weight.sum(0)
    o = sum(w[..., None] * part[0].double() for w, part in zip(weight, parts))
    return torch.where(total[..., None] > 0, o / total[..., None], 0.0), top + total.log()


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.lists(LSE, min_size=4, max_size=4), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_merge_is_one_softmax(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    lse = torch.tensor(rows, dtype=torch.float64).T.unsqueeze(-1)  # 4 parts, rows, 1 head
    parts = [(torch.randn(len(rows), 1, 6, generator=generator, dtype=torch.float64), x) for x in lse]
    parts = [(o.masked_fill(torch.isneginf(x).unsqueeze(-1), 0.0), x) for o, x in parts]
    o, acc = torch.empty_like(parts[0][0]), torch.empty_like(parts[0][1])
    reset(o, acc)
    for part in parts:
        merge(o, acc, *part)
    want_o, want_lse = exact_merge(parts)
    assert torch.allclose(o, want_o, rtol=0, atol=1e-11)
    assert torch.allclose(acc, want_lse, rtol=1e-14, atol=1e-11)


@pytest.mark.parametrize("part_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("acc_dtype", [torch.float32, torch.float64])
def test_parts_of_any_dtype_fold_into_a_row_range(part_dtype, acc_dtype):
    torch.manual_seed(0)
    o, lse = torch.randn(9, 3, 8, dtype=acc_dtype), torch.randn(9, 3, dtype=acc_dtype)
    before = (o.clone(), lse.clone())
    part = (torch.randn(4, 2, 8).to(part_dtype), torch.randn(4, 2).to(torch.promote_types(part_dtype, torch.float32)))
    merge(o[2:6, 1:], lse[2:6, 1:], *part)
    want_o, want_lse = exact_merge([(before[0][2:6, 1:], before[1][2:6, 1:]), part])
    assert torch.allclose(o[2:6, 1:].double(), want_o, atol=1e-6)
    assert torch.allclose(lse[2:6, 1:].double(), want_lse, atol=1e-6)
    o[2:6, 1:], lse[2:6, 1:] = before[0][2:6, 1:], before[1][2:6, 1:]
    assert torch.equal(o, before[0]) and torch.equal(lse, before[1])


def test_an_empty_side_changes_no_bit():
    part = (torch.randn(5, 2, 8), torch.randn(5, 2) * 1e4)
    o, lse = torch.empty(5, 2, 8), torch.empty(5, 2)
    reset(o, lse)
    merge(o, lse, torch.ones(5, 2, 8), torch.full((5, 2), -torch.inf))
    assert not o.any() and torch.isneginf(lse).all()
    merge(o, lse, *part)
    assert torch.equal(o, part[0]) and torch.equal(lse, part[1])
    merge(o, lse, torch.ones(5, 2, 8), torch.full((5, 2), -torch.inf))
    assert torch.equal(o, part[0]) and torch.equal(lse, part[1])


def test_large_float32_lse_keeps_the_weights_convex():
    # lse near 1e4 has a step of 1e-3 in float32; equal values must still come out as themselves.
    o, lse = torch.ones(64, 1, 4), torch.linspace(9990, 10010, 64)[:, None]
    for shift in (0.0, 0.3, -0.7, 2.0):
        merge(o, lse, torch.ones(64, 1, 4), torch.full((64, 1), 1e4 + shift))
    assert torch.allclose(o, torch.ones_like(o), rtol=0, atol=5e-7)


def test_accumulators_are_wider_than_inputs():
    assert accumulator_dtype(torch.bfloat16) == accumulator_dtype(torch.float16) == torch.float32
    assert accumulator_dtype(torch.float32) == accumulator_dtype(torch.float64) == torch.float64


@pytest.mark.parametrize("rows", [0, 1, 6, 7, 50])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_delta_is_exact_in_whatever_chunks(rows, dtype, monkeypatch):
    torch.manual_seed(rows)
    wide = accumulator_dtype(dtype)
    monkeypatch.setattr("hsap.runtime.kernels.delta.CHUNK_BYTES", 6 * 3 * 32 * wide.itemsize)
    do, o = (torch.randn(rows, 3, 32).to(dtype) for _ in range(2))
    delta = row_delta(do, o, wide)
    assert delta.dtype == wide and delta.shape == (rows, 3)
    want = (do.double() * o.double()).sum(-1)
    assert torch.allclose(delta.double(), want, rtol=0, atol=64 * torch.finfo(wide).eps)


@pytest.mark.parametrize("size", [1.0, 1e-18, 1e-25, 1e15])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_stand_in_output_has_the_same_delta(size, dtype):
    torch.manual_seed(0)
    do = (torch.randn(50, 3, 32, dtype=torch.float64) * size).to(dtype)
    o = torch.randn(50, 3, 32, dtype=accumulator_dtype(dtype))
    do[7] = 0
    delta = row_delta(do, o)
    want = (do.double() * o.double()).sum(-1)
    out = stand_in_output(do, delta)
    assert out.dtype == do.dtype and out.isfinite().all() and not out[7].any()
    got = (do.double() * out.double()).sum(-1)
    accuracy = 4 * torch.finfo(dtype).eps
    assert torch.allclose(got, want, rtol=accuracy, atol=1e-6 * size if dtype == torch.bfloat16 else 1e-14 * size)
    assert (out.double().norm(dim=-1) <= o.double().norm(dim=-1) * (1 + accuracy)).all()
