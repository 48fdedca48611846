"""Judge: what the verifier says of a mutant, and the oracles where it lets one through."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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


class Verdict(NamedTuple):
    """What became of a mutant. outcome: rejected, equivalent or wrong. why: the rule that rejects, or what is wrong."""

    digest: str
    planner: str
    kind: str
    outcome: str
    why: str | None


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


def judge(base: Plan, kind: str, seed: int, oracle: Callable[[Plan, Plan], str | None] = wrong_with) -> Verdict | None:
    """Judge one mutant; None where the plan has nothing of that kind, or the change leaves it as it is.

    oracle: says what is wrong with a mutant that is let through, given what it was made from.
    """
    mutant = make(base, kind, seed)
    if mutant is None or mutant.hash == base.hash:
        return None
    report = verify(mutant)
    str(report)
    if not report.ok:
        return Verdict(mutant.hash, base.planner, kind, "rejected", report.errors[0].rule)
    why = oracle(mutant, base)
    if why is None:
        return Verdict(mutant.hash, base.planner, kind, "equivalent", None)
    told = f"{kind} seed {seed} on {base.planner} {base.problem.topology} {base.problem.masks[0][0]}: {why}"
    return Verdict(mutant.hash, base.planner, kind, "wrong", told)
