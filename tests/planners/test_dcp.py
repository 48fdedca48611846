"""DCP: its hypergraph against sets, its partitions against brute force, its bytes against what plans send."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsap
from hsap.ir.check import MAX_HEADS, MAX_LAYERS
from hsap.ir.effects import flows
from hsap.ir.program import Role
from hsap.planners import PLANNERS, run
from hsap.planners.divisions import Needs, divide
from hsap.planners.hypergraph import Hypergraph, cells_hypergraph
from hsap.planners.partition import _solver, one_weight, partition
from hsap.planners.refine import Parts, refine

DCP = sys.modules["hsap.planners.dcp"]
RAGGED = [900, 350, 20, 1, 1400, 77, 513, 260, 640, 128, 5, 1111]


def problem(lengths, topology="8x1", heads=(8, 2), masks=(("causal", 1),), dtype="bf16", **cluster):
    shape = hsap.HeadShape(*heads, 16, dtype)
    machines = hsap.Cluster(**cluster)
    return hsap.Problem(hsap.Layout.from_lengths(lengths), shape, hsap.Topology.parse(topology), masks, machines)


def random_graph(seed, num_vertices, num_dimensions=2):
    """Like the planner's: a vertex weighs in one dimension."""
    rng = np.random.default_rng(seed)
    weight = np.zeros((num_vertices, num_dimensions), np.int64)
    weight[np.arange(num_vertices), rng.integers(0, num_dimensions, num_vertices)] = rng.integers(1, 20, num_vertices)
    pins = [rng.choice(num_vertices, int(rng.integers(1, min(6, num_vertices) + 1)), replace=False) for _ in range(9)]
    edge = np.repeat(np.arange(len(pins)), [len(p) for p in pins])
    return Hypergraph.of(weight, rng.integers(1, 50, len(pins)), edge, np.concatenate(pins)), pins


def connectivity(graph, part, num_parts):
    """Bytes that a partition moves: of each edge, once for every part that it touches but the first."""
    return int((graph.num_bytes * ((graph.counts(part, num_parts) > 0).sum(axis=1) - 1)).sum())


def naive_connectivity(num_bytes, pins, part):
    return sum(int(b) * (len({int(part[v]) for v in p}) - 1) for b, p in zip(num_bytes, pins))


@pytest.mark.parametrize("seed", range(20))
def test_hypergraph_against_sets(seed):
    rng = np.random.default_rng(seed)
    graph, pins = random_graph(seed, 12)
    kept = [p for p in pins if len(p) > 1]
    assert [sorted(graph.pins[a:b].tolist()) for a, b in itertools.pairwise(graph.offsets)] == [sorted(p) for p in kept]
    part = rng.integers(0, 4, 12)
    assert connectivity(graph, part, 4) == naive_connectivity(graph.num_bytes, kept, part)
    for v in range(12):
        first, edges = graph.incidence()
        assert set(edges[first[v] : first[v + 1]].tolist()) == {e for e, p in enumerate(kept) if v in p}
    cluster = rng.integers(0, 5, 12)
    coarse = graph.contracted(cluster, 5)
    split = rng.integers(0, 3, 5)
    assert connectivity(coarse, split, 3) == naive_connectivity(graph.num_bytes, kept, split[cluster])
    assert coarse.loads(split, 3).tolist() == graph.loads(split[cluster], 3).tolist()
    mine = np.flatnonzero(part == 1)
    inside = graph.within(mine)
    inner = rng.integers(0, 2, len(mine))
    place = dict(zip(mine.tolist(), inner.tolist(), strict=True))
    want = sum(
        int(b) * (len({place[v] for v in p if v in place}) - 1)
        for b, p in zip(graph.num_bytes, kept)
        if any(v in place for v in p)
    )
    assert connectivity(inside, inner, 2) == want


def test_a_document_of_three_blocks_has_the_paper_s_hyperedges():
    # Figure 9: each of Q, KV and O has three blocks; Q and O of a block join the same vertices, so they are one edge.
    q, kv = np.array([0, 1, 1, 2, 2, 2]), np.array([0, 0, 1, 0, 1, 2])
    area = np.array([3, 4, 3, 2, 2, 1])
    graph = cells_hypergraph(np.array([2, 2, 1]), [(q, kv, area, 3)], np.array([4]), np.array([[10, 7]]))
    assert graph.weight.tolist() == [[2, 0], [2, 0], [1, 0], *([0, 12 * a] for a in area)]
    edges = [graph.pins[a:b].tolist() for a, b in itertools.pairwise(graph.offsets)]
    assert edges == [[0, 3], [1, 4, 5], [2, 6, 7, 8], [0, 3, 4, 6], [1, 5, 7], [2, 8]]
    assert graph.num_bytes.tolist() == [3 * n for n in (20, 20, 10, 14, 14, 7)]


def best_under(graph, caps):
    """The least connectivity of all partitions under the caps, None where there is none."""
    num_parts, best = len(caps), None
    for part in itertools.product(range(num_parts), repeat=len(graph)):
        part = np.array(part)
        if (graph.loads(part, num_parts) <= caps).all():
            value = connectivity(graph, part, num_parts)
            best = value if best is None else min(best, value)
    return best


@pytest.mark.parametrize("num_parts, num_vertices", [(2, 9), (3, 7)])
def test_small_graphs_are_partitioned_about_as_well_as_can_be(num_parts, num_vertices):
    found, least = [], []
    for seed in range(12):
        graph, _ = random_graph(seed, num_vertices)
        mean = graph.weight.sum(axis=0) / num_parts
        caps = np.tile(np.maximum(mean * 1.2, graph.weight.max(axis=0)), (num_parts, 1))
        best = best_under(graph, caps)
        if best is not None:
            part = partition(graph, np.ones(num_parts), 0.1)
            part = refine(graph, part, Parts.alike(caps), (np.arange(num_vertices),))
            assert (graph.loads(part, num_parts) <= caps).all()
            found.append(connectivity(graph, part, num_parts))
            least.append(best)
    assert len(least) >= 8 and sum(least) <= sum(found) <= 1.03 * sum(least)


def test_a_byte_between_nodes_costs_more():
    # Vertices 1 and 2 share data with 0, 2 the smaller ones; only one may stay in the node of 0.
    weight = np.array([[4], [4], [4]])
    graph = Hypergraph.of(weight, np.array([30, 20]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 2]))
    parts = Parts(np.full((3, 1), 4.0), np.array([0, 0, 1]), 9.0)
    for start in itertools.permutations(range(3)):
        part = refine(graph, np.array(start), parts, ())
        assert sorted(part.tolist()) == [0, 1, 2]
        assert part[2] == 2, "the small edge crosses"


def test_one_weight_counts_tokens_and_work_alike_whatever_their_units():
    weight = np.array([[100, 0], [300, 0], [0, 7_000_000], [0, 1_000_000]])
    one = one_weight(Hypergraph.of(weight, np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)))
    assert one[1] == pytest.approx(3 * one[0], rel=1e-3) and one[2] == pytest.approx(7 * one[3], rel=1e-3)


def needs(rank, area, reads, home, num_bytes):
    return Needs(*(np.array(column, np.int64) for column in (rank, area, reads, home, num_bytes)))


def test_divisions_by_hand():
    # Rank 0 has data 0, rank 1 has 1 … 4. Rank 0 needs all of them: 40 bytes, a quarter is 10, one block a division.
    plan = needs([0] * 5 + [1], [9, 5, 5, 5, 5, 50], [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 2)], [0, 1, 1, 1, 1],
                 [10] * 5)  # fmt: skip
    assert divide(plan, 2, 4).tolist() == [0, 1, 2, 3, 3, 0]
    assert divide(plan, 2, 2).tolist() == [0, 1, 1, 1, 1, 0]
    assert divide(plan, 2, 1).tolist() == [0] * 6
    assert divide(plan, 2, 6).tolist() == [0, 5, 5, 5, 5, 0], "no block fits into a sixth"


def test_a_block_that_does_not_fit_is_deferred_and_a_later_one_taken():
    plan = needs([0, 0, 0], [1, 1, 1], [(0, 1), (0, 2), (0, 2)], [0, 1, 1], [1, 30, 10])
    assert divide(plan, 2, 4).tolist() == [3, 1, 1], "what was received once costs nothing the second time"


@given(st.integers(0, 10**6), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_divisions_keep_to_their_share(seed, num_divisions):
    rng = np.random.default_rng(seed)
    num_ranks, num_data, n = 4, 12, int(rng.integers(0, 60))
    plan = needs(rng.integers(0, num_ranks, n), rng.integers(1, 9, n), rng.integers(0, num_data, (n, 2)),
                 rng.integers(0, num_ranks, num_data), rng.integers(1, 30, num_data))  # fmt: skip
    division = divide(plan, num_ranks, num_divisions)
    local = (plan.home[plan.reads] == plan.rank[:, None]).all(axis=1)
    assert ((division >= 0) & (division < num_divisions)).all()
    if num_divisions > 1:
        assert (division[local] == 0).all() and (division[~local] > 0).all()
    first = {}
    for rank, reads, at in zip(plan.rank.tolist(), plan.reads.tolist(), division.tolist(), strict=True):
        for data in reads:
            if plan.home[data] != rank:
                first[rank, data] = min(first.get((rank, data), num_divisions), at)
    received = np.zeros((num_ranks, num_divisions))
    total = np.zeros(num_ranks)
    for (rank, data), at in first.items():
        received[rank, at] += plan.num_bytes[data]
        for end in (rank, plan.home[data]):
            total[end] += plan.num_bytes[data]
    assert (received[:, 1 : num_divisions - 1] * num_divisions <= total[:, None]).all()


@pytest.mark.parametrize("masks", [(("causal", 1),), (("full", 2),), (("window:40", 5), ("causal", 1))])
@pytest.mark.parametrize("topology", ["8x1", "4x2"])
def test_the_objective_is_what_plans_send(masks, topology):
    given_ = problem(RAGGED, topology, masks=masks, ranks_per_node=4)
    choice = DCP._Choice.of(given_, 64, DCP._Settings(0.4, 0.1, 4, 0.05, 0.1))
    plan = hsap.compile(given_, "dcp", block=64)
    sent = 0
    for (forward, _), (_, layers) in zip(plan.programs, masks):
        moved = flows(plan, forward)
        sent += layers * int(moved.num_bytes[np.isin(forward.role[moved.at], (Role.Q, Role.KV, Role.O))
                                             & (forward.op[moved.at] == 0)].sum())  # fmt: skip
    assert connectivity(choice.graph, choice.rank, given_.topology.inter_sp) == sent > 0


@pytest.mark.parametrize("heads, topology", [((8, 2), "8x1"), ((8, 8), "4x2"), ((8, 2), "6x1")])
def test_both_balances_hold(heads, topology):
    plan = hsap.compile(problem(RAGGED, topology, heads, ranks_per_node=4), "dcp", block=64)
    assert hsap.verify(plan).ok
    area, tokens = plan.area_per_column(), plan.tokens_per_rank
    assert area.max() <= 1.05 * area.mean()
    assert tokens.max() <= 1.1 * tokens.mean() + 1


def test_every_mask_is_balanced_for_itself():
    plan = hsap.compile(problem(RAGGED, "8x1", masks=(("causal", 1), ("window:100", 5))), "dcp", block=32)
    for mask in range(2):
        area = plan.area_per_column(mask)
        assert area.max() <= 1.05 * area.mean()


def test_nodes_get_what_their_ranks_can_hold():
    # The group starts mid-node and ends in one: nodes of 1, 4 and 2 ranks.
    given_ = problem([64] * 56, "7x1", ranks_per_node=4, first_rank=3)
    plan = hsap.compile(given_, "dcp", block=64)
    assert plan.tokens_per_rank.tolist() == [8 * 64] * 7
    assert flows(plan, plan.programs[0][0]).num_bytes.sum() == 0, "whole documents stay where they are"


def test_less_balance_costs_fewer_bytes():
    lengths = [2048, 700, 300, 300, 100]
    tight, loose = (
        hsap.compile(problem(lengths, "8x1"), "dcp", block=64, area_slack=slack, token_slack=slack)
        for slack in (0.02, 0.6)
    )
    sent = [flows(plan, plan.programs[0][0]).num_bytes.sum() for plan in (tight, loose)]
    assert sent[1] < 0.9 * sent[0]


def test_blocks_are_ragged_and_results_leave_last():
    strategy = run("dcp", problem([150, 64, 1, 70], "3x1"), {"block": 64})
    assert sorted(strategy.shards.tokens.tolist()) == [1, 6, 22, 64, 64, 64, 64]
    for schedules, roles in ((strategy.forward, {Role.O}), (strategy.backward, {Role.DQ, Role.DKV})):
        assert set(schedules[0].transfers.role.tolist()) == roles
        assert set(schedules[0].transfers.stage.tolist()) == {4}
        assert schedules[0].stage.max() <= 3


def test_rows_cross_between_nodes_once_with_relay():
    given_ = problem([3000], "8x1", ranks_per_node=4)
    direct, relayed = (hsap.compile(given_, "dcp", block=128, relay=relay) for relay in (False, True))
    crossing = [flows(p, p.programs[0][0]).between_nodes(given_.node_of) for p in (direct, relayed)]
    assert hsap.verify(relayed).ok and crossing[1] < crossing[0]


def test_the_default_block_leaves_a_rank_several(monkeypatch):
    sizes = ((131_072, 1024), (262_144, 2048), (262_143, 1024), (65_536, 1024), (65_535, 512), (1 << 22, 4096), (1, 32))
    for tokens, want in sizes:
        assert DCP._default_block(problem([tokens], "32x1")) == want
    monkeypatch.setattr(DCP, "BLOCK_SIZES", (64, 128, 256))
    given_ = problem(RAGGED)
    settings_ = DCP._Settings(0.4, 0.1, 4, 0.05, 0.1)
    times = {size: DCP._Choice.of(given_, size, settings_).seconds(given_) for size in (64, 128, 256)}
    want = run("dcp", given_, {"block": min(times, key=times.get)})
    assert (run("dcp", given_, {"block": 0}).shards.spans == want.shards.spans).all()


def test_the_estimate_counts_computation_and_both_ends_of_transfers():
    given_ = problem(
        [64],
        "2x1",
        (1, 1),
        flops_per_s=64 * 65 / 2 * 4 * 16 / 0.8,
        attend_efficiency=0.8,
        intra_bytes_per_s=64 * 16 * 2.0,
    )
    graph = cells_hypergraph(np.array([64]), [(np.array([0]), np.array([0]), np.array([64 * 65 // 2]), 1)],
                             np.array([1]), np.array([[64 * 0 + 2 * 2 * 16, 4 * 16]]))  # fmt: skip
    at_home, away = (
        DCP._Choice(np.array([[0, 64]]), (), np.zeros((1, 3)), graph, np.array(rank)) for rank in ([0, 0], [0, 1])
    )
    assert at_home.seconds(given_) == pytest.approx(1.0)
    assert away.seconds(given_) == pytest.approx(1.0 + 4.0)


@pytest.mark.parametrize("lengths", [[], [1], [1, 1], [3], [1] * 40, [97]])
@pytest.mark.parametrize("options", [{}, {"block": 8, "divisions": 1}, {"block": 8, "divisions": 2, "eps_inter": 0}])
def test_odd_batches(lengths, options):
    for topology in ("8x1", "3x2"):
        plan = hsap.compile(problem(lengths, topology, ranks_per_node=2, first_rank=1), "dcp", **options)
        assert hsap.verify(plan).ok and plan.tokens_per_rank.sum() == sum(lengths)


HASH = """
import hsap
problem = hsap.Problem(hsap.Layout.from_lengths({lengths}), hsap.HeadShape(8, 2, 16), hsap.Topology(8, 1),
                       cluster=hsap.Cluster(ranks_per_node=4))
print(hsap.compile(problem, "dcp", block=64).hash)
"""


def test_plans_are_the_same_in_every_process():
    ours = [hsap.compile(problem(RAGGED, ranks_per_node=4), "dcp", block=64).hash for _ in range(2)]
    code = HASH.format(lengths=RAGGED)
    theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert {*ours, theirs} == {theirs}


def test_without_the_solver_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mtkahypar", None)
    _solver.cache_clear()
    with pytest.raises(ValueError, match=r"(?s)planner dcp: .*mtkahypar.*pip install 'hsap\[dcp\]'"):
        run("dcp", problem(RAGGED), {})
    _solver.cache_clear()
    assert PLANNERS["dcp"].slow


WRONG = [
    ({"block": -1}, "block"),
    ({"block": 1.5}, "block"),
    ({"eps_inter": -0.1}, "eps_inter"),
    ({"eps_intra": "x"}, "eps_intra"),
    ({"divisions": 0}, "divisions"),
    ({"area_slack": None}, "area_slack"),
    ({"token_slack": -1}, "token_slack"),
    ({"relay": 1}, "relay"),
]


@pytest.mark.parametrize("options, words", WRONG)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ValueError, match=f"planner dcp: {words}"):
        run("dcp", problem([5, 3]), options)


def test_weights_beyond_int64_are_refused():
    batch = problem([1 << 20], "2x1", (MAX_HEADS, 1), (("full", MAX_LAYERS),))
    with pytest.raises(ValueError, match=r"planner dcp: .* pairs of 32767 heads, .* are beyond 2.62 over 65536 layers"):
        run("dcp", batch, {"block": 1 << 17})


def test_blocks_too_small_for_the_batch_are_refused():
    with pytest.raises(ValueError, match=r"planner dcp: block=1 .* choose a larger block"):
        run("dcp", problem([100_000]), {"block": 1})
