"""Every column of a plan by name, and each kind of change to what stands in it: what a disk or a stranger does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.plan import Plan
from hsap.ir.program import Buffers, Programs
from tests.mutation.mutants import Random, with_program

PLACEMENT = ("spans", "column_rows", "rank_rows")
SHARDS = tuple(f"shards.{f.name}" for f in fields(Shards))
OF_PROGRAMS = tuple(f.name for f in fields(Programs) if f.name != "buffers")
OF_BUFFERS = tuple(f"buffers.{f.name}" for f in fields(Buffers))
COLUMNS = (*PLACEMENT, *SHARDS, "slice table", "chart", *OF_PROGRAMS, *OF_BUFFERS)
"""Every column that a plan has; from the slice table on for each mask, and from the chart on for each direction."""


def column(plan: Plan, name: str, mask: int = 0, direction: int = 0) -> np.ndarray:
    """Give a column by its name."""
    if name in PLACEMENT:
        return getattr(plan, name)
    if name in SHARDS:
        return getattr(plan.shards, name.removeprefix("shards."))
    if name == "slice table":
        return plan.slices[mask]
    if name == "chart":
        return plan.chart[mask][direction]
    programs = plan.programs[mask][direction]
    return getattr(programs.buffers if name in OF_BUFFERS else programs, name.removeprefix("buffers."))


def with_named(plan: Plan, name: str, value: np.ndarray, mask: int = 0, direction: int = 0) -> Plan:
    """Put another column in its place."""
    if name in PLACEMENT:
        return replace(plan, **{name: value})
    if name in SHARDS:
        return replace(plan, shards=replace(plan.shards, **{name.removeprefix("shards."): value}))
    if name == "slice table":
        return replace(plan, slices=(*plan.slices[:mask], value, *plan.slices[mask + 1 :]))
    if name == "chart":
        pairs = [list(pair) for pair in plan.chart]
        pairs[mask][direction] = value
        return replace(plan, chart=tuple(tuple(pair) for pair in pairs))
    programs = plan.programs[mask][direction]
    if name in OF_BUFFERS:
        changed = replace(programs, buffers=replace(programs.buffers, **{name.removeprefix("buffers."): value}))
    else:
        changed = replace(programs, **{name: value})
    return with_program(plan, mask, direction, changed)


def step(random: Random, table: np.ndarray) -> np.ndarray:
    """One value more or less by one."""
    flat = table.reshape(-1)
    i = random.integers(len(flat))
    if table.dtype == np.bool_:
        flat[i] ^= True
    else:
        flat[i] += random.choice([-1, 1])
    return table


def jump(random: Random, table: np.ndarray) -> np.ndarray:
    """One value becomes any of those between the least and the largest, and one beyond each."""
    flat = table.reshape(-1)
    flat[random.integers(len(flat))] = random.integers(int(flat.min()) - 1, int(flat.max()) + 2)
    return table


def flip(random: Random, table: np.ndarray) -> np.ndarray:
    """One bit."""
    raw = table.reshape(-1).view(np.uint8)
    raw[random.integers(len(raw))] ^= np.uint8(1 << random.integers(8))
    return table


def swap(random: Random, table: np.ndarray) -> np.ndarray:
    """Two rows change places."""
    i, j = random.integers(len(table), size=2)
    table[[i, j]] = table[[j, i]]
    return table


def follow(random: Random, table: np.ndarray) -> np.ndarray:
    """A row becomes what another is."""
    i, j = random.integers(len(table), size=2)
    table[i] = table[j]
    return table


def fall(random: Random, table: np.ndarray) -> np.ndarray:
    """A row is left out, of this column alone."""
    return np.delete(table, random.integers(len(table)), axis=0)


def double(random: Random, table: np.ndarray) -> np.ndarray:
    """A row is there twice, in this column alone."""
    i = random.integers(len(table))
    return np.insert(table, i, table[i], axis=0)


CHANGES = (step, jump, flip, swap, follow, fall, double)


def _changed(name: str, random: Random, plan: Plan) -> Plan | None:
    mask, direction = random.integers(len(plan.programs)), random.integers(2)
    table = np.array(column(plan, name, mask, direction))
    if not table.size:
        return None
    change = CHANGES[random.choice(len(CHANGES), p=[0.3, 0.2, 0.1, 0.15, 0.15, 0.05, 0.05])]
    return with_named(plan, name, change(random, table), mask, direction)


KINDS: dict[str, Callable[[Random, Plan], Plan | None]] = {
    f"column {name}": partial(_changed, name) for name in COLUMNS
}
"""A kind for each column."""
