"""Mutation test: whatever is changed in a valid plan, the verifier rejects it or the change is harmless."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from hsap.api import compile
from hsap.compiler.pipeline import build
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.program import Op
from hsap.planners import PLANNERS
from hsap.verify import verify
from tests.mutation.mutants import NAMES, corrupt, drop_one, mutate
from tests.mutation.oracle import failure
from tests.strategies import scattered

TOPOLOGIES = {"4x1": (7, 2, 11), "2x2": (9, 1, 4), "3x2": (5, 8), "1x3": (6, 5)}
HEADS = {"4x1": HeadShape(2, 2, 1, "fp64"), "2x2": HeadShape(4, 2, 1, "fp64"), "3x2": HeadShape(3, 1, 1, "fp64"),
         "1x3": HeadShape(9, 3, 1, "fp64")}  # fmt: skip


def problem(topology: str) -> Problem:
    """Small, of two sequences, over several nodes."""
    lengths = TOPOLOGIES[topology]
    masks = [(Mask(), 1), (Mask("window", (4,)), 1)] if topology == "2x2" else [(Mask(), 1)]
    layout = Layout.from_lengths(lengths, (len(lengths) - 1, 1))
    return Problem(layout, HEADS[topology], Topology.parse(topology), masks, Cluster(ranks_per_node=2))


def plans():
    """Valid plans that all mutants are made from: every planner on two topologies in turn, and two made by chance.

    Planners follow one another, so that few mutants already come from all of them.
    """
    for turn in range(2):
        for place, planner in enumerate(PLANNERS):
            yield compile(problem([*TOPOLOGIES][(place + 2 * turn) % len(TOPOLOGIES)]), planner)
        how = {"relay": True, "detours": True} if turn else {"num_groups": 1, "relay": True, "topology": Topology(2, 2)}
        yield build(problem("4x1"), scattered(problem("4x1"), **how), "scattered", {})


def judge(bases: list, kind: str, wanted: int) -> Counter:
    """Make mutants of a kind and compare verifier and oracle; fails where a wrong plan is let through.

    Counts mutants, killed and harmless ones, and the killed of each planner.
    """
    count = Counter(mutants=0, killed=0, harmless=0)
    for seed in range(20 * wanted):
        plan = bases[seed % len(bases)]
        mutant = mutate(plan, kind, seed)
        if mutant is None or mutant == plan:
            continue
        report = verify(mutant)
        str(report)
        count["mutants"] += 1
        count["killed" if not report.ok else "harmless"] += 1
        count[plan.planner] += not report.ok
        if report.ok:
            reason = failure(mutant, plan)
            assert reason is None, f"{kind} seed {seed} on {plan.planner} {plan.problem.topology}: {reason}"
        if count["mutants"] == wanted:
            break
    return count


@pytest.fixture(scope="module")
def bases() -> list:
    return list(plans())


def test_bases_are_right(bases):
    for plan in bases:
        assert verify(plan).ok, str(verify(plan))
        assert failure(plan) is None


@pytest.mark.parametrize("op", [op for op in Op if op != Op.WAIT])
def test_the_oracle_misses_no_dropped_instruction(bases, op):
    for plan, direction in itertools.product(bases, (0, 1)):
        there = plan.programs[0][direction].op == op
        if there.any():
            assert failure(drop_one(plan, 0, direction, int(there.argmax())), plan) is not None


@pytest.mark.parametrize("kind", NAMES)
def test_mutants_are_rejected_or_harmless(bases, kind):
    count = judge(bases, kind, 20)
    assert count["mutants"] == 20
    assert count["killed"] > 0


@pytest.mark.slow
def test_two_thousand_mutants(bases):
    totals = {kind: judge(bases, kind, 150) for kind in NAMES}
    print("\n" + "\n".join(f"{kind:20} {dict(count)}" for kind, count in totals.items()))
    total = sum(totals.values(), Counter())
    assert total["mutants"] >= 2000
    assert min(total[planner] for planner in PLANNERS) >= 100


@pytest.mark.parametrize("part", range(4))
def test_hostile_columns_never_crash_the_verifier(bases, part):
    for seed in range(part * 100, part * 100 + 100):
        plan = bases[seed % len(bases)]
        hostile = corrupt(plan, seed)
        start = time.perf_counter()
        report = verify(hostile)
        assert time.perf_counter() - start < 60  # not a measurement: a hang must not pass
        str(report)
        if report.ok:
            assert failure(hostile, plan) is None
