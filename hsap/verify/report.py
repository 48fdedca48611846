"""Report: what the verifier found, and the grid of ranks × steps that shows where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsap.ir.listing import Listing
from hsap.ir.program import Op
from hsap.ir.schedule import DIRECTIONS

if TYPE_CHECKING:
    from hsap.ir.plan import Plan

LETTERS = {
    Op.SEND: "S",
    Op.RECV: "R",
    Op.LAUNCH: "L",
    Op.WAIT: "W",
    Op.ATTEND: "A",
    Op.ATTEND_GRAD: "G",
    Op.MERGE: "M",
    Op.SUM: "+",
    Op.COPY: "C",
    Op.ALL_TO_ALL: "X",
}
"""One letter for each instruction in the grid; `?` is none of them, `.` a stream that has ended."""

STEPS_AROUND = 6
RANKS_AROUND = 4


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken rule.

    rule: `family.name` of the rule. mask, direction: which program ("forward", "backward"), None where it is the whole
    plan's. rank: where. instruction: index in that rank's stream. None where there is no such place.
    """

    rule: str
    mask: int | None
    direction: str | None
    rank: int | None
    instruction: int | None
    message: str

    def __str__(self) -> str:
        place = [] if self.mask is None else [f"mask {self.mask} {self.direction}"]
        place += [] if self.rank is None else [f"rank {self.rank}"]
        place += [] if self.instruction is None else [f"instruction {self.instruction}"]
        return f"{self.rule}: {', '.join(place)}{': ' if place else ''}{self.message}"


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """Outcome of a verification; `str` draws each fault into its surroundings. errors: at most a few a rule."""

    plan: Plan | Listing
    errors: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        return not self.errors

    def __str__(self) -> str:
        if self.ok:
            return f"ok: {self.plan.num_instructions} instructions of {self.plan.num_ranks} ranks"
        parts = [f"{len(self.errors)} fault{'s' * (len(self.errors) > 1)} found; the plan must not be run"]
        for number, fault in enumerate(self.errors, 1):
            parts.append(f"[{number}] {fault}")
            if fault.rank is not None and fault.instruction is not None:
                parts.append(_grid(self.plan, fault))
        return "\n".join(parts)


def _grid(plan: Plan | Listing, fault: Fault) -> str:
    """Draw the ranks and steps around a fault, one letter an instruction, the fault in brackets."""
    assert fault.instruction is not None
    first = max(fault.instruction - STEPS_AROUND, 0)
    steps = range(first, fault.instruction + STEPS_AROUND + 1)
    lines = ["      step " + "".join(f"{step:^5}" for step in steps)]
    for rank, ops in _streams(plan, fault):
        row = f"  rank {rank:>3} "
        for step in steps:
            letter = LETTERS.get(ops[step], "?") if step < len(ops) else "."
            marked = (rank, step) == (fault.rank, fault.instruction)
            row += f"{f'[{letter}]' if marked else letter:^5}"
        lines.append(row.rstrip())
    return "\n".join(lines)


def _streams(plan: Plan | Listing, fault: Fault) -> list[tuple[int, list[Any]]]:
    """Ops of the ranks near a fault's, as (rank, ops)."""
    if isinstance(plan, Listing):
        return [(rank, [line.op for line in lines]) for rank, lines in plan.streams]
    assert fault.mask is not None and fault.direction is not None and fault.rank is not None
    programs = plan.programs[fault.mask][DIRECTIONS.index(fault.direction)]
    borders = programs.offsets.tolist()
    ranks = range(max(fault.rank - RANKS_AROUND, 0), min(fault.rank + RANKS_AROUND + 1, len(borders) - 1))
    return [(rank, programs.op[borders[rank] : borders[rank + 1]].tolist()) for rank in ranks]
