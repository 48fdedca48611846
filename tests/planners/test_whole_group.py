"""Planners of the whole group: what shape they choose, the bytes that are known of them, groups that keep apart."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hsap.api import compile
from hsap.ir.effects import flows
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.program import Op, Role
from hsap.ir.summary import summary
from hsap.planners import PLANNERS, run
from hsap.planners.basp import Group, share_out
from hsap.planners.loongtrain import inner_ring
from hsap.verify import verify

PEERS = json.loads((Path(__file__).parents[1] / "bench" / "peers.json").read_text())["rows"]
RINGS = ("usp", "te", "loongtrain")
MIB = 1 << 20


def make(topology="8x1", lengths=(40, 3, 70, 1, 200, 33), heads=(8, 4), sequences=None, **cluster) -> Problem:
    layout = Layout.from_lengths(lengths, sequences)
    return Problem(layout, HeadShape(*heads, 8), Topology.parse(topology), cluster=Cluster(**cluster))


@pytest.mark.parametrize("planner", [*RINGS, "basp"])
@pytest.mark.parametrize(
    ("topology", "heads", "cluster", "shape"),
    [
        ("32x1", (8, 2), {}, "16x2"),  # as many as KV heads …
        ("32x1", (32, 8), {}, "4x8"),
        ("32x1", (32, 16), {}, "4x8"),  # … in a node
        ("12x1", (32, 8), {}, "3x4"),  # … and dividing the ranks
        ("7x1", (32, 8), {}, "7x1"),
        ("8x1", (9, 3), {}, "8x1"),  # … and the KV heads
        ("6x1", (9, 3), {"ranks_per_node": 6}, "2x3"),
        ("8x1", (32, 8), {"first_rank": 2}, "4x2"),  # a group that begins mid-node
        ("8x1", (9, 1), {}, "8x1"),
        ("4x2", (8, 2), {}, "4x2"),  # an IntraSP that is given
        ("2x7", (28, 4), {}, "2x7"),
        ("1x1", (8, 8), {}, "1x1"),
    ],
)
def test_the_shape_of_the_group(planner, topology, heads, cluster, shape):
    strategy = run(planner, make(topology, heads=heads, **cluster), {})
    assert str(strategy.topology) == shape


@pytest.mark.parametrize("planner", RINGS)
def test_a_head_degree_may_be_asked_for(planner):
    assert compile(make("8x1", heads=(9, 3)), planner, heads=4).topology == Topology(2, 4)
    assert compile(make("4x2"), planner, heads=1).topology == Topology(8, 1)
    for heads in (3, 16, 0, 2.0, "2", True):
        with pytest.raises(ValueError, match=f"planner {planner}: heads"):
            compile(make("8x1"), planner, heads=heads)
    with pytest.raises(ValueError, match=r"heads=8 of 4 query heads on 8 ranks; .*choose of 1, 2, 4"):
        compile(make("8x1", heads=(4, 2)), planner, heads=8)


@pytest.mark.parametrize("ranks", [16, 32, 64])
def test_bytes_of_loongtrain_are_those_measured_of_it(ranks):
    """`peers.json`: d is bytes between nodes, r the largest receive, t all, in MiB. Ours count lse (float32) with o."""
    (peer,) = (row["loongtrain"] for row in PEERS if (row["workload"], row["ranks"]) == ("ldc@131072", ranks))
    problem = Problem(Layout.from_lengths([131072]), HeadShape(8, 2, 128), Topology(ranks, 1))
    forward = summary(compile(problem, "loongtrain"))["forward"]
    lse = 131072 * 8 * 4 // 2  # half of them leave their rank, one head of two
    assert round((forward["bytes_total"] - lse) / MIB) == peer["t"]
    assert round(forward["bytes_internode"] / MIB) == peer["d"] == peer["h"]
    assert round((forward["max_recv_bytes_per_rank"] - lse / ranks) / MIB) == peer["r"]


def kv_hops(planner: str, problem: Problem, shard: int) -> list[tuple[int, int, int]]:
    """(src, dst, stage) of a KV shard's way, in order."""
    kv = run(planner, problem, {}).forward[0].transfers
    mine = kv.shard == shard
    return sorted(zip(kv.src[mine].tolist(), kv.dst[mine].tolist(), kv.stage[mine].tolist()), key=lambda hop: hop[2])


def test_two_rings_go_around_a_node_before_they_go_on():
    problem = make("6x1", heads=(1, 1), ranks_per_node=3)
    assert kv_hops("loongtrain", problem, 1) == [(1, 2, 0), (2, 0, 1), (1, 4, 2), (4, 5, 3), (5, 3, 4)]
    assert kv_hops("te", problem, 1) == [(1, 2, 0), (2, 3, 1), (3, 4, 2), (4, 5, 3), (5, 0, 4)]


@pytest.mark.parametrize(
    ("nodes", "size"),
    [
        ([0, 0, 0, 1, 1, 1], 3),
        ([0, 0, 1, 1, 1, 1], 2),
        ([0, 1, 1, 1, 1, 2], 1),
        ([0] * 5, 5),
        ([0] * 4 + [1], 1),
        ([7], 1),
    ],
)
def test_inner_rings_don_t_cross_a_node_border(nodes, size):
    assert inner_ring(np.array(nodes)) == size


def test_usp_cuts_the_pack_and_te_each_document():
    """One document is the same to both; of two unequal ones usp gives some ranks more of the long one's late rows."""
    one, two = make("8x1", (640,), (1, 1)), make("8x1", (500, 140), (1, 1))
    figures = {(p, w): summary(compile(w, p))["area_imbalance"] for p in ("usp", "te") for w in (one, two)}
    assert figures["usp", one] == figures["te", one] < 1.01
    assert figures["te", two] < 1.05 < 1.2 < figures["usp", two]


@pytest.mark.parametrize("planner", RINGS)
def test_gradients_of_kv_cross_to_each_node_once(planner):
    problem = make("12x1", (37, 5, 90), (8, 2), ranks_per_node=4)
    plan = compile(problem, planner)
    programs = plan.programs[0][1]
    sent = np.flatnonzero((programs.op == Op.SEND) & (programs.role == Role.DKV))
    node = problem.node_of
    away = sent[node[programs.rank[sent]] != node[programs.peer[sent]]]
    routes = {(node[programs.rank[i]], *programs.rows[i], programs.rank[i] % 2) for i in away.tolist()}
    assert len(routes) == len(away) > 0


def test_ranks_are_dealt_evenly_or_by_area():
    tokens = np.array([5, 0, 5, 5, 0])
    assert share_out(tokens, np.array([3, 0, 1, 2]), 6) == [Group(0, 0, 2), Group(2, 2, 2), Group(3, 4, 2)]
    # 7 ranks: one each, and then to who has most area a rank: 12 (6 6) 4 4; 12 → 3, 4, 4 or 12 → 4 4 4.
    assert share_out(np.array([9, 9, 9]), np.array([4.0, 12.0, 4.0]), 7) == [
        Group(0, 0, 2),
        Group(1, 2, 4),
        Group(2, 6, 1),
    ]
    assert share_out(np.array([9]), np.array([4.0]), 7) == [Group(0, 0, 7)]
    assert share_out(np.array([0, 0]), np.zeros(2), 7) == []
    assert share_out(np.zeros(0), np.zeros(0), 7) == []


def test_more_sequences_than_ranks_go_back_and_forth_and_the_rest_is_shared():
    areas = np.array([1.0, 9, 8, 3, 7, 2, 4])
    assert share_out(np.ones(7), areas, 3) == [
        Group(1, 0, 1), Group(2, 1, 1), Group(4, 2, 1), Group(6, 2, 1), Group(3, 1, 1), Group(5, 0, 1), Group(0, 0, 3)
    ]  # fmt: skip


SEQUENCES = {
    "one": ("8x1", [5], (32, 8)),
    "even": ("8x1", [2, 1, 1, 1], (32, 8)),
    "uneven": ("8x1", [2, 1, 2], (9, 3)),
    "empty ones": ("6x1", [0, 3, 0, 2, 0], (8, 2)),
    "as many as ranks": ("5x1", [1] * 5, (8, 2)),
    "more than ranks": ("3x1", [1] * 5, (8, 2)),
    "on two columns": ("4x2", [2, 3], (8, 2)),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_nothing_leaves_a_group(name):
    topology, sequences, heads = SEQUENCES[name]
    problem = make(topology, (60, 33, 101, 8, 70), heads, sequences, ranks_per_node=4)
    plan = compile(problem, "basp")
    assert verify(plan).ok
    borders = problem.layout.cu_seqlens[np.cumsum([0, *sequences])]
    # Who holds tokens of a sequence is its group.
    held = [np.searchsorted(borders, plan.rank_spans(rank)[:, 0], side="right") - 1 for rank in range(plan.num_ranks)]
    for programs in plan.programs[0]:
        sent = flows(plan, programs)
        for src, dst in zip(sent.src.tolist(), sent.dst.tolist()):
            assert set(held[src]) & set(held[dst])
    if name in ("one", "even"):
        assert str(plan.topology) == {"one": "2x4", "even": "4x2"}[name]
    if name == "as many as ranks":
        assert not len(flows(plan, plan.programs[0][0]).src)


def test_equal_sequences_are_even():
    plan = compile(make("16x1", (101, 40, 2) * 4, (8, 2), [3] * 4), "basp")
    figures = summary(plan)
    assert figures["area_imbalance"] < 1.1 and figures["token_imbalance"] < 1.05
    assert not any(math.isnan(area) for area in figures["area_per_rank"])


def test_other_planners_keep_the_problem_s_shape():
    for name, planner in PLANNERS.items():
        if not planner.whole_group:
            assert compile(make("4x2"), name).own_topology is None
