"""The executor on real processes gives the reference's numbers bit for bit."""

import pytest
import torch

import hsap
from hsap.ir.span import positions
from tests.runtime.ranks import run_ranks

LENGTHS = [61, 1, 130, 7, 44, 2, 19]
CASES = {
    2: [("2x1", "ring"), ("2x1", "sap"), ("1x2", "zigzag")],
    4: [("4x1", "zigzag"), ("2x2", "distflash"), ("1x4", "sap")],
    8: [("8x1", "sap"), ("4x2", "sap"), ("4x2", "ring"), ("2x4", "zigzag"), ("8x1", "distflash")],
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS = (9, 3, 16)


def make_plan(topology: str, planner: str, dtype: str) -> hsap.Plan:
    problem = hsap.Problem(
        hsap.Layout.from_lengths(LENGTHS), heads=hsap.HeadShape(*HEADS, dtype), topology=hsap.Topology.parse(topology)
    )
    return hsap.compile(problem, planner)


def make_tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(LENGTHS), heads, HEADS[2]) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def on_rank(rank: int, num_ranks: int) -> list:
    """Run every case in every dtype: processes take longer to start than all of them to run."""
    return [run_cases(rank, num_ranks, name) for name in DTYPES]


def run_cases(rank: int, num_ranks: int, dtype_name: str) -> list:
    """Forward and backward twice over a shared arena, as two layers do, through the autograd module."""
    dtype = DTYPES[dtype_name]
    q, k, v, grad_o = make_tensors(dtype)
    session = hsap.Session(dtype=dtype)
    results = []
    for topology, planner in CASES[num_ranks]:
        plan = make_plan(topology, planner, dtype_name)
        rows = torch.from_numpy(positions(plan.rank_spans(rank)))
        module = hsap.PlannedAttention()
        module.load(session.load(plan))
        inputs = [t[rows].requires_grad_() for t in (q, k, v)]
        first = module(*inputs)
        second = module(first.detach(), *inputs[1:])
        first.backward(grad_o[rows], retain_graph=True)
        second.sum().backward()
        again = [t[rows].requires_grad_() for t in (q, k, v)]
        module(*again).backward(grad_o[rows])
        results.append([first.detach(), *(t.grad for t in again)])
    return results


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", CASES)
def test_executor_is_the_reference(num_ranks: int) -> None:
    by_rank = run_ranks(num_ranks, on_rank, num_ranks)
    for d, (dtype_name, dtype) in enumerate(DTYPES.items()):
        tensors = make_tensors(dtype)
        for case, (topology, planner) in enumerate(CASES[num_ranks]):
            plan = make_plan(topology, planner, dtype_name)
            o, _, dq, dk, dv = hsap.reference(plan, *tensors[:3], grad_o=tensors[3])
            for rank in range(num_ranks):
                rows = torch.from_numpy(positions(plan.rank_spans(rank)))
                for want, got in zip((o, dq, dk, dv), by_rank[rank][d][case], strict=True):
                    assert torch.equal(want[rows], got), f"{topology} {planner} {dtype_name} rank {rank}"
