"""Mutation test: whatever is changed in a valid plan, the verifier rejects it or the change is harmless.

`tests.bench.mutants` is the long form: plans of every planner with every mask, and a second oracle.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest

from hsap.ir.program import Op
from hsap.verify import verify
from tests.bench import mutants as bench
from tests.mutation.bases import chosen
from tests.mutation.judge import KINDS, Verdict, judge
from tests.mutation.mutants import corrupt, drop_one
from tests.mutation.oracle import failure

WANTED = 12
"""Mutants of each kind."""
HARMLESS = {"rounds_get_other_numbers", "index_is_turned", "column chart", "header cluster", "header packs",
            "header names", "header lengths", "arena_is_shifted", "column stage"}  # fmt: skip
"""Kinds that may well be right always: nothing has to be rejected of them."""


@pytest.fixture(scope="module")
def bases() -> list:
    return chosen()


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


@pytest.mark.parametrize("kind", KINDS)
def test_mutants_are_rejected_or_harmless(bases, kind):
    count = Counter()
    for seed in range(20 * WANTED):
        base = bases[seed % len(bases)]
        verdict = judge(base, kind, seed, oracle=failure)
        if verdict is not None:
            assert verdict.outcome != "wrong", verdict.why
            count[verdict.outcome] += 1
        if count.total() == WANTED:
            break
    assert count.total() == WANTED
    assert count["rejected"] or kind in HARMLESS


def test_what_an_oracle_says_of_a_mutant_that_is_let_through_is_told(bases):
    verdict = next(v for seed in range(99) if (v := judge(bases[0], "arena_is_shifted", seed, oracle=lambda *_: "no")))
    assert verdict.outcome == "wrong" and verdict.why.endswith(": no")


def test_the_bench_counts_each_mutant_once_and_writes_its_tables(tmp_path):
    tally = bench.Tally()
    tally.add([Verdict("a", "ring", "drop", "rejected", "memory.apart"), Verdict("b", "sap", "drop", "wrong", "why")])
    tally.add([Verdict("a", "sap", "swap_neighbours", "rejected", "memory.fits")])
    bench.write(tmp_path / "m.md", tally, bench.conditions())
    text = (tmp_path / "m.md").read_text()
    assert "| all | 2 | 1 | 0 | 1 |" in text and "| memory.apart | 1 |" in text and "- why" in text
    tally.add(Verdict(str(i), "ring", "index_is_turned", "equivalent", None) for i in range(3))
    assert set(KINDS) - set(tally.wanted(3)) == {"index_is_turned"}


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
