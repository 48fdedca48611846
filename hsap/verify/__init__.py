"""Verifier: is a plan right? Judged on the instruction columns alone, before anything runs.

Four families of rules: structure (with placement), dataflow, progress, memory. The planner's chart and the stage column
are for people: they need only be possible.
"""

from __future__ import annotations

from hsap.ir.check import instance
from hsap.ir.listing import Listing
from hsap.ir.plan import Plan
from hsap.verify.listing import check_listing
from hsap.verify.placement import check_plan
from hsap.verify.report import Fault, Report

__all__ = ["Fault", "Report", "verify"]


def verify(plan: Plan | Listing) -> Report:
    """Check a plan against its problem; never raises, whatever the plan's columns hold (ValueError: it is no plan).

    Of a listing in the paper's spelling only the transfers between its ranks can be judged.

    A sound plan computes every visible pair once per query head in both directions, finishes under rendezvous, and
    stays within its buffers and the arena. Rules run in order; streams with unsound structure are not looked at
    further. A plan that was read may be run once it has passed. The rules are ours.
    """
    if isinstance(plan, Listing):
        return Report(plan, tuple(check_listing(plan)))
    faults = check_plan(instance("verify: plan", plan, Plan, "an hsap.Plan or a Listing"))
    if not faults:
        # The rules' loops bring numba, which takes longer to import than all else that a command line needs.
        from hsap.verify.rules import check_programs

        faults = check_programs(plan)
    if not faults:
        plan.vouched()
    return Report(plan, tuple(faults))
