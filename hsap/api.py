"""Compile: a problem and the name of a planner become a plan."""

from __future__ import annotations

from hsap.ir.check import instance
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem


def compile(problem: Problem, planner: str = "sap", **options) -> Plan:
    """Compile a packed batch into the streams of every rank.

    planner: a name of `hsap.planners.PLANNERS`; options are its own and enter the plan's hash. Deterministic.
    ValueError: no `Problem`, unknown planner or option, a value that a plan can't keep (they are words, finite numbers,
    truth values and None), or a plan that exceeds the problem's token or arena limit.
    """
    # Planners and passes bring numba, which takes longer to import than all else that a command line needs.
    from hsap import planners
    from hsap.compiler.pipeline import build

    instance("compile: problem", problem, Problem, "an hsap.Problem")
    return build(problem, planners.run(planner, problem, options), planner, options)
