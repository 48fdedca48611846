"""Byte and work counts against numbers worked out by hand."""

import numpy as np
import pytest

from hsap.api import compile
from hsap.ir.effects import attended_pairs, flows
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.program import Op, Role
from hsap.ir.reshard import reshard

FORWARD, BACKWARD = 0, 1
HEADS = HeadShape(4, 2, 8, "bf16")


def ring(lengths, topology, heads=HEADS, **more):
    return compile(Problem(Layout.from_lengths(lengths), heads, Topology.parse(topology), **more), "ring")


def moved_bytes(plan, programs):
    """Bytes of every instruction's messages."""
    carried = flows(plan, programs)
    return np.bincount(carried.at, carried.num_bytes, len(programs)).astype(int)


def sent(plan, direction, op=Op.SEND):
    """Bytes of every instruction of that op, by (rank, role)."""
    programs = plan.programs[0][direction]
    moved = moved_bytes(plan, programs)
    assert (moved[(programs.op != Op.SEND) & (programs.op != Op.ALL_TO_ALL)] == 0).all()
    at = np.flatnonzero(programs.op == op)
    return [(int(programs.rank[i]), Role(int(programs.role[i])), int(moved[i])) for i in at]


def test_ring_sends_kv_forward_and_its_gradient_home():
    plan = ring([11], "2x1")  # ranks hold 5 and 6 tokens; a KV row is 2 · 2 heads · 8 · 2 bytes = 64
    assert sent(plan, FORWARD) == [(0, Role.KV, 5 * 64), (1, Role.KV, 6 * 64)]
    assert sent(plan, BACKWARD) == [(0, Role.KV, 5 * 64), (1, Role.KV, 6 * 64), (1, Role.DKV, 5 * 64)]


def test_partial_gradients_travel_in_the_wire_dtype():
    plan = ring([11], "2x1", wire_dtype="fp32")
    assert sent(plan, BACKWARD)[-1] == (1, Role.DKV, 5 * 128)


def test_all_to_all_counts_what_leaves_the_rank():
    plan = ring([5], "1x2")  # ranks hold 2 and 3 tokens, two query heads and one KV head each
    q_half, kv_half, stat_half = 2 * 8 * 2, 2 * 1 * 8 * 2, 2 * 4
    assert sent(plan, FORWARD, Op.ALL_TO_ALL) == [
        (0, Role.Q, 2 * q_half),
        (0, Role.KV, 2 * kv_half),
        (0, Role.O, 3 * (q_half + stat_half)),  # the other rank's rows, with lse
        (1, Role.Q, 3 * q_half),
        (1, Role.KV, 3 * kv_half),
        (1, Role.O, 2 * (q_half + stat_half)),
    ]
    assert sent(plan, BACKWARD, Op.ALL_TO_ALL) == [
        (0, Role.DO, 2 * (q_half + 2 * stat_half)),  # with lse and delta
        (0, Role.DQ, 3 * q_half),
        (0, Role.DKV, 3 * kv_half),
        (1, Role.DO, 3 * (q_half + 2 * stat_half)),
        (1, Role.DQ, 2 * q_half),
        (1, Role.DKV, 2 * kv_half),
    ]


def test_all_to_all_with_unequal_head_shares():
    plan = ring([3], "1x2", HeadShape(3, 3, 8, "fp32"))  # one and two tokens; shares of two heads and one
    moved = [(rank, role, num_bytes) for rank, role, num_bytes in sent(plan, FORWARD, Op.ALL_TO_ALL) if role == Role.Q]
    assert moved == [(0, Role.Q, 1 * 1 * 32), (1, Role.Q, 2 * 2 * 32)]


@pytest.mark.parametrize("heads", [HeadShape(8, 2, 4), HeadShape(9, 3, 4, "fp32"), HeadShape(28, 4, 2, "fp16")])
@pytest.mark.parametrize("topology", ["1x2", "2x3", "1x8"])
def test_all_to_all_carries_what_reshard_lays_out(heads, topology):
    plan = ring([13, 1, 20], topology, heads)
    intra = plan.topology.intra_sp
    tokens = plan.tokens_per_rank.tolist()
    for programs in plan.programs[0]:
        moved = moved_bytes(plan, programs)
        for i in np.flatnonzero(programs.op == Op.ALL_TO_ALL):
            rank, role = int(programs.rank[i]), Role(int(programs.role[i]))
            index, group = rank % intra, tokens[rank - rank % intra :][:intra]
            to_column = role in (Role.Q, Role.KV, Role.DO)
            shape = reshard(role, to_column, heads, plan.precision, group, index)
            assert moved[i] == sum(piece.num_bytes for piece in shape.sends if piece.peer != index)


def test_received_and_internode_bytes():
    cluster = Cluster(ranks_per_node=2)
    plan = ring([100], "4x1", cluster=cluster)  # 25 tokens a rank, every rank receives the other three's KV
    carried = flows(plan, plan.programs[0][FORWARD])
    assert carried.received(4).tolist() == [3 * 25 * 64] * 4
    assert carried.between_nodes(cluster.node_of(4)) == 2 * 3 * 25 * 64  # the hops 1 → 2 and 3 → 0
    # A group that starts mid-node straddles three nodes: hops 0 → 1 and 2 → 3 cross, and 3 → 0 as well.
    assert carried.between_nodes(Cluster(ranks_per_node=2, first_rank=1).node_of(4)) == 3 * 3 * 25 * 64


@pytest.mark.parametrize("topology", ["1x1", "2x1", "2x2", "4x1", "1x4"])
@pytest.mark.parametrize("lengths", [[7, 1, 30, 3], []])
def test_what_is_sent_is_received_and_all_pairs_are_attended(topology, lengths):
    plan = ring(lengths, topology)
    want = 4 * sum(n * (n + 1) // 2 for n in lengths)
    for programs in plan.programs[0]:
        carried = flows(plan, programs)
        assert carried.received(plan.num_ranks).sum() == carried.num_bytes.sum()
        assert (carried.src != carried.dst).all()
        assert attended_pairs(programs, plan.slices[0]).sum() == want
