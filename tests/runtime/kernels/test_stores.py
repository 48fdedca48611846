"""What one call makes whole is stored where it belongs: the same bits as by way of an accumulator, with fewer steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attention_oracle import RUNS, make_table
from test_varlen import MathVarlenKernel

import hsap
from hsap.ir import slice as sl
from hsap.runtime.kernels import HeadRun, Work
from hsap.runtime.machine import Machine
from hsap.runtime.memory import Arena
from hsap.runtime.transport import Mailbox
from tests.runtime.oracle import attention, tensors

LENGTHS = [61, 1, 130, 7, 44, 2, 19]


class Adding(MathVarlenKernel):
    """The same calls, always added up."""

    def prepare(self, work, device, upload=None):
        prepared = super().prepare(work, device, upload)
        return SimpleNamespace(calls=prepared.calls, heads=prepared.heads)


def make(topology: str, mask: str, heads, planner: str) -> hsap.Plan:
    shape = hsap.HeadShape(*heads, "fp32")
    problem = hsap.Problem(hsap.Layout.from_lengths(LENGTHS), shape, hsap.Topology.parse(topology), ((mask, 1),))
    return hsap.compile(problem, planner)


@pytest.mark.parametrize(
    ("topology", "mask", "heads", "planner"),
    [
        *(("1x1", "causal", (4, 2, 16), "ring"), ("1x1", "window:20", (4, 2, 16), "ring")),
        *(("1x1", "blockwise:8,2,1,1", (4, 2, 16), "ring"), ("1x2", "causal", (6, 2, 8), "ring")),
        *(("1x2", "causal", (9, 3, 8), "zigzag"), ("4x1", "causal", (4, 2, 16), "sap")),
        *(("2x2", "lambda:3,20", (4, 2, 16), "nested"), ("8x1", "full", (4, 4, 8), "usp")),
        ("4x1", "full", (3, 3, 8), "basp"),
    ],
)
def test_the_same_bits(topology: str, mask: str, heads, planner: str) -> None:
    plan = make(topology, mask, heads, planner)
    inputs = tensors(plan.problem, torch.float32)
    stored, added = (
        hsap.reference(plan, *inputs[:3], grad_o=inputs[3], kernel=kernel) for kernel in (MathVarlenKernel(), Adding())
    )
    for one, other, want in zip(stored, added, attention(plan.problem, *inputs)):
        assert torch.equal(one, other)
        torch.testing.assert_close(one.double(), want, rtol=0, atol=2e-5)


def test_a_rank_alone_copies_nothing() -> None:
    plan = make("1x1", "causal", (4, 2, 16), "ring")
    for kernel, words in (
        (MathVarlenKernel(), (["attend"], ["attend_grad"])),
        (Adding(), (["empty", "attend", "copy"], ["empty", "empty", "attend_grad", "copy", "copy"])),
    ):
        machine = Machine(plan, 0, Mailbox().for_rank(0), kernel, Arena("cpu"))
        for direction, steps in enumerate(words):
            names = machine.decode(0, direction).names
            assert [name.split()[1] if name.startswith("#") else name for name in names] == steps


def test_who_stores() -> None:
    kernel = MathVarlenKernel()
    causal = [(0, 5, 0, 5, -sl.UNBOUNDED, 0), (5, 9, 5, 9, -sl.UNBOUNDED, 0)]

    def stores(rows, heads=RUNS[1]):
        return kernel.prepare(Work(make_table(rows), heads), "cpu").stores

    assert stores(causal) == (True, True)
    assert stores([(0, 5, 0, 4), (0, 5, 6, 9)]) == (False, True)
    assert stores([(0, 5, 0, 4), (5, 9, 0, 4)]) == (True, False)
    assert stores([*causal, (9, 12, 0, 12)]) == (False, False), "two windows"
    assert stores(causal, RUNS[4]) == (True, False), "two runs share a KV head"
    assert stores(causal, (HeadRun(0, 2, 0, 1), HeadRun(2, 3, 1, 1))) == (True, True)


def test_what_no_row_makes_is_empty() -> None:
    """Rows and heads beyond the call's own, in tensors that held something else."""
    kernel, heads = MathVarlenKernel(), (HeadRun(0, 2, 0, 1),)
    prepared = kernel.prepare(Work(make_table([(1, 4, 2, 6), (6, 8, 6, 9)]), heads), "cpu")
    q, kv = torch.randn(10, 3, 8), torch.randn(10, 2, 2, 8)
    o, lse, dq, dkv = (torch.full(shape, 7.0) for shape in ((10, 3, 8), (10, 3), (10, 3, 8), (10, 2, 2, 8)))
    kernel.attend(prepared, q, kv, o, lse, 0.3, True)
    seen = torch.zeros(10, 3, dtype=torch.bool)
    seen[[1, 2, 3, 6, 7], :2] = True
    assert torch.equal(torch.isneginf(lse), ~seen) and not o[~seen].any() and bool(o[seen].any())
    lse = lse.masked_fill(~seen, 0)
    kernel.attend_grad(prepared, q, kv, torch.randn(10, 3, 8), lse, torch.zeros(10, 3), dq, dkv, 0.3, True, True)
    shown = torch.zeros(10, 2, 2, dtype=torch.bool)
    shown[2:9, :, 0] = True
    assert not dq[~seen].any() and not dkv[~shown].any() and bool(dkv[shown].any(-1).all())
