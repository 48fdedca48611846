"""Prices of rows against what plans really send."""

import numpy as np
import pytest

from hsap.api import compile
from hsap.ir.effects import flows
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Problem, Topology
from hsap.ir.program import KV_ROLES, Op, Role
from hsap.ir.schedule import DIRECTIONS, INPUTS, OUTPUTS
from hsap.ir.span import row_starts
from hsap.planners.prices import away_bytes, wire_bytes


def test_a_row_has_its_elements_and_statistics():
    problem = Problem(Layout.from_lengths([8]), HeadShape(6, 2, 10), Topology(2, 1), wire_dtype="fp32")
    by_role = {role: int(wire_bytes(problem, role, problem.heads.all_heads)) for role in Role if role != Role.NONE}
    q, kv = 6 * 10, 2 * 2 * 10
    assert by_role == {
        Role.Q: 2 * q,
        Role.KV: 2 * kv,
        Role.O: 4 * q + 4 * 6,  # lse
        Role.DO: 2 * q + 2 * 4 * 6,  # lse and delta
        Role.DQ: 4 * q,
        Role.DKV: 4 * kv,
    }
    assert wire_bytes(problem, Role.Q, [[0, 1, 0, 1], [1, 5, 0, 2]]).tolist() == [20, 100]


@pytest.mark.parametrize("intra", [1, 3, 4])
@pytest.mark.parametrize("heads, wire", [((8, 2, 4, "bf16"), None), ((6, 1, 5, "fp32"), "bf16"), ((4, 4, 1), "fp32")])
def test_prices_are_what_sends_carry(intra, heads, wire):
    """One document over four InterSP ranks, where queries and keys both travel (Figure 3's helpers)."""
    problem = Problem(Layout.from_lengths([48]), HeadShape(*heads), Topology(4, intra), wire_dtype=wire)
    plan = compile(problem, "sap", balance="blocks")
    ends = row_starts(plan.spans)
    for direction, name in enumerate(DIRECTIONS):
        programs, per_row = plan.programs[0][direction], [0.0, 0.0]
        sent = flows(plan, programs)
        for role in (*INPUTS[name], *OUTPUTS[name]):
            mine = np.flatnonzero((programs.op[sent.at] == Op.SEND) & (programs.role[sent.at] == role))
            rows = ends[programs.rows[sent.at[mine]]]
            num_rows = (rows[:, 1] - rows[:, 0]).sum() / intra  # each column sends them, for its heads
            assert num_rows > 0
            per_row[role in KV_ROLES] += sent.num_bytes[mine].sum() / num_rows
        assert away_bytes(problem, name) == pytest.approx(tuple(per_row))
