"""The clock against arithmetic by hand, and against a slow simulation written from its words."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from streams import SlowClock, streams

import hsap
from hsap.compiler.pipeline import build
from hsap.ir.cluster import Cluster
from hsap.ir.effects import flows
from hsap.sim.clock import tick
from hsap.sim.cost import Messages, compute_seconds
from hsap.sim.share import Shares
from tests.strategies import scattered

TIMES = ("start", "worked", "end", "comm_start", "comm_end")


def ends(*ranks: list[tuple], shares: Shares | None = None) -> list[list[float]]:
    """End of every instruction of hand-written streams, by rank; the slow clock agrees."""
    arguments = (*streams(*ranks), shares)
    times, slow = tick(*arguments), SlowClock(*arguments).run()
    for name in TIMES:
        np.testing.assert_array_equal(getattr(times, name), getattr(slow, name), name)
    offsets = arguments[0].offsets.tolist()
    return [times.end[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def test_one_message() -> None:
    """Sent after 1 s of work, received by a rank that came at 0.25 s: both wait until 1 + 2 + 0.5."""
    sender = [("attend", 1), ("send", 1, 0, 2, 0.5), ("launch", 0), ("attend", 1), ("wait", 0)]
    receiver = [("attend", 0.25), ("recv", 0, 0), ("launch", 0), ("wait", 0), ("attend", 1)]
    assert ends(sender, receiver) == [[1, 1, 1, 2, 3.5], [0.25, 0.25, 0.25, 3.5, 4.5]]


def test_a_relay_chain() -> None:
    """What rank 0 sends goes from hand to hand: each hop starts where the last one ended."""
    first = [("send", 1, 0, 1, 0.25), ("launch", 0), ("wait", 0)]
    middle = []
    for i in (1, 2):
        get = [("recv", i - 1, i - 1), ("launch", i - 1), ("wait", i - 1)]
        middle.append([*get, ("send", i + 1, i, 1, 0.25), ("launch", i), ("wait", i)])
    last = [("recv", 2, 2), ("launch", 2), ("wait", 2)]
    assert [rank[-1] for rank in ends(first, *middle, last)] == [1.25, 2.5, 3.75, 3.75]


@pytest.mark.parametrize(("transfer", "makespan"), [(0.75, 4.0), (1.5, 1 + 3 * 1.5)])
def test_a_ring_hides_what_is_shorter(transfer: float, makespan: float) -> None:
    """Four stages of 1 s of work: messages under it cost nothing if shorter, else they alone set the pace."""
    n = 4

    def stage(rank: int, s: int) -> list[tuple]:
        moves = [("send", (rank + 1) % n, s, transfer), ("recv", (rank - 1) % n, s), ("launch", s)]
        return [*moves, ("attend", 1), ("wait", s)] if s < n - 1 else [("attend", 1)]

    done = ends(*([step for s in range(n) for step in stage(rank, s)] for rank in range(n)))
    assert [rank[-1] for rank in done] == [makespan] * n


def test_messages_on_one_port_go_one_after_another_and_latencies_overlap() -> None:
    """Rank 0 sends to three: nearest first, 1 s each; every message arrives half a second after it has left."""
    sends = [("send", to, 0, 1, 0.5) for to in (3, 1, 2)]
    receivers = [[("recv", 0, 0), ("launch", 0), ("wait", 0)] for _ in range(3)]
    done = ends([*sends, ("launch", 0), ("wait", 0)], *receivers)
    assert [rank[-1] for rank in done] == [3.5, 1.5, 2.5, 3.5]
    # The other way round they meet at the receiver's port; sending and receiving don't disturb each other.
    many = [("recv", src, 0) for src in (1, 2, 3)]
    senders = [[("send", 0, 0, 1, 0.5), ("launch", 0), ("wait", 0)] for _ in range(3)]
    done = ends([*many, ("launch", 0), ("wait", 0)], *senders)
    assert [rank[-1] for rank in done] == [3.5, 3.5, 2.5, 1.5]
    both = [[("send", 1 - r, 0, 1), ("recv", 1 - r, 0), ("launch", 0), ("wait", 0)] for r in range(2)]
    assert [rank[-1] for rank in ends(*both)] == [1, 1]


def test_links_inside_and_between_nodes_have_ports_of_their_own() -> None:
    sender = [("send", 1, 0, 1, 0, False), ("send", 2, 0, 3, 0, True), ("launch", 0), ("wait", 0)]
    receivers = [[("recv", 0, 0), ("launch", 0), ("wait", 0)] for _ in range(2)]
    assert [rank[-1] for rank in ends(sender, *receivers)] == [3, 1, 3]


def test_rounds_of_a_rank_go_one_at_a_time() -> None:
    """Rank 0's second round stands behind its first, which rank 1 joins late; rank 2 waits though it was there."""
    first = [("send", 1, 0, 1), ("launch", 0), ("send", 2, 1, 1), ("launch", 1), ("wait", 0), ("wait", 1)]
    late = [("attend", 5), ("recv", 0, 0), ("launch", 0), ("wait", 0)]
    there = [("recv", 0, 1), ("launch", 1), ("wait", 1)]
    assert [rank[-1] for rank in ends(first, late, there)] == [7, 6, 7]


def test_an_exchange_of_everybody_with_everybody_keeps_all_ports_busy() -> None:
    n = 5
    ranks = [[("all_to_all", 0, 0.5, {to: 1 for to in range(n) if to != rank})] for rank in range(n)]
    assert [rank[-1] for rank in ends(*ranks)] == [0.5 + (n - 1)] * n
    assert ends([("all_to_all", 0, 0.5, {})], []) == [[0.5], []]


def sends(to: int, transfer: float) -> list[tuple]:
    return [("send", to, 0, transfer, 0.0, True), ("launch", 0), ("wait", 0)]


def test_messages_share_a_card_while_both_use_it() -> None:
    """Ranks 0 and 1 of a card send 1 s and 2 s of bytes: at half speed until 2 s, then the longer one alone."""
    receivers = [[("recv", src, 0), ("launch", 0), ("wait", 0)] for src in (0, 1)]
    shares = replace(Shares.nothing(4), card=np.array([0, 0, 1, 2]), node=np.array([0, 0, 1, 1]))
    assert [rank[-1] for rank in ends(sends(2, 1), sends(3, 2), *receivers, shares=shares)] == [2, 3, 2, 3]


def test_both_directions_share_a_link_that_does_one_at_a_time() -> None:
    """1 s and 3 s of bytes at half speed: 2 s for the first; the other's rest of 2 s then goes at full speed."""
    pair = [[("send", 1 - r, 0, (1, 3)[r]), ("recv", 1 - r, 0), ("launch", 0), ("wait", 0)] for r in range(2)]
    found = ends(*pair, shares=replace(Shares.nothing(2), duplex=1.0))
    assert [rank[-1] for rank in found] == [4, 4]


def test_communication_takes_its_share_of_a_device() -> None:
    """Of 3 s of work, 1.5 are done in the 2 s of the round, waiting for the late receiver included."""
    sender = [("send", 1, 0, 1), ("launch", 0), ("attend", 3), ("wait", 0)]
    receiver = [("attend", 1), ("recv", 0, 0), ("launch", 0), ("wait", 0)]
    found = ends(sender, receiver, shares=replace(Shares.nothing(2), comm_share=0.25))
    assert found == [[0, 0, 3.5, 3.5], [1, 1, 1, 2]]


def test_ranks_share_the_cores_of_a_host() -> None:
    """Three ranks of 1, 2 and 3 s on two cores: two thirds of the speed until 1.5 s, then all have a core."""
    found = ends(*([("attend", seconds)] for seconds in (1, 2, 3)), shares=replace(Shares.nothing(3), cores=2.0))
    assert found == [[1.5], [2.5], [3.5]]


def test_messages_want_cores_too() -> None:
    """Ends of 1 core each beside 2 s of work, on 2 cores: all at two thirds while 1 s of bytes flows."""
    sender = [("send", 1, 0, 1), ("launch", 0), ("attend", 2), ("wait", 0)]
    receiver = [("recv", 0, 0), ("launch", 0), ("wait", 0)]
    found = ends(sender, receiver, shares=replace(Shares.nothing(2), cores=2.0, comm_cores=1.0))
    assert found == [[0, 0, 2.5, 2.5], [0, 0, 1.5]]


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([[("send", 1, 0, 1), ("launch", 0), ("wait", 0)], []], "rank 0 .* instruction 2, wait of round 0"),
        ([[], [("attend", 1), ("recv", 0, 3), ("launch", 3), ("wait", 3)]], "rank 1 .* instruction 3, wait of round 3"),
        ([[("wait", 4)]], "rank 0 .* instruction 0, wait of round 4"),
        ([[("all_to_all", 0, 0, {1: 1})], []], "rank 0 .* instruction 0, all_to_all of round 0"),
        (
            # Each waits for its own send before it launches the receive that the other needs.
            [
                [("send", 1 - r, r, 1), ("launch", r), ("wait", r), ("recv", 1 - r, 1 - r), ("launch", 1 - r)]
                for r in range(2)
            ],
            "rank 0 .* instruction 2, wait of round 0",
        ),
    ],
)
def test_streams_that_never_end_are_refused(ranks, told) -> None:
    with pytest.raises(ValueError, match=told):
        tick(*streams(*ranks))


CASES = (
    ("3x1", "4:2:8", (700, 1, 40, 300), {"ranks_per_node": 2, "first_rank": 1}),
    ("2x3", "3:3:8", (5, 260, 1), {"ranks_per_node": 3, "inter_bytes_per_s": 1e8, "intra_latency_s": 0}),
    ("5x2", "4:1:8", (1000,), {"ranks_per_node": 4, "intra_bytes_per_s": 1e9}),
    ("4x1", "2:2:8", (1, 1), {"kernel_overhead_s": 0, "inter_latency_s": 3e-3}),
    ("2x2", "4:2:8", (1,), {}),  # empty pieces of AllToAlls
    ("8x1", "2:1:8", (64,) * 30, {"ranks_per_node": 2, "inter_bytes_per_s": 2e7, "flops_per_s": 1e9}),
    ("6x1", "4:2:8", (300, 40, 90), {"ranks_per_node": 4, "num_nics": 1, "inter_bytes_per_s": 2e7, "duplex": 1.3}),
    ("8x1", "2:1:8", (500, 77), {"ranks_per_node": 8, "first_rank": 3, "num_nics": 3, "comm_share": 0.3}),
    (
        "4x2",
        "4:2:8",
        (70, 200, 41),
        {"ranks_per_node": 4, "num_nics": 2, "cores": 2.5, "comm_cores": 0.7, "duplex": 1, "inter_bytes_per_s": 1e7}
        | {"message_overhead_s": 1e-5, "comm_share": 0.1},
    ),
)


KINDS = ("ring", "allgather", "sap", "loongtrain", "basp")
"""Chains of hops; everything at once; q and KV early and late; relays and all-to-alls; groups of several sizes.

The clock knows streams, not planners: what others make of these is among what `scattered` asks for, below.
"""


@pytest.mark.parametrize("planner", KINDS)
def test_plans_take_as_long_as_in_the_slow_simulation(planner: str) -> None:
    for topology, heads, lengths, cluster in CASES:
        cluster = Cluster("odd", **cluster)
        problem = hsap.Problem(
            hsap.Layout.from_lengths(lengths),
            hsap.HeadShape.parse(heads),
            hsap.Topology.parse(topology),
            (("causal", 2), ("full", 1)),
            cluster,
        )
        try:
            plan = hsap.compile(problem, planner)
        except ValueError as error:
            assert planner in str(error)  # the planner says what it can't do
            continue
        agree(plan)


def agree(plan: hsap.Plan) -> None:
    """A plan is sound, and both clocks say the same of every instruction."""
    assert hsap.verify(plan).ok
    problem = plan.problem
    shares = Shares.of(problem.cluster, problem.num_ranks)
    for slices, pair in zip(plan.slices, plan.programs):
        for programs in pair:
            carried = flows(plan, programs)
            prices = Messages.of(carried, problem.node_of, problem.cluster)
            arguments = programs, compute_seconds(plan, programs, slices, problem.cluster), carried, prices, shares
            times, slow = tick(*arguments), SlowClock(*arguments).run()
            for name in TIMES:
                np.testing.assert_allclose(getattr(times, name), getattr(slow, name), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("topology", "own"), [("6x1", None), ("3x2", None), ("8x1", "2x4"), ("3x2", "2x3")])
@pytest.mark.parametrize("how", [{"relay": True}, {"detours": True}], ids=str)
def test_whatever_a_strategy_asks_for_takes_as_long_as_in_the_slow_simulation(topology, own, how) -> None:
    """Blocks anywhere and in any stage, rows relayed inside nodes, results over detours, ranks at another shape."""
    cluster = Cluster("odd", ranks_per_node=2, first_rank=1, inter_bytes_per_s=1e7, intra_bytes_per_s=3e7)
    layout = hsap.Layout.from_lengths((90, 140, 1, 37))
    problem = hsap.Problem(layout, hsap.HeadShape(8, 4, 8), hsap.Topology.parse(topology), cluster=cluster)
    own = None if own is None else hsap.Topology.parse(own)
    for seed in range(2):
        agree(build(problem, scattered(problem, 2, seed, topology=own, **how), "scattered", {}))


def test_cores_that_are_never_short_are_not_looked_at() -> None:
    """Two ranks of a node that compute with all four ports busy want 2 · (1 + 4 · 0.5) cores."""
    host = Cluster(ranks_per_node=2, cores=6.0, comm_cores=0.5)
    assert Shares.of(host, 4).cores == math.inf
    assert Shares.of(replace(host, cores=5.9), 4).cores == 5.9
    assert Shares.of(replace(host, cores=None), 4).cores == math.inf
