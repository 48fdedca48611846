"""The shared part of the varlen kernels, with a mathematical varlen function in place of the GPU's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_oracle import RUNS, accumulator_dtype, check_kernel, make_table, slice_tables, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.ir import slice as sl
from hsap.runtime.kernels import HeadRun, Work
from hsap.runtime.kernels.cuda_flash import CudaFlashKernel
from hsap.runtime.kernels.flash_attn import FA2_MODULE, FA3_MODULE, FlashAttn2Kernel, FlashAttn3Kernel, is_installed
from hsap.runtime.kernels.varlen import VarlenKernel, split_windows


class MathVarlenKernel(VarlenKernel):
    """Varlen attention as flash-attention documents it: windows aligned to the bottom right."""

    name = "math_varlen"

    def forward(self, q, k, v, call, scale):
        parts = [self._attend(q[a:b], k[c:d], v[c:d], call.window, scale) for a, b, c, d in self._sequences(q, k, call)]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)

    def backward(self, do, q, k, v, out, lse, call, scale):
        assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        for a, b, c, d in self._sequences(q, k, call):
            keys, values = (x[c:d].repeat_interleave(group, 1) for x in (k, v))
            score = self._scores(q[a:b], keys, call.window, scale)
            weight = torch.exp(score - lse[:, a:b, None])
            delta = (do[a:b] * out[a:b]).sum(-1).T[..., None]
            d_score = weight * (torch.einsum("thd,khd->htk", do[a:b], values) - delta) * scale
            dq[a:b] = torch.einsum("htk,khd->thd", d_score, keys)
            dk[c:d] = torch.einsum("htk,thd->khd", d_score, q[a:b]).unflatten(1, (-1, group)).sum(2)
            dv[c:d] = torch.einsum("htk,thd->khd", weight, do[a:b]).unflatten(1, (-1, group)).sum(2)
        return dq, dk, dv

    def _attend(self, q, k, v, window, scale):
        group = q.shape[1] // k.shape[1]
        score = self._scores(q, k.repeat_interleave(group, 1), window, scale)
        # A row that sees nothing would be NaN here: the decomposition must never make one.
        return torch.einsum("htk,khd->thd", score.softmax(-1), v.repeat_interleave(group, 1)), score.logsumexp(-1)

    @staticmethod
    def _scores(q, k, window, scale):
        left, right = (float("inf") if bound == -1 else bound for bound in window)
        offset = torch.arange(len(k)) - torch.arange(len(q))[:, None] - (len(k) - len(q))
        hidden = (offset < -left) | (offset > right)
        return (torch.einsum("thd,khd->htk", q, k) * scale).masked_fill(hidden, -torch.inf)

    @staticmethod
    def _sequences(q, k, call):
        edges_q, edges_k = (side.cu_seqlens.tolist() for side in (call.q, call.kv))
        assert (edges_q[-1], edges_k[-1]) == (len(q), len(k))
        assert call.q.max_seqlen == max(np.diff(edges_q)) and call.kv.max_seqlen == max(np.diff(edges_k))
        return list(zip(edges_q, edges_q[1:], edges_k, edges_k[1:]))


KERNEL = MathVarlenKernel()


@settings(max_examples=80, deadline=None)
@given(case=slice_tables(), heads=st.sampled_from(RUNS), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_random_slices(case, heads, dtype):
    check_kernel(KERNEL, *case, heads, dtype)


@settings(max_examples=100, deadline=None)
@given(case=slice_tables())
def test_windows_show_the_pairs_of_the_slices(case):
    table, num_q, num_k = case
    pieces, windows = split_windows(table)
    seen = np.zeros((max(num_q, num_k),) * 2, dtype=np.int64)
    for (q0, q1, k0, k1, *_), (left, right) in zip(pieces.tolist(), windows.tolist()):
        assert left >= -1 and right in (-1, 0)
        offset = np.arange(k1 - k0) - np.arange(q1 - q0)[:, None] - (k1 - k0 - q1 + q0)
        window = (offset >= -left if left != -1 else True) & (offset <= right if right != -1 else True)
        seen[q0:q1, k0:k1] += np.broadcast_to(window, offset.shape)
    assert np.array_equal(seen, sl.dense(table, len(seen)))


def call_windows(rows):
    work = Work(make_table(rows), RUNS[1])
    return KERNEL.prepare(work, "cpu").calls


def test_causal_documents_are_one_call_without_gathering():
    (call,) = call_windows([(a, b, a, b, -sl.UNBOUNDED, 0) for a, b in ((0, 5), (5, 6), (6, 40))])
    assert call.window == (-1, 0)
    assert call.q.rows == slice(0, 40) and call.kv.rows == slice(0, 40)
    assert call.q.cu_seqlens.tolist() == [0, 5, 6, 40] and call.q.cu_seqlens.dtype == torch.int32


def test_causal_with_earlier_keys_needs_no_decomposition():
    (call,) = call_windows([(10, 20, 0, 20, -sl.UNBOUNDED, 0)])
    assert call.window == (-1, 0) and call.q.cu_seqlens.tolist() == [0, 10] and call.kv.cu_seqlens.tolist() == [0, 20]


def test_documents_shorter_than_the_window_join_the_longer_ones():
    (call,) = call_windows([(a, b, a, b, -7, 0) for a, b in ((0, 5), (5, 6), (6, 40), (40, 48))])
    assert call.window == (7, 0) and call.q.cu_seqlens.tolist() == [0, 5, 6, 40, 48]


def test_a_document_longer_than_another_ones_window_keeps_its_own_call():
    for length, num_calls in ((8, 1), (9, 2)):
        calls = call_windows([(0, length, 0, length, -sl.UNBOUNDED, 0), (length, 40, length, 40, -7, 0)])
        assert len(calls) == num_calls


def test_a_full_rectangle_keeps_its_own_call():
    calls = call_windows([(0, 9, 0, 9, -sl.UNBOUNDED, 0), (9, 10, 9, 10), (10, 12, 0, 9)])
    assert sorted(call.window for call in calls) == [(-1, -1), (-1, 0)]


def test_windows_of_one_width_are_one_call():
    calls = call_windows([(a, b, a, b, -7, 0) for a, b in ((0, 20), (20, 50), (50, 90))])
    assert [call.window for call in calls] == [(7, 0)]


def test_shared_query_rows_fold_in_layers():
    table = make_table([(0, 6, 0, 4), (3, 9, 4, 8), (0, 9, 8, 9)])
    (call,) = KERNEL.prepare(Work(table, RUNS[1]), "cpu").calls
    assert len(call.q.layers) == 3 and len(call.kv.layers) == 1
    check_kernel(KERNEL, table, 9, 9, RUNS[1], torch.float64)


def test_other_head_dimensions_are_refused():
    table = make_table([(0, 4, 0, 4)])
    for dim in (7, 264):
        with pytest.raises(ValueError, match=f"not {dim}; use kernel=math"):
            check_kernel(KERNEL, table, 4, 4, RUNS[0], torch.float64, dim=dim)


GPU = {
    "cuda_flash": (CudaFlashKernel, None),
    "flash_attn": (FlashAttn2Kernel, FA2_MODULE),
    "flash_attn3": (FlashAttn3Kernel, FA3_MODULE),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(HeadRun(0, 4, 0, 2),), RUNS[3]], ids=["even", "uneven"])
def test_gpu_kernels(name, dtype, heads):
    make, module = GPU[name]
    if module is not None and not is_installed(module):
        pytest.skip(f"needs {module}")
    masks = [
        [(0, 300, 0, 300, -sl.UNBOUNDED, 0), (300, 301, 300, 301), (301, 777, 301, 777, -sl.UNBOUNDED, 0)],
        [(100, 400, 0, 250), (50, 90, 250, 800), (100, 400, 300, 600, -sl.UNBOUNDED, 200)],
        [(0, 500, 0, 500, -63, 0), (500, 777, 500, 777, -63, 0), (0, 100, 600, 777, 560, 700)],
    ]
    for rows in masks:
        table = make_table(rows)
        check_kernel(make(), table, 777, 800, heads, dtype, dim=64, device="cuda")


def test_tensors_of_the_oracle_are_views():
    q, kv, _ = tensors(5, 6, RUNS[1], 8, torch.float32)
    assert not q.is_contiguous() and not kv.is_contiguous()
    assert accumulator_dtype(q.dtype) == torch.float64


@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_s_flash_takes_the_arguments_as_given(deterministic):
    """On the meta device, where torch checks arguments against its schema and gives shapes, and nothing is computed."""
    rows = [(0, 300, 0, 300, -sl.UNBOUNDED, 0), (300, 400, 10, 200), (400, 777, 400, 777, -63, 0), (2, 9, 500, 700)]
    work = Work(make_table(rows), RUNS[3])
    kernel = CudaFlashKernel(deterministic)
    q, o, dq = (torch.empty(777, 7, 64, dtype=kind, device="meta") for kind in (torch.bfloat16, *[torch.float32] * 2))
    kv, dkv = (torch.empty(800, 2, 2, 64, dtype=kind, device="meta") for kind in (torch.bfloat16, torch.float32))
    lse, delta = (torch.empty(777, 7, dtype=kind, device="meta") for kind in (torch.float64, torch.float32))
    prepared = kernel.prepare(work, "meta")
    assert len(prepared.calls) == 3
    kernel.attend(prepared, q, kv, o, lse, 0.125)
    kernel.attend_grad(prepared, q, kv, q, lse, delta, dq, dkv, 0.125)
    for call in prepared.calls:
        num_q, num_k = (777 if isinstance(side.rows, slice) else len(side.rows) for side in (call.q, call.kv))
        packed = [torch.empty(n, h, 64, dtype=torch.bfloat16, device="meta") for n, h in ((num_q, 6), (num_k, 2))]
        out, stats = kernel.forward(packed[0], packed[1], packed[1], call, 0.125)
        assert out.shape == packed[0].shape and stats.shape == (6, num_q) and stats.dtype == torch.float32
        grads = kernel.backward(out, packed[0], packed[1], packed[1], out, stats, call, 0.125)
        assert [x.shape for x in grads] == [x.shape for x in (packed[0], packed[1], packed[1])]
