"""Every family of masks on every kernel that a CPU can run, against dense float64 attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_oracle import RUNS, check_kernel
from test_varlen import MathVarlenKernel

from hsap.ir import slice as sl
from hsap.ir.families import MASKS
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, mask_slices
from hsap.runtime.kernels import Work, cpu_flash
from hsap.runtime.kernels.cpu_flash import CpuFlashKernel
from hsap.runtime.kernels.math import MathKernel
from hsap.runtime.kernels.varlen import split_windows

KERNELS = {"math": MathKernel(), "cpu_flash": CpuFlashKernel(), "varlen": MathVarlenKernel()}
CASES = [
    *("causal", "full", "prefix:1", "prefix:41", "prefix:9999", "chunked:1", "chunked:16", "chunked:9999"),
    *("window:1", "window:7", "window:128", "window:300", "window:9999"),
    *("lambda:0,3", "lambda:4,32", "lambda:1,1", "lambda:9999,3", "lambda:300,290"),
    *("blockwise:16,2,1,1", "blockwise:7,1,0,0", "blockwise:1,3,2,1", "blockwise:64,2,1,1", "blockwise:9999,1,1,1"),
    *("shared_question:4,20", "shared_question:1,100", "shared_question:3,9"),
]
LENGTHS = (131, 1, 346, 2, 17)


def test_every_family_is_among_the_cases():
    assert {Mask.parse(case).name for case in CASES} == set(MASKS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_families(name, case):
    layout = Layout.from_lengths(LENGTHS)
    table = mask_slices(layout, Mask.parse(case))
    check_kernel(KERNELS[name], table, layout.num_tokens, layout.num_tokens, RUNS[1], torch.float64)


@pytest.mark.parametrize("narrow", [1, 20, 1000])
@pytest.mark.parametrize("case", ["window:19", "window:20", "window:90", "lambda:5,33"])
def test_bands_by_squares_and_by_masks(monkeypatch, narrow, case):
    """Both ways that a band can be done, cut by shards in the middle of its strips."""
    monkeypatch.setattr(cpu_flash, "NARROW", narrow)
    monkeypatch.setattr(cpu_flash, "STRIP_ROWS", 13)
    layout = Layout.from_lengths([101, 40])
    cuts = np.array([[0, 37], [37, 100], [100, 102], [102, 141]])
    pieces = sl.cut(mask_slices(layout, Mask.parse(case)), cuts, cuts)[0]
    works = [Work(pieces[part::3], RUNS[4]) for part in range(3)]
    check_kernel(KERNELS["cpu_flash"], pieces, 141, 141, RUNS[4], torch.float64, works=works)


@pytest.mark.parametrize("case", ["window:4096", "window:64", "lambda:64,4096", "blockwise:256,2,1,1", "chunked:8192"])
def test_long_documents_take_few_calls_and_small_masks(case):
    table = Mask.parse(case).slices(131_072)
    pieces = CpuFlashKernel().prepare(Work(table, RUNS[1]), "cpu").pieces
    assert len(pieces) <= 3 * 131_072 // 256
    masked = [piece for piece in pieces if piece.band]
    assert all(piece.cols.stop - piece.cols.start < cpu_flash.NARROW + cpu_flash.STRIP_ROWS for piece in masked)
    assert all(piece.rows.stop - piece.rows.start <= cpu_flash.STRIP_ROWS for piece in masked)
    # What flash-attention's varlen functions know: one call for each window.
    assert len(np.unique(split_windows(table)[1], axis=0)) <= 3
