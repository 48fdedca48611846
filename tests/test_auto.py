"""Planner auto: the fastest candidate by the simulator's own prediction, said with all that it was compared to."""

from dataclasses import replace

import numpy as np
import pytest

import hsap
from hsap import planners
from hsap.cli.plan import read_planner
from hsap.ir.plan import Plan
from hsap.ir.problem import Cluster
from hsap.ir.reader import parse
from hsap.ir.summary import summary

HEADS = hsap.HeadShape(8, 2, 32)
CHEAP = "ring|zigzag|distflash|sap"


def problem(lengths=(3000, 20, 500), topology="4x2", masks=(("causal", 3), ("window:100", 1)), **others):
    return hsap.Problem(hsap.Layout.from_lengths(lengths), HEADS, hsap.Topology.parse(topology), masks, **others)


CASES = (
    problem(),
    problem((100,) * 30, "8x1", cluster=Cluster(ranks_per_node=2)),
    problem((4000,), "5x1", (("full", 1),)),
    problem((1, 1), "4x1"),
    problem((), "2x1"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda p: f"{p.layout.num_tokens}-{p.topology}")
def test_the_choice_is_the_best_of_its_candidates(case) -> None:
    plan = hsap.compile(case, "auto", candidates=CHEAP)
    each = {name: hsap.simulate(hsap.compile(case, name)).predicted_s for name in CHEAP.split("|")}
    assert plan.choice == each and list(plan.choice) == list(each)
    assert hsap.simulate(plan).predicted_s == min(each.values())
    assert plan.planner == min(each, key=each.get)  # the first of equals
    assert hsap.verify(plan).ok


def test_every_fast_planner_is_a_candidate() -> None:
    plan = hsap.compile(problem(), "auto")
    assert set(plan.choice) == {name for name, planner in planners.PLANNERS.items() if not planner.slow}
    times = [found for found in plan.choice.values() if isinstance(found, float)]
    assert plan.choice[plan.planner] == min(times) and len(times) >= 4


def test_the_choice_is_kept_but_is_no_part_of_the_plan() -> None:
    """Equal to what the winner makes by itself, and its choice survives both stored forms."""
    plan = hsap.compile(problem(), "auto", candidates=CHEAP)
    alone = hsap.compile(problem(), plan.planner)
    assert plan == alone and plan.hash == alone.hash and alone.choice is None
    for again in (Plan.from_bytes(plan.to_bytes()), parse(plan.text())):
        assert again == plan and again.choice == plan.choice
    assert summary(plan)["choice"] == plan.choice and summary(alone)["choice"] is None
    assert Plan.from_bytes(alone.to_bytes()).choice is None and "\nchoice" not in alone.text()


@pytest.mark.parametrize("choice", [[1], {"sap": None}, {"sap": {"a": 1}}, {"sap": 3}])
def test_a_choice_that_is_none_is_refused(choice) -> None:
    plan = replace(hsap.compile(problem(), "ring"), choice=choice)
    with pytest.raises(ValueError, match="choice"):
        Plan.from_bytes(plan.to_bytes())


def test_a_candidate_that_exceeds_the_limits_says_why() -> None:
    """A ring with full attention needs more arena than the others that overlap less of it."""
    whole = problem((4000,), "4x1", (("causal", 1),))
    needs = {}
    for multiple in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        tight = replace(whole, arena_multiple=multiple)
        for name in CHEAP.split("|"):
            try:
                hsap.compile(tight, name)
            except ValueError as error:
                needs.setdefault(multiple, {})[name] = str(error)
    multiple, refused = next((m, names) for m, names in needs.items() if 0 < len(names) < 4)
    plan = hsap.compile(replace(whole, arena_multiple=multiple), "auto", candidates=CHEAP)
    assert {name: found for name, found in plan.choice.items() if isinstance(found, str)} == refused
    assert plan.planner not in refused
    with pytest.raises(ValueError, match=r"none of its candidates.*ring: planner ring.*raise arena_multiple.*zigzag: "):
        hsap.compile(replace(whole, arena_multiple=0.01), "auto", candidates=CHEAP)


def test_candidates_are_read_as_the_command_line_spells_them() -> None:
    name, options = read_planner("auto:candidates=zigzag|ring")
    assert list(hsap.compile(problem(), name, **options).choice) == ["ring", "zigzag"]  # the order of the table
    assert planners.candidates("ring, sap") == ("ring", "sap")
    for wrong, told in (
        ({"candidates": "ring|swing"}, "unknown candidate 'swing'; known planners are ring"),
        ({"candidates": "auto"}, "unknown candidate 'auto'"),
        ({"candidates": ""}, "unknown candidate ''"),
        ({"candidates": 3}, "candidates is 3"),
        ({"candidate": "ring"}, "unknown option 'candidate'; it takes candidates"),
    ):
        with pytest.raises(ValueError, match=told):
            hsap.compile(problem(), "auto", **wrong)


def test_auto_is_listed_among_the_planners() -> None:
    assert [row["name"] for row in planners.listing()] == [*planners.PLANNERS, "auto"]
    assert planners.listing()[-1]["options"] == {"candidates": "|".join(planners.candidates())}
    with pytest.raises(ValueError, match=r"known planners are ring, .*, auto"):
        hsap.compile(problem(), "unheard_of")


def test_a_mistake_in_a_planner_is_no_refusal(monkeypatch):
    def broken(problem):
        return np.zeros(2) + np.zeros(3)  # NumPy says so by a ValueError

    monkeypatch.setitem(planners.PLANNERS, "ring", replace(planners.PLANNERS["ring"], plan=broken))
    with pytest.raises(ValueError, match="broadcast"):
        hsap.compile(problem(), "auto", candidates=CHEAP)
