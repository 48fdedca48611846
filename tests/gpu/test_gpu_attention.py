"""Attention on a GPU against float64 mathematics: every planner's kernels, one rank's executor, and no waiting.

The same tests run on CPUs, smaller: what they prove there is that they are written right.
"""

from __future__ import annotations

import pytest
import torch

import hsap
from hsap.planners import PLANNERS
from hsap.runtime.attention import PlannedAttention
from hsap.runtime.executor import Session
from hsap.runtime.kernels import select_kernel
from hsap.runtime.kernels.cuda_flash import CudaFlashKernel
from hsap.runtime.kernels.select import KERNELS
from tests.gpu.devices import DEVICES
from tests.gpu.single import alone, finish, never_waiting
from tests.runtime.oracle import attention, tensors

LENGTHS = {"cuda": [700, 1, 311, 90, 2, 1203, 40], "cpu": [70, 1, 31, 9]}
EVEN, SMOLLM2, ODD_DIM = (8, 2, 128), (9, 3, 64), (6, 6, 80)
NAMES = ("o", "lse", "dq", "dk", "dv")
# bf16 on the wire and native bf16 partial outputs; float32 goes through `math`.
BOUNDS = {"bf16": 2.5e-2, "fp32": 1e-5}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make(device: str, topology: str, mask: str, heads=SMOLLM2, dtype: str = "bf16", **more) -> hsap.Problem:
    layout = hsap.Layout.from_lengths(LENGTHS[device])
    shape, cluster = hsap.HeadShape(*heads, dtype), hsap.Cluster(ranks_per_node=4)
    return hsap.Problem(layout, shape, hsap.Topology.parse(topology), ((mask, 1),), cluster=cluster, **more)


def agree(problem: hsap.Problem, got, inputs, mask: int = 0) -> None:
    """Relative RMSE of every tensor against dense attention in float64."""
    bound = BOUNDS[problem.heads.dtype]
    for name, one, want in zip(NAMES, got, attention(problem, *inputs, mask), strict=True):
        error, size = (one.cpu().double() - want).square().mean().sqrt(), want.square().mean().sqrt()
        assert error <= bound * size, f"{name}: {float(error / size):.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_in_one_process(device: str, planner: str) -> None:
    cases = (("4x2", "causal", EVEN), ("4x1", "window:50", SMOLLM2)) if device == "cuda" else (("2x2", "causal", EVEN),)
    for topology, mask, heads in cases:
        problem = make(device, topology, mask, heads)
        plan = hsap.compile(problem, planner, **({"block": 64} if planner == "dcp" else {}))
        inputs = tensors(problem, torch.bfloat16)
        q, k, v, grad_o = (x.to(device) for x in inputs)
        agree(problem, hsap.reference(plan, q, k, v, grad_o=grad_o), inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("mask", "heads", "dtype"),
    [
        *(("causal", ODD_DIM, "bf16"), ("lambda:5,60", SMOLLM2, "bf16"), ("full", EVEN, "bf16")),
        *(("blockwise:16,3,1,1", SMOLLM2, "bf16"), ("causal", SMOLLM2, "fp32")),
    ],
)
def test_masks_and_heads_in_one_process(device: str, mask: str, heads, dtype: str) -> None:
    problem = make(device, "4x2", mask, heads, dtype)
    plan = hsap.compile(problem, "sap")
    inputs = tensors(problem, DTYPES[dtype])
    q, k, v, grad_o = (x.to(device) for x in inputs)
    agree(problem, hsap.reference(plan, q, k, v, grad_o=grad_o), inputs)


@pytest.mark.parametrize("planner", ["sap", "usp"])
def test_flash_calls_are_well_formed(planner: str) -> None:
    """On the meta device: torch checks each call's arguments and gives its shapes, and nothing is computed."""
    problem = make("cpu", "2x2", "lambda:5,20")
    q, k, v, grad_o = (x.to("meta") for x in tensors(problem, torch.bfloat16))
    got = hsap.reference(hsap.compile(problem, planner), q, k, v, grad_o=grad_o, kernel=CudaFlashKernel())
    assert [x.shape for x in got] == [q.shape, (9, len(q)), q.shape, k.shape, v.shape]


def one_step(session: Session, plan: hsap.Plan, q, k, v, grad_o):
    """Load a plan and go through autograd: what a micro-step of training does."""
    module = PlannedAttention()
    module.load(session.load(plan))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = module(*leaves)
    return o.detach(), torch.autograd.grad(o, leaves, grad_o)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["causal", "window:50"])
def test_one_rank_s_executor_never_stops_the_host(device: str, mask: str) -> None:
    problem = make(device, "1x1", mask)
    plan = hsap.compile(problem, "ring")
    inputs = tensors(problem, torch.bfloat16)
    on_device = [x.to(device) for x in inputs]
    with alone(device):
        session = Session(device=device, dtype=torch.bfloat16)
        session.arena.reserve(int(plan.arena_bytes()[0]))
        one_step(session, plan, *on_device)  # compiles what is compiled when first used
        with never_waiting(device):
            o, grads = one_step(session, plan, *on_device)
        finish(device)
        lse = session.load(plan).forward(*on_device[:3]).lse.T
        assert session.kernel(problem.heads.head_dim).name in KERNELS
    agree(problem, (o, lse, *grads), inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("planner", ["sap", "nested", "usp"])
def test_many_ranks_in_one_process_never_stop_the_host(device: str, planner: str) -> None:
    problem = make(device, "4x2" if planner != "usp" else "8x1", "causal", EVEN)
    plan = hsap.compile(problem, planner)
    inputs = tensors(problem, torch.bfloat16)
    q, k, v, grad_o = (x.to(device) for x in inputs)
    hsap.reference(plan, q, k, v, grad_o=grad_o)
    with never_waiting(device):
        got = hsap.reference(plan, q, k, v, grad_o=grad_o)
    agree(problem, got, inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_deterministic_backward_repeats_itself(device: str) -> None:
    problem = make(device, "4x1", "causal", EVEN)
    plan = hsap.compile(problem, "sap")
    inputs = tensors(problem, torch.bfloat16)
    q, k, v, grad_o = (x.to(device) for x in inputs)
    kernel = select_kernel("auto", device, torch.bfloat16, head_dim=EVEN[2], deterministic=True)
    first, *others = (hsap.reference(plan, q, k, v, grad_o=grad_o, kernel=kernel) for _ in range(4))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))
    agree(problem, first, inputs)
    assert torch.get_deterministic_debug_mode() == 0
