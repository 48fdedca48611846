"""Prices: the bytes of a row on the network, by which planners choose what travels. The one home of that count."""

from __future__ import annotations

from typing import Any

import numpy as np

from hsap.ir.precision import Precision, row_bytes
from hsap.ir.problem import Problem
from hsap.ir.program import KV_ROLES, Role, Space
from hsap.ir.schedule import INPUTS, OUTPUTS


def wire_bytes(problem: Problem, role: Role, heads: np.ndarray | tuple[Any, ...]) -> np.ndarray:
    """Count the bytes of one row of a role with the statistics that go with it: int64 [...].

    heads: [..., 4], a `HeadRun` or many.
    """
    precision = Precision.of(problem.heads.dtype, problem.wire_dtype)
    elements, statistics = row_bytes(precision, role, Space.ARENA, False, np.asarray(heads), problem.heads.head_dim)
    return elements + statistics


def away_bytes(problem: Problem, direction: str) -> tuple[int, int]:
    """Count what travels for one (query row, KV row) that is used away from home, over all columns of IntraSP.

    direction: forward (q, o | kv) or backward (q, do, dq | kv, dkv).
    """
    shares = problem.heads.shares(problem.topology.intra_sp)
    total = {False: 0, True: 0}
    for role in (*INPUTS[direction], *OUTPUTS[direction]):
        total[role in KV_ROLES] += int(wire_bytes(problem, role, shares).sum())
    return total[False], total[True]
