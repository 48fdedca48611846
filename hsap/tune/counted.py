"""Counted: what a strategy's layout comes to, in rows and work, and the prices of one column's work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.compiler.lay import Laid
from hsap.compiler.trays import NEVER
from hsap.ir.heads import HeadRun
from hsap.ir.precision import Precision, row_bytes
from hsap.ir.problem import Problem
from hsap.ir.program import Op, Role, Space
from hsap.ir.schedule import OUTPUTS
from hsap.ir.span import row_starts
from hsap.sim.cost import Kernels, moving_seconds


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """What was laid out for one mask and direction, with its rows and work counted.

    home_tokens: int64 [inter_sp]. starts: first row of each span of the table, see `row_starts`. work: what kernels do.
    """

    laid: Laid
    home_tokens: np.ndarray
    starts: np.ndarray
    work: Kernels

    @classmethod
    def of(cls, problem: Problem, laid: Laid) -> Counted:
        """Count. problem: of the shape that the strategy is for."""
        kernels, shards = laid.kernels, laid.table.shards
        owner = np.repeat(np.arange(len(kernels)), np.diff(kernels.borders))
        slices = laid.entries.blocks.slices[kernels.index]
        home_tokens = np.bincount(shards.home, shards.tokens, problem.topology.inter_sp).astype(np.int64)
        work = Kernels.of(slices, owner, len(kernels), problem.cluster)
        return cls(laid, home_tokens, row_starts(laid.table.spans), work)

    @property
    def num_stages(self) -> int:
        """Stages from the first in which something leaves to the last in which something is done."""
        return self.laid.last_stage - self.laid.first_stage + 1

    def tokens(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Rows of ranges of the span table."""
        return self.starts[stop] - self.starts[first]

    def tray_tokens(self, tray: np.ndarray) -> np.ndarray:
        """Rows of trays."""
        return self.tokens(*self.laid.trays.rows[tray].T)


class Cost:
    """Prices of one column's work, with the heads of its share."""

    def __init__(self, problem: Problem, counted: Counted, share: HeadRun) -> None:
        self.counted, self.cluster, self.dim = counted, problem.cluster, problem.heads.head_dim
        self.precision = Precision.of(problem.heads.dtype, problem.wire_dtype)
        self.heads = np.array(counted.laid.trays.runs.heads(problem.heads, share), np.int64)

    def rows(self, acc: bool) -> np.ndarray:
        """Bytes in the arena of a row with its statistics, by role and run of head groups: int64 [num_roles, n]."""
        out = np.zeros((max(Role) + 1, len(self.heads)), np.int64)
        for role in Role:
            if role != Role.NONE:
                out[role] = sum(row_bytes(self.precision, role, Space.ARENA, acc, self.heads, self.dim))
        return out

    def message_bytes(self) -> np.ndarray:
        """Bytes of each message: int64 [n]."""
        m = self.counted.laid.messages
        return self.counted.tokens(m.first, m.stop) * self.rows(False)[m.role, m.run]

    def add_kernels(self, work: np.ndarray) -> None:
        """Add the attention kernels."""
        laid = self.counted.laid
        entries, lead = laid.entries, laid.kernels.lead
        op = Op.ATTEND if laid.direction == "forward" else Op.ATTEND_GRAD
        heads, which = self.heads[entries.run[lead]], np.arange(len(lead))
        seconds = self.counted.work.seconds(which, op, heads, self.dim, self.precision, self.cluster)
        np.add.at(work, (entries.stage[lead] - laid.first_stage, entries.rank[lead]), seconds)

    def add_packing(self, pack: np.ndarray) -> None:
        """Add what is copied before it is sent: partial results, and inputs that leave home in one head group."""
        counted, narrow = self.counted, self.rows(False)
        laid, trays = counted.laid, counted.laid.trays
        both = narrow + self.rows(True)
        for role in OUTPUTS[laid.direction]:
            full = np.flatnonzero(trays.stage[role] != NEVER)
            num_bytes = counted.tray_tokens(full) * both[role, trays.run[full]]
            at = trays.stage[role, full] - laid.first_stage, trays.rank[full]
            np.add.at(pack, at, moving_seconds(self.cluster, Op.COPY, num_bytes))
        copies = laid.copies
        num_bytes = 2 * counted.tokens(copies.first, copies.stop) * narrow[copies.role, copies.run]
        at = copies.stage - laid.first_stage, copies.rank
        np.add.at(pack, at, moving_seconds(self.cluster, Op.COPY, num_bytes))

    def add_folding(self, fold: np.ndarray) -> None:
        """Add Merge and Sum of partial results where they arrive."""
        laid, row = self.counted.laid, self.rows(False) + 2 * self.rows(True)
        m = laid.messages
        for role in OUTPUTS[laid.direction]:
            mine = m.of(role)
            num_bytes = self.counted.tokens(m.first[mine], m.stop[mine]) * row[role, m.run[mine]]
            op = Op.MERGE if role == Role.O else Op.SUM
            at = m.until[mine] - laid.first_stage, m.dst[mine]
            np.add.at(fold, at, moving_seconds(self.cluster, op, num_bytes))
