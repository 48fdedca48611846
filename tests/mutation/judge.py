"""Judge: what the verifier says of a mutant, and the oracles where it lets one through."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hsap.ir.check import Refused
from hsap.ir.plan import Plan
from hsap.verify import verify
from tests.mutation import columns, header, mutants, tables, together
from tests.mutation.oracle import failure
from tests.mutation.truth import beyond_limits, untrue

Change = Callable[[np.random.Generator, Plan], Plan | None]


def _of_programs(change: Callable) -> Change:
    """Let a change of one program be one of a plan, for any of its masks and either direction."""

    def changed(random: np.random.Generator, plan: Plan) -> Plan | None:
        mask, direction = random.integers(len(plan.programs)), random.integers(2)
        p = plan.programs[mask][direction]
        programs = change(random, plan, p) if len(p) else None
        return None if programs is None else mutants.with_program(plan, mask, direction, programs)

    return changed


KINDS: dict[str, Change] = {
    **{f.__name__: _of_programs(f) for f in (*mutants.PROGRAM_MUTATIONS, *together.PROGRAM_CHANGES)},
    **{f.__name__: f for f in (*mutants.PLAN_MUTATIONS, *tables.PLAN_CHANGES)},
    **columns.KINDS,
    **header.KINDS,
}
"""All kinds of change by name."""


@dataclass
class Tally:
    """What became of the mutants, by planner and by kind, and the rules that reject them. wrong: those let through."""

    by_planner: dict[str, Counter] = field(default_factory=dict)
    by_kind: dict[str, Counter] = field(default_factory=dict)
    rules: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    @property
    def total(self) -> Counter:
        return sum(self.by_kind.values(), Counter())

    def count(self, planner: str, kind: str, outcome: str) -> None:
        for table, key in ((self.by_planner, planner), (self.by_kind, kind)):
            table.setdefault(key, Counter())[outcome] += 1
            table[key]["mutants"] += 1


def make(plan: Plan, kind: str, seed: int) -> Plan | None:
    """Make a mutant of a kind, the same for the same seed; None where the plan has nothing of that kind."""
    random = np.random.default_rng([list(KINDS).index(kind), seed])
    try:
        return KINDS[kind](random, plan)
    except Refused:  # a problem that is none can't be in a plan
        return None


def runs_the_same(mutant: Plan, base: Plan) -> bool:
    """Whether all that a machine reads of two plans is the same: the charts, names and prices aren't."""
    same = all(getattr(mutant, name) is getattr(base, name) for name in ("spans", "column_rows", "rank_rows", "shards"))
    one, other = mutant.problem, base.problem
    same &= one.layout.lengths == other.layout.lengths and one.heads == other.heads and one.masks == other.masks
    same &= mutant.slices is base.slices and mutant.programs is base.programs and mutant.topology == base.topology
    return same and one.wire_dtype == other.wire_dtype


def wrong_with(mutant: Plan, base: Plan | None = None) -> str | None:
    """Say what is wrong with a plan by the oracles: the model machine, then real numbers; None if nothing is."""
    if base is not None and runs_the_same(mutant, base):
        return beyond_limits(mutant)
    problem, plain = mutant.problem, mutant.problem.heads.dtype == "fp64"
    known = base is not None and problem == base.problem and mutant.topology == base.topology
    known = known and all(
        getattr(mutant, name) is getattr(base, name) for name in ("spans", "column_rows", "rank_rows")
    )
    right = base if known else None
    if plain and problem.wire_dtype in (None, "fp64"):  # else the machine's cells aren't what buffers are cut into
        why = failure(mutant, right)
        if why is not None:
            return why
    return beyond_limits(mutant) or untrue(mutant, right)


def judge(tally: Tally, base: Plan, kind: str, seed: int) -> bool:
    """Judge one mutant; returns whether there was one that hadn't been before."""
    mutant = make(base, kind, seed)
    if mutant is None or mutant.hash == base.hash or mutant.hash in tally.seen:
        return False
    tally.seen.add(mutant.hash)
    report = verify(mutant)
    str(report)
    if report.ok:
        why = wrong_with(mutant, base)
        outcome = "equivalent" if why is None else "wrong"
        if why is not None:
            tally.wrong.append(f"{kind} seed {seed} on {base.planner} {base.problem.topology}: {why}")
    else:
        outcome = "rejected"
        tally.rules[report.errors[0].rule] += 1
    tally.count(base.planner, kind, outcome)
    return True
