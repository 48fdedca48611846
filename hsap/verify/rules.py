"""Rules: all that instructions are judged by, in the order in which they build on each other."""

from __future__ import annotations

from hsap.ir.plan import Plan
from hsap.verify import dataflow, memory, progress, structure
from hsap.verify.report import Fault
from hsap.verify.slices import check_tables
from hsap.verify.stream import Stream, apply


def check_programs(plan: Plan) -> list[Fault]:
    """Check slices and streams of a plan whose columns and placement are sound (`placement.check_plan`)."""
    faults = check_tables(plan)
    if faults:
        return faults
    for mask in range(len(plan.programs)):
        for stream in Stream.both(plan, mask):
            faults += _check_stream(stream)
    return faults


def _check_stream(stream: Stream) -> list[Fault]:
    for stage, rules in enumerate(structure.STAGES):
        faults = apply("structure", rules, stream)
        if faults:
            return faults
        if stage == structure.OPERANDS_STAGE:
            stream = stream.with_lives()
    faults = apply("progress", progress.RULES, stream)
    faults += apply("dataflow", dataflow.RULES, stream)
    return faults + apply("memory", memory.RULES, stream)
