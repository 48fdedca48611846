"""The public door: compile a problem into a plan, simulate a plan, let the simulator choose among planners."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hsap import clusters
from hsap.ir.check import Refused, instance
from hsap.ir.plan import Plan
from hsap.ir.problem import Cluster, Problem

if TYPE_CHECKING:
    from hsap.sim import Timeline


def compile(problem: Problem, planner: str = "sap", **options: Any) -> Plan:
    """Compile a packed batch into the streams of every rank.

    planner: a name of `hsap.planners.PLANNERS`, or auto; options are its own and enter the plan's hash. Deterministic.
    auto compiles with each of its candidates and gives the plan that the simulator says is fastest on the problem's
    cluster, forward and backward, over all layers; the plan is the winner's in every way, and its `choice` says what
    became of each candidate.
    ValueError: no `Problem`, unknown planner or option, a value that a plan can't keep (they are words, finite numbers,
    truth values and None), or a plan that exceeds the problem's token or arena limit.
    """
    # Planners and passes bring numba, which takes longer to import than all else that a command line needs.
    from hsap import planners
    from hsap.compiler.pipeline import build

    instance("compile: problem", problem, Problem, "an hsap.Problem")
    if planner == planners.AUTO:
        planners.check_options(planner, options)
        return _choose(problem, **options)
    return build(problem, planners.run(planner, problem, options), planner, options)


def simulate(plan: Plan, cluster: Cluster | str | None = None) -> Timeline:
    """Run a plan against the clock: when every instruction starts and ends, and what ranks wait for.

    cluster: a `Cluster`, the name of a preset or the path of a YAML file, or None for the plan's own. ValueError:
    unknown preset, too few nodes, or streams that never end (those of a verified plan do).
    """
    # Loaded when first used: its compiled loops take a second to load, and most who plan need no clock.
    from hsap.sim import simulate as run

    instance("simulate: plan", plan, Plan, "an hsap.Plan")
    if cluster is None:
        cluster = plan.problem.cluster
    elif isinstance(cluster, str):
        cluster = clusters.read(cluster)
    return run(plan, instance("simulate: cluster", cluster, Cluster, "an hsap.Cluster or the name of a preset"))


def _choose(problem: Problem, candidates: str | None = None) -> Plan:
    """Give the plan that is predicted fastest; of equally fast ones the first in the table of planners."""
    from hsap import planners

    best: Plan | None = None
    choice: dict[str, float | str] = {}
    least = float("inf")
    for name in planners.candidates(candidates):
        try:
            plan = compile(problem, name)
        except Refused as error:  # too many tokens, too small an arena, a mask or topology that it doesn't do
            choice[name] = str(error)
            continue
        choice[name] = seconds = simulate(plan).predicted_s
        if best is None or seconds < least:
            best, least = plan, seconds
    if best is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.items())
        raise Refused(
            f"planner auto: none of its candidates can plan this; name others or relax what they ask for: {reasons}"
        )
    return replace(best, choice=choice)
