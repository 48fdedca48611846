"""Bytes between nodes with every row once per node: against hand counts and against counting row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.api import compile
from hsap.compiler.pipeline import build
from hsap.ir.block import Shards, cut_blocks
from hsap.ir.crossing import once_per_node_bytes
from hsap.ir.effects import flows
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.precision import row_bytes
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.program import KV_ROLES, PARTIAL_ROLES, Op, Role, Space
from hsap.ir.schedule import Schedule, Strategy
from hsap.planners import PLANNERS

FORWARD, BACKWARD = 0, 1
HEADS = HeadShape(4, 2, 8, "bf16")
Q_ROW = 4 * 8 * 2
KV_ROW = 2 * 2 * 8 * 2
STAT_ROW = 4 * 4
"""Bytes of a row of all heads of HEADS: q (or o, do, dq), kv (or dkv), one float32 statistic."""


def problem(lengths, topology, ranks_per_node, first_rank=0, mask="causal", wire_dtype=None):
    cluster = Cluster(ranks_per_node=ranks_per_node, first_rank=first_rank)
    layout, shape = Layout.from_lengths(lengths), Topology.parse(topology)
    return Problem(layout, HEADS, shape, ((mask, 1),), cluster, wire_dtype=wire_dtype)


def crossing(plan, direction):
    """(what crosses, what crosses once per node)"""
    programs = plan.programs[0][direction]
    return flows(plan, programs).between_nodes(plan.problem.node_of), once_per_node_bytes(plan, programs)


def placed(wanted, lengths, ranks, ranks_per_node=2):
    """A plan with equal shards, one a rank, whose blocks (q, kv) are computed on the ranks that `wanted` gives."""
    asked = problem(lengths, f"{ranks}x1", ranks_per_node)
    share = asked.layout.num_tokens // ranks
    shards = Shards.of([(r, [[r * share, r * share + share]]) for r in range(ranks)])
    blocks = cut_blocks(shards, asked.slices(0))
    rank = np.array([wanted.get((q, kv), q) for q, kv in zip(blocks.q.tolist(), blocks.kv.tolist())])
    schedule = Schedule.of(blocks, rank, (blocks.q != blocks.kv).astype(np.int64))
    return build(asked, Strategy(shards, (schedule,), (schedule,)), "by hand", {})


def test_a_ring_over_two_nodes_passes_every_row_to_the_other_node_once():
    plan = compile(problem([40], "4x1", 2), "ring")  # 10 rows a rank; hops 1 → 2 and 3 → 0 cross
    real, once = crossing(plan, FORWARD)
    # Rank 0's rows cross at 1 → 2; rank 1's there and, going around, at 3 → 0; rank 2's at 3 → 0; rank 3's at both.
    assert real == 6 * 10 * KV_ROW
    assert once == 4 * 10 * KV_ROW


def test_direct_sends_to_two_ranks_of_a_node_count_once():
    # A document over 4 ranks, queries stay: KV of ranks 0 and 1 goes to both ranks of node 1, and of rank 0 to rank 1.
    plan = placed({}, [40], 4)
    real, once = crossing(plan, FORWARD)
    assert real == 4 * 10 * KV_ROW and once == 2 * 10 * KV_ROW
    # Backward, KV goes out again, and both ranks of node 1 send gradients of the KV of ranks 0 and 1 back.
    real, once = crossing(plan, BACKWARD)
    assert real == 8 * 10 * KV_ROW and once == 4 * 10 * KV_ROW


def test_partial_outputs_of_two_ranks_of_a_node_count_once():
    # Rank 3's queries also visit ranks 0 and 1, which lie on the other node and both send a part of o back.
    plan = placed({(3, 0): 0, (3, 1): 1, (2, 0): 2, (2, 1): 2}, [40], 4)
    real, once = crossing(plan, FORWARD)
    assert real == 2 * 10 * KV_ROW + 2 * 10 * Q_ROW + 2 * 10 * (Q_ROW + STAT_ROW)
    assert once == 2 * 10 * KV_ROW + 10 * Q_ROW + 10 * (Q_ROW + STAT_ROW)


def test_all_to_all_across_nodes_counts_replicated_kv_heads_once():
    # One column of 4 ranks on 2 nodes: a query head each, KV head 0 is needed by ranks 0 and 1, head 1 by ranks 2, 3.
    plan = compile(problem([40], "1x4", 2), "ring")
    real, once = crossing(plan, FORWARD)
    q_head, kv_head, o_head = Q_ROW // 4, KV_ROW // 2, (Q_ROW + STAT_ROW) // 4
    # Of every row, q for two ranks, KV for the same two (one head), and o from two ranks.
    assert real == 40 * (2 * q_head + 2 * kv_head + 2 * o_head)
    assert once == 40 * (2 * q_head + kv_head + 2 * o_head)
    real, once = crossing(plan, BACKWARD)  # do with two statistics, dq; dkv of one head from two ranks
    assert real == 40 * (2 * (q_head + 2 * STAT_ROW // 4) + 2 * q_head + 2 * kv_head)
    assert once == 40 * (2 * (q_head + 2 * STAT_ROW // 4) + 2 * q_head + kv_head)


@pytest.mark.parametrize("planner", PLANNERS)
def test_one_node_or_no_token_crosses_nothing(planner):
    for lengths, per_node in (([40, 3], 8), ([], 1)):
        plan = compile(problem(lengths, "4x1", per_node), planner)
        assert crossing(plan, FORWARD) == crossing(plan, BACKWARD) == (0, 0)


def row_by_row(plan, programs):
    """The definition in loops: a set of (role, width, token position, head, node) and the width of each."""
    shape, intra, nodes = plan.problem.heads, plan.topology.intra_sp, plan.problem.node_of.tolist()
    shares, total = shape.shares(intra), 0
    home = {p: nodes[r] for r in range(plan.num_ranks) for a, b in plan.rank_spans(r).tolist() for p in range(a, b)}
    seen = set()

    def count(role, space, acc, src, dst, table, q_heads, kv_heads):
        nonlocal total
        if nodes[src] == nodes[dst]:
            return
        heads = kv_heads if role in KV_ROLES else q_heads
        one = np.array([0, 1, 0, 1])
        width = int(sum(row_bytes(plan.precision, role, space, acc, one, shape.head_dim)))
        node = nodes[src] if role in PARTIAL_ROLES else nodes[dst]
        for position in (p for a, b in table.tolist() for p in range(a, b)):
            for head in heads:
                if home[position] != node and (role, width, position, head, node) not in seen:
                    seen.add((role, width, position, head, node))
                    total += width

    for rank in range(plan.num_ranks):
        for i in programs[rank]:
            role, share = Role(i.role), shares[rank % intra]
            if i.op == Op.SEND:
                space, acc = programs.buffers.space[i.buf[0]], programs.buffers.acc[i.buf[0]]
                q = range(share.q_first + i.heads.q_first, share.q_first + i.heads.q_first + i.heads.q_count)
                kv = range(share.kv_first + i.heads.kv_first, share.kv_first + i.heads.kv_first + i.heads.kv_count)
                count(role, space, acc, rank, i.peer, plan.spans[i.rows[0] : i.rows[1]], q, kv)
            elif i.op == Op.ALL_TO_ALL:
                towards = programs.buffers.space[i.buf[1]] != Space.OUTPUT
                for peer in range(rank - rank % intra, rank - rank % intra + intra):
                    rows, share = (rank, shares[peer % intra]) if towards else (peer, shares[rank % intra])
                    q, kv = (
                        range(share.q_first, share.q_first + share.q_count),
                        range(share.kv_first, share.kv_first + share.kv_count),
                    )
                    count(role, Space.ARENA, False, rank, peer, plan.rank_spans(rows), q, kv)
    return total


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 23), max_size=5),
    st.sampled_from(["4x1", "5x1", "2x2", "3x2", "1x4", "2x3"]),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 2),
    st.sampled_from(["ring", "zigzag", "distflash", "sap"]),
    st.sampled_from(["causal", "full", "window:5"]),
    st.sampled_from(["fp32", None]),
)
def test_against_counting_row_by_row(lengths, topology, ranks_per_node, first_rank, planner, mask, wire_dtype):
    asked = problem(lengths, topology, ranks_per_node, first_rank % ranks_per_node, mask, wire_dtype)
    plan = compile(asked, planner)
    for direction in (FORWARD, BACKWARD):
        real, once = crossing(plan, direction)
        assert once == row_by_row(plan, plan.programs[0][direction])
        assert once <= real
