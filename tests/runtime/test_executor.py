"""The executor on real processes gives the reference's numbers bit for bit."""

import itertools

import pytest
import torch
import torch.distributed as dist

import hsap
from hsap.compiler.pipeline import build
from hsap.ir.span import positions
from tests.runtime.ranks import run_ranks
from tests.strategies import scattered

LENGTHS = [61, 1, 130, 7, 44, 2, 19]
CASES = [
    ("2x1", "ring"),
    ("2x1", "sap"),
    ("1x2", "zigzag"),
    ("4x1", "zigzag"),
    ("2x2", "distflash"),
    ("1x4", "sap"),
    ("8x1", "sap"),
    ("8x1", "distflash"),
    ("4x2", "sap"),
    ("4x2", "ring"),
    ("2x4", "zigzag"),
    ("4x1", "scattered"),
    ("8x1", "scattered"),
]
SCATTERED = {
    "4x1": {"relay": True, "detours": True},
    "8x1": {"relay": True, "topology": hsap.Topology(4, 2)},
}
"""How blocks are scattered by chance: the planners of the package don't ask for these things."""
RANKS = {2: [5, 6], 4: [2, 3, 4, 5], 8: list(range(8))}
"""The ranks of the world of 8 that form an SP group of that size; not the first ones, so that ranks must be mapped."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEADS = (9, 3, 16)


def make_plan(topology: str, planner: str, dtype: str) -> hsap.Plan:
    problem = hsap.Problem(
        hsap.Layout.from_lengths(LENGTHS),
        heads=hsap.HeadShape(*HEADS, dtype),
        topology=hsap.Topology.parse(topology),
        cluster=hsap.Cluster(ranks_per_node=4 if topology == "8x1" else 2),
    )
    if planner == "scattered":
        return build(problem, scattered(problem, 2, **SCATTERED[topology]), planner, {})
    return hsap.compile(problem, planner)


def make_tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(LENGTHS), heads, HEADS[2]) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def on_rank(rank: int) -> list:
    """Run all cases that this rank is part of in one world: processes take longer to start than the cases to run."""
    groups = {size: dist.new_group(ranks) for size, ranks in RANKS.items()}
    mine = {size: group for size, group in groups.items() if rank in RANKS[size]}
    sessions = {(d, size): hsap.Session(g, dtype=DTYPES[d]) for d in DTYPES for size, g in mine.items()}
    results = []
    for dtype_name, (topology, planner) in itertools.product(DTYPES, CASES):
        plan = make_plan(topology, planner, dtype_name)
        session = sessions.get((dtype_name, plan.num_ranks))
        results.append([] if session is None else run_case(plan, session))
    return results


def run_case(plan: hsap.Plan, session: hsap.Session) -> list:
    """Forward and backward twice over the run's arena, as two layers do, through the autograd module."""
    q, k, v, grad_o = make_tensors(session.dtype)
    rows = torch.from_numpy(positions(plan.rank_spans(session.rank)))
    module = hsap.PlannedAttention()
    module.load(session.load(plan))
    inputs = [t[rows].requires_grad_() for t in (q, k, v)]
    first = module(*inputs)
    second = module(first.detach(), *inputs[1:])
    first.backward(grad_o[rows], retain_graph=True)
    second.sum().backward()
    again = [t[rows].requires_grad_() for t in (q, k, v)]
    module(*again).backward(grad_o[rows])
    return [first.detach(), *(t.grad for t in again)]


@pytest.mark.slow
def test_executor_is_the_reference() -> None:
    by_rank = run_ranks(8, on_rank)
    for case, (dtype_name, (topology, planner)) in enumerate(itertools.product(DTYPES, CASES)):
        tensors = make_tensors(DTYPES[dtype_name])
        plan = make_plan(topology, planner, dtype_name)
        o, _, dq, dk, dv = hsap.reference(plan, *tensors[:3], grad_o=tensors[3])
        for sp_rank, rank in enumerate(RANKS[plan.num_ranks]):
            rows = torch.from_numpy(positions(plan.rank_spans(sp_rank)))
            for want, got in zip((o, dq, dk, dv), by_rank[rank][case], strict=True):
                assert torch.equal(want[rows], got), f"{topology} {planner} {dtype_name} rank {sp_rank}"
