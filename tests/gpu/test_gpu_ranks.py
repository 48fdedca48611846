"""Several GPUs over NCCL, one rank each, against float64 mathematics; on CPUs two ranks over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hsap
from hsap.calibrate.processes import run_ranks
from hsap.ir.span import positions
from hsap.runtime.executor import Session
from hsap.runtime.groups import connect, make_mesh
from tests.gpu.devices import HAS_CUDA, needs_gpu
from tests.gpu.single import never_waiting
from tests.gpu.test_gpu_attention import BOUNDS, NAMES, make
from tests.runtime.oracle import attention, tensors

COUNT = torch.cuda.device_count() if HAS_CUDA else 0
WORLDS = [
    pytest.param("cpu", 2, marks=pytest.mark.slow),
    pytest.param(
        "cuda", COUNT, marks=[*needs_gpu, pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices or more")]
    ),
]


def plans(device: str, num_ranks: int) -> list[hsap.Plan]:
    """Plans of every way to move rows: rings, q and KV, all-to-all alone and under P2P, relays."""
    cases = [("sap", f"{num_ranks}x1"), ("ring", f"{num_ranks}x1"), ("usp", f"{num_ranks}x1")]
    if num_ranks % 2 == 0:
        cases += [("nested", f"{num_ranks // 2}x2"), ("sap", f"{num_ranks // 2}x2")]
    return [hsap.compile(make(device, topology, "causal"), planner) for planner, topology in cases]


def rank_main(rank: int, device: str, num_ranks: int) -> list[list[float]]:
    """Errors by plan and tensor: of this rank's rows, over the root mean square of all rows."""
    session = Session(
        make_mesh(hsap.Topology(num_ranks, 1), max_ctas=4 if device == "cuda" else None).sp,
        device=device,
        dtype=torch.bfloat16,
    )
    connect(device=device)
    session.transport.start = session.transport._batched  # NCCL's way, also where gloo has one of its own
    errors = []
    for plan in plans(device, num_ranks):
        inputs = tensors(plan.problem, torch.bfloat16)
        rows = torch.from_numpy(positions(plan.rank_spans(rank)))
        q, k, v, grad_o = (x[rows].to(device) for x in inputs)
        executor = session.load(plan)
        kept = executor.forward(q, k, v)
        executor.backward(grad_o, kept)
        with never_waiting(device):
            kept = executor.forward(q, k, v)
            grads = executor.backward(grad_o, kept)
        want = attention(plan.problem, *inputs)
        mine = [want[0][rows], want[1][:, rows].T, *(x[rows] for x in want[2:])]
        pairs = zip((kept.o, kept.lse, *grads), mine, want, strict=True)
        errors.append([float((a.cpu().double() - b).square().mean().sqrt() / c.std()) for a, b, c in pairs])
        dist.barrier()
    return errors


@pytest.mark.parametrize(("device", "num_ranks"), WORLDS)
def test_planners_over_the_network(device: str, num_ranks: int) -> None:
    told = run_ranks(num_ranks, rank_main, device, num_ranks, backend="nccl" if device == "cuda" else "gloo")
    for rank, errors in enumerate(told):
        for plan, by_tensor in zip(plans(device, num_ranks), errors, strict=True):
            for name, error in zip(NAMES, by_tensor, strict=True):
                assert error <= BOUNDS["bf16"], f"rank {rank}, {plan.planner} on {plan.topology}, {name}: {error:.2e}"
