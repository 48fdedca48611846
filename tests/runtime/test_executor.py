"""The executor on real processes gives the reference's numbers bit for bit."""

import itertools

import pytest
import torch
import torch.distributed as dist

import hsap
from hsap.compiler.pipeline import build
from hsap.ir.span import positions
from hsap.planners import PLANNERS
from tests.runtime.ranks import run_ranks
from tests.strategies import scattered

LENGTHS, SEQUENCES = [61, 1, 130, 7, 44, 2, 19], [3, 1, 3]
EVEN, ODD = (8, 2, 16), (9, 3, 16)
CASES = [
    ("2x1", "ring", "causal", ODD),
    ("2x1", "sap", "shared_question:2,20", EVEN),
    ("1x2", "zigzag", "window:9", ODD),
    ("2x2", "distflash", "causal", ODD),
    ("4x1", "zigzag", "causal", ODD),
    ("4x1", "allgather", "lambda:3,20", EVEN),
    ("4x1", "basp", "causal", EVEN),
    ("4x1", "usp", "window:30", EVEN),
    ("4x1", "dcp", "blockwise:8,2,1,1", EVEN),
    ("2x2", "nested", "window:40", EVEN),
    ("2x2", "mesh", "prefix:17", ODD),
    ("1x4", "sap", "full", ODD),
    ("4x1", "scattered", "causal", ODD),
    ("8x1", "ring", "window:25", EVEN),
    ("8x1", "distflash", "causal", ODD),
    ("8x1", "allgather", "causal", ODD),
    ("8x1", "flashcp", "causal", ODD),
    ("8x1", "magi", "blockwise:8,2,1,0", EVEN),
    ("8x1", "mesh", "causal", EVEN),
    ("8x1", "nested", "causal", ODD),
    ("8x1", "nested", "lambda:4,50", EVEN),
    ("8x1", "sap", "causal", ODD),
    ("8x1", "dcp", "causal", EVEN),
    ("8x1", "usp", "causal", EVEN),
    ("8x1", "te", "chunked:30", EVEN),
    ("8x1", "loongtrain", "causal", EVEN),
    ("8x1", "basp", "shared_question:2,20", EVEN),
    ("4x2", "sap", "window:12", ODD),
    ("4x2", "flashcp", "prefix:30", EVEN),
    ("4x2", "nested", "causal", EVEN),
    ("2x4", "zigzag", "causal", ODD),
    ("8x1", "scattered", "causal", ODD),
]
OPTIONS = {"dcp": {"block": 16}}
SCATTERED = {
    "4x1": {"relay": True, "detours": True},
    "8x1": {"relay": True, "topology": hsap.Topology(4, 2)},
}
"""How blocks are scattered by chance: the planners of the package don't ask for these things."""
RANKS = {2: [5, 6], 4: [2, 3, 4, 5], 8: list(range(8))}
"""The ranks of the world of 8 that form an SP group of that size; not the first ones, so that ranks must be mapped."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_plan(topology: str, planner: str, mask: str, heads: tuple[int, int, int], dtype: str) -> hsap.Plan:
    problem = hsap.Problem(
        hsap.Layout.from_lengths(LENGTHS, SEQUENCES),
        heads=hsap.HeadShape(*heads, dtype),
        topology=hsap.Topology.parse(topology),
        masks=((mask, 1),),
        cluster=hsap.Cluster(ranks_per_node=4 if topology == "8x1" else 2),
    )
    if planner == "scattered":
        return build(problem, scattered(problem, 2, **SCATTERED[topology]), planner, {})
    return hsap.compile(problem, planner, **OPTIONS.get(planner, {}))


def make_tensors(plan: hsap.Plan) -> list[torch.Tensor]:
    generator, heads = torch.Generator().manual_seed(3), plan.problem.heads
    counts = (heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_q_heads)
    shapes = [(sum(LENGTHS), count, heads.head_dim) for count in counts]
    return [torch.randn(shape, generator=generator).to(DTYPES[heads.dtype]) for shape in shapes]


def on_rank(rank: int, stored: list[bytes]) -> list:
    """Run all plans that this rank is part of in one world: processes take longer to start than the cases to run."""
    groups = {size: dist.new_group(ranks) for size, ranks in RANKS.items()}
    mine = {size: group for size, group in groups.items() if rank in RANKS[size]}
    sessions = {(d, size): hsap.Session(g, dtype=DTYPES[d]) for d in DTYPES for size, g in mine.items()}
    results = []
    for plan in map(hsap.Plan.from_bytes, stored):
        assert hsap.verify(plan).ok
        session = sessions.get((plan.problem.heads.dtype, plan.num_ranks))
        results.append([] if session is None else run_case(plan, session))
    return results


def run_case(plan: hsap.Plan, session: hsap.Session) -> list:
    """Forward and backward twice over the run's arena, as two layers do, through the autograd module."""
    q, k, v, grad_o = make_tensors(plan)
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


def test_every_planner_is_run() -> None:
    """On 4 and 8 processes, of every planner at least one."""
    run = {planner for topology, planner, *_ in CASES if hsap.Topology.parse(topology).num_ranks >= 4}
    assert set(PLANNERS) <= run


@pytest.mark.slow
def test_executor_is_the_reference() -> None:
    """Bit for bit, in the two dtypes in turn."""
    plans = [make_plan(*case, dtype) for case, dtype in zip(CASES, itertools.cycle(DTYPES))]
    assert all(hsap.verify(plan).ok for plan in plans)
    by_rank = run_ranks(8, on_rank, [plan.to_bytes() for plan in plans])
    for number, (case, plan) in enumerate(zip(CASES, plans)):
        *inputs, grad_o = make_tensors(plan)
        o, _, dq, dk, dv = hsap.reference(plan, *inputs, grad_o=grad_o)
        for sp_rank, rank in enumerate(RANKS[plan.num_ranks]):
            rows = torch.from_numpy(positions(plan.rank_spans(sp_rank)))
            for want, got in zip((o, dq, dk, dv), by_rank[rank][number], strict=True):
                assert torch.equal(want[rows], got), f"{case} {plan.problem.heads.dtype} rank {sp_rank}"
