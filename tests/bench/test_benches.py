"""The benches run: what they measure is left to whoever starts them."""

from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.planners import PLANNERS
from tests.bench import accuracy, planning


def test_every_planner_has_a_row():
    problem = Problem(Layout.from_lengths([40, 7, 90]), HeadShape(4, 2, 8), Topology(2, 2))
    for planner in PLANNERS:
        cells = planning.row(planner, "small", problem).split()
        assert cells[:3] == [planner, "small", "2x2"] and len(cells) == len(planning.HEADER.split()) - 1


def test_the_accuracy_bench_measures_every_tensor():
    errors, want = accuracy.errors(accuracy.hsap.Topology(2, 1), "sap", "fp32", "native", "fp32")
    assert len(errors) == len(want) == len(accuracy.NAMES) and (errors > 0).all() and errors.max() < 1e-5
