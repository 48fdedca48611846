"""Whatever a strategy asks for, its plan is sound and gives the answer of float64 mathematics."""

import pytest
import torch

import hsap
from hsap.compiler.pipeline import build
from tests.runtime.oracle import attention, tensors
from tests.strategies import scattered

CASES = [("3x1", (4, 2)), ("4x1", (8, 4)), ("3x2", (9, 3)), ("2x2", (28, 4)), ("6x1", (8, 2))]
LENGTHS = (9, 14, 2, 1)


def make(asked: str, heads: tuple[int, int], ranks_per_node: int = 8, first_rank: int = 0, **how) -> hsap.Plan:
    problem = hsap.Problem(
        hsap.Layout.from_lengths(LENGTHS),
        hsap.HeadShape(*heads, 4, "fp64"),
        hsap.Topology.parse(asked),
        (("causal", 1), ("window:5", 2)),
        hsap.Cluster(ranks_per_node=ranks_per_node, first_rank=first_rank),
    )
    return build(problem, scattered(problem, **how), "scattered", {})


def check(plan: hsap.Plan) -> None:
    """Verify a plan and compare the reference, forward and backward, with attention by its definition."""
    report = hsap.verify(plan)
    assert report.ok, report
    q, k, v, grad_o = tensors(plan.problem, torch.float64)
    for mask in range(len(plan.problem.masks)):
        got = hsap.reference(plan, q, k, v, grad_o=grad_o, mask=mask)
        for g, w in zip(got, attention(plan.problem, q, k, v, grad_o, mask)):
            torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("topology", "heads"), CASES)
def test_results_that_go_home_over_another_rank(topology, heads):
    for seed, num_groups in ((0, 1), (1, 2)):
        check(make(topology, heads, num_groups=num_groups, seed=seed, detours=True))


@pytest.mark.parametrize("ranks_per_node", [2, 3])
@pytest.mark.parametrize(("topology", "heads"), [("6x1", (8, 2)), ("7x1", (4, 4)), ("4x2", (9, 3)), ("2x3", (28, 4))])
def test_rows_that_cross_a_node_border_once(topology, heads, ranks_per_node):
    for seed, num_groups in ((0, 1), (1, 2)):
        check(make(topology, heads, ranks_per_node, 1, num_groups=num_groups, seed=seed, relay=True, detours=seed == 1))


SHAPES = [("6x1", "3x2", (9, 3)), ("3x2", "2x3", (28, 4)), ("1x4", "4x1", (8, 2)), ("8x1", "2x4", (8, 4))]


@pytest.mark.parametrize(("topology", "own", "heads"), SHAPES)
def test_ranks_that_run_at_another_shape(topology, own, heads):
    for relay in (False, True):
        plan = make(topology, heads, 4, num_groups=2, topology=hsap.Topology.parse(own), relay=relay, detours=relay)
        assert (str(plan.problem.topology), str(plan.topology)) == (topology, own)
        check(plan)
        assert hsap.parse(plan.text()) == plan == hsap.Plan.from_bytes(plan.to_bytes())
