"""Plan: a compiled batch as an immutable value with a content hash; its forms are in `stored` and `text`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from hsap.ir import stored
from hsap.ir.block import Shards
from hsap.ir.check import instance, one_line
from hsap.ir.precision import Precision
from hsap.ir.problem import Problem, Topology, problem_from_json, problem_to_json
from hsap.ir.program import Buffers, Programs
from hsap.ir.schedule import DIRECTIONS, Chart
from hsap.ir.span import row_starts
from hsap.ir.text import print_plan


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Problem, placement, and the forward and backward streams of every rank.

    spans: int64 [n, 2], the span table that all `rows` point into: the shards' spans, those of ranks where
    intra_sp > 1, then spans of shards again, in the orders in which ranks gather them. column_rows: int64 [inter_sp, 2]
    and rank_rows: int64 [num_ranks, 2]: the range of `spans` that an InterSP shard and a rank's local rows are, in row
    order.
    slices[mask]: int64 [n, 6]. programs[mask][direction]: direction 0 is forward, 1 backward.
    chart[mask][direction]: int64 [n, 6], a row per block (and head group), columns `Chart`.
    own_topology: the shape that a whole-group planner runs all ranks at, where it isn't the problem's.
    choice: where planner auto chose this plan, the predicted seconds of each of its candidates, or why it had none. It
    says how the plan came about and nothing of what the plan does, so it is stored but not hashed: the plan is equal
    to what the winner makes by itself, and finds it in a cache.
    """

    problem: Problem
    planner: str
    options: dict[str, Any]
    shards: Shards
    spans: np.ndarray
    column_rows: np.ndarray
    rank_rows: np.ndarray
    slices: tuple[np.ndarray, ...]
    programs: tuple[tuple[Programs, Programs], ...]
    chart: tuple[tuple[np.ndarray, np.ndarray], ...]
    own_topology: Topology | None = None
    choice: dict[str, float | str] | None = None
    _hash: list[Any] = field(default_factory=list, init=False, repr=False)
    _read: list[bool] = field(default_factory=list, init=False, repr=False)

    @property
    def precision(self) -> Precision:
        return Precision.of(self.problem.heads.dtype, self.problem.wire_dtype)

    @property
    def num_ranks(self) -> int:
        return self.problem.num_ranks

    @property
    def topology(self) -> Topology:
        """The shape that the ranks run at, which says what a column and an InterSP rank are."""
        return self.own_topology or self.problem.topology

    def rank_spans(self, rank: int) -> np.ndarray:
        """Token positions of a rank's local rows, in row order: span table int64 [n, 2]."""
        return self.spans[self.rank_rows[rank, 0] : self.rank_rows[rank, 1]]

    @property
    def tokens_per_rank(self) -> np.ndarray:
        """Local rows of each rank: int64 [num_ranks]."""
        ends = row_starts(self.spans)
        return ends[self.rank_rows[:, 1]] - ends[self.rank_rows[:, 0]]

    def area_per_column(self, mask: int = 0, direction: int = 0) -> np.ndarray:
        """Visible pairs that each InterSP rank computes: int64 [inter_sp]."""
        chart = self.chart[mask][direction]
        work = np.zeros(self.topology.inter_sp, np.int64)
        np.add.at(work, chart[:, Chart.RANK], chart[:, Chart.AREA])
        return work

    @property
    def num_instructions(self) -> int:
        return sum(len(programs) for pair in self.programs for programs in pair)

    def arena_bytes(self) -> np.ndarray:
        """Arena that each rank needs over all masks and both directions: int64 [num_ranks]."""
        return np.max([programs.arena_bytes() for pair in self.programs for programs in pair], axis=0)

    @property
    def hash(self) -> str:
        """SHA-256 over problem, planner, options and all columns, hex."""
        if not self._hash:
            digest = hashlib.sha256(json.dumps(_header(self), sort_keys=True).encode())
            for _, column in _columns(self):
                digest.update(np.ascontiguousarray(column).data)
            self._hash.append(digest.hexdigest())
        return self._hash[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def to_bytes(self) -> bytes:
        """Give the stored form (`hsap.ir.stored`)."""
        return stored.write(_header(self) | {"hash": self.hash, "choice": self.choice}, _columns(self))

    def save(self, path: str | Path) -> None:
        """Write the stored form to a file."""
        Path(path).write_bytes(self.to_bytes())

    @property
    def unproven(self) -> bool:
        """Whether the plan was read, from a file or a text, and neither verified nor vouched for since."""
        return bool(self._read)

    def as_read(self) -> Plan:
        """Give the plan, marked as one that somebody else may have made: it won't be run before it is verified."""
        self._read[:] = [True]
        return self

    def vouched(self) -> Plan:
        """Give the plan, to be run as it is: `verify` has judged it, or who calls answers for it."""
        self._read.clear()
        return self

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a stored plan; ValueError where the file is not one. Loading proves nothing: `verify` does, and until it
        has, nothing runs the plan.
        """
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Read the stored form; sizes are checked before anything is allocated."""
        try:
            header, columns = stored.read(instance("a stored plan", data, bytes, "the bytes of its file"))
            plan = _assemble(header, columns)
            same = plan.hash == header["hash"]
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a stored plan: its header lacks or mistypes {one_line(error)}") from None
        if not same:
            raise ValueError("the content hash doesn't match; the file is damaged or was edited")
        return plan.as_read()

    def text(self) -> str:
        """Give the readable form (`hsap.ir.text`), which `hsap.parse` reads back."""
        return print_plan(self)


def choice_from_json(data: object) -> dict[str, float | str] | None:
    """Read a plan's `choice`; ValueError for what is none."""
    if data is None:
        return None
    choice: dict[str, float | str] = instance(
        "a stored plan's choice", data, dict, "seconds or a reason by planner, or null"
    )
    if not all(type(value) in (float, str) for value in choice.values()):
        raise ValueError("a stored plan's choice has a value that is neither seconds nor a reason")
    return choice


def _header(plan: Plan) -> dict[str, Any]:
    header = {"problem": problem_to_json(plan.problem), "planner": plan.planner, "options": plan.options}
    return header if plan.own_topology is None else header | {"topology": str(plan.own_topology)}


def _columns(plan: Plan) -> list[tuple[str, np.ndarray]]:
    """Every column with a name, in stored order."""
    out = [(f"shards.{f.name}", getattr(plan.shards, f.name)) for f in fields(Shards)]
    out += [("spans", plan.spans), ("column_rows", plan.column_rows), ("rank_rows", plan.rank_rows)]
    for m, (slices, pair, charts) in enumerate(zip(plan.slices, plan.programs, plan.chart)):
        out.append((f"{m}.slices", slices))
        for direction, programs, chart in zip(DIRECTIONS, pair, charts):
            prefix = f"{m}.{direction}"
            out.append((f"{prefix}.chart", chart))
            out += [(f"{prefix}.{f.name}", getattr(programs, f.name)) for f in fields(Programs) if f.name != "buffers"]
            out += [(f"{prefix}.buffers.{f.name}", getattr(programs.buffers, f.name)) for f in fields(Buffers)]
    return out


def _assemble(header: dict[str, Any], columns: dict[str, np.ndarray]) -> Plan:
    problem = problem_from_json(header["problem"])
    programs, charts, slices = [], [], []
    for m in range(len(problem.masks)):
        slices.append(columns[f"{m}.slices"])
        pair = []
        for direction in DIRECTIONS:
            prefix = f"{m}.{direction}"
            buffers = Buffers(*(columns[f"{prefix}.buffers.{f.name}"] for f in fields(Buffers)))
            names = [f.name for f in fields(Programs) if f.name != "buffers"]
            pair.append(Programs(**{name: columns[f"{prefix}.{name}"] for name in names}, buffers=buffers))
        programs.append((pair[0], pair[1]))
        charts.append((columns[f"{m}.{DIRECTIONS[0]}.chart"], columns[f"{m}.{DIRECTIONS[1]}.chart"]))
    return Plan(
        problem,
        instance("a stored plan's planner", header["planner"], str, "its name"),
        instance("a stored plan's options", header["options"], dict, "a JSON object"),
        Shards(*(columns[f"shards.{f.name}"] for f in fields(Shards))),
        columns["spans"],
        columns["column_rows"],
        columns["rank_rows"],
        tuple(slices),
        tuple(programs),
        tuple(charts),
        Topology.parse(header["topology"]) if "topology" in header else None,
        choice_from_json(header.get("choice")),
    )
