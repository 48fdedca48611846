"""The fuzzers themselves: what they draw, what they find, and what they say of it."""

from collections import Counter

import numpy as np
import pytest

from hsap.ir.plan import Plan
from tests.bench import chainfuzz, planfuzz


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return planfuzz.corpus()


def test_damaged_files_are_refused_or_right(plans):
    count = Counter()
    for plan in plans[-2:]:
        planfuzz.follow(plan.to_bytes(), count, set())
    for number in range(60):
        planfuzz.follow(planfuzz.draw(np.random.default_rng(number), plans), count, {plan.hash for plan in plans})
    assert count["files"] == 62 and count["compared"] >= 2 and count["read"] < 40


def test_a_refusal_of_several_lines_is_found(monkeypatch, plans):
    def refuse(data):
        raise ValueError("it is wrong,\nand this is why")

    monkeypatch.setattr(Plan, "from_bytes", refuse)
    with pytest.raises(planfuzz.Misread, match="refused by"):
        planfuzz.read(plans[-1].to_bytes())


def test_a_plan_that_isn_t_right_and_memory_without_bound_are_found(monkeypatch, plans):
    monkeypatch.setattr(planfuzz, "untrue", lambda plan: "wrong o")
    with pytest.raises(planfuzz.Misread, match="isn't right: wrong o"):
        planfuzz.follow(plans[-1].to_bytes(), Counter(), set())
    monkeypatch.setattr(planfuzz, "READ_BASE", -(1 << 30))
    with pytest.raises(planfuzz.Misread, match="to read"):
        planfuzz.follow(plans[-1].to_bytes(), Counter(), set())


def test_a_case_that_fails_is_made_small_and_told(monkeypatch):
    monkeypatch.setattr(chainfuzz, "compile", lambda problem, planner, **options: _Broken(problem))
    monkeypatch.setattr(chainfuzz, "verify", lambda plan: plan)
    monkeypatch.setattr(chainfuzz, "parse", lambda text: text)
    monkeypatch.setattr(chainfuzz, "untrue", lambda plan: None)
    monkeypatch.setattr(chainfuzz.Plan, "from_bytes", lambda data: _Broken)
    case, why = chainfuzz.run(0, 60, Counter())
    assert sum(case.lengths) == 5 and case.topology == "1x1" and case.planner == "ring" and "five" in why
    assert eval(repr(case), {"Case": chainfuzz.Case}) == case


class _Broken:
    """A plan that is no good from five tokens on."""

    def __init__(self, problem):
        self.ok, self.hash = problem.layout.num_tokens < 5, ""

    def __str__(self):
        return "five tokens"

    def text(self):
        return _Broken

    @staticmethod
    def to_bytes():
        return b""


def test_a_few_cases_hold():
    assert chainfuzz.run(7, 4, count := Counter()) is None
    assert count["cases"] + count["refused"] == 4
