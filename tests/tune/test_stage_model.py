"""The stage model against arithmetic by hand, and against the event clock, which runs instructions."""

from dataclasses import replace

import numpy as np
import pytest

from hsap import clusters
from hsap.api import simulate
from hsap.compiler.pipeline import build
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.schedule import DIRECTIONS
from hsap.planners import run
from hsap.tune.contention import Links
from hsap.tune.stages import price
from tests.bench import stagemodel

ROUND = Cluster(
    "round", 4, 0, 1e9, 1e8, 1e-3, 2e-3, 1e12, None, 1e9, 1e-4, 1e-5, attend_efficiency=0.5,
    attend_grad_efficiency=0.25, tile_tokens=1,
)  # fmt: skip


PLANNERS = ("ring", "zigzag", "sap", "nested", "flashcp", "mesh", "usp")
HEADS = HeadShape(2, 1, 8, "fp32")


def one(lengths, topology, heads=HEADS, cluster=ROUND, masks=(("causal", 1),)):
    return Problem(Layout.from_lengths(lengths), heads, Topology.parse(topology), masks, cluster)


def test_one_rank_by_hand() -> None:
    problem = one([10], "1x1")
    seconds = price(problem, run("ring", problem, {})).seconds[0]
    # 55 pairs of 2 heads of 8: 4 and 10 operations each; half a tile a row that the diagonal cuts, the last one not.
    pairs = 55 + 9 / 2
    # Results: rows of 2 × 8 in fp32, accumulated in fp64 with lse in fp64 (fp32 where it isn't accumulated).
    # Before them: keys and values are read and written, do and o are read and widened to be multiplied.
    forward = (
        2 * 10 * 16 * 4 / 1e9
        + 1e-4
        + 1e-5
        + 4 * 8 * 2 * pairs / 0.5e12
        + 2 * 10 * (16 * 4 + 2 * 4 + 16 * 8 + 2 * 8) / 1e9
    )
    forward += 1e-4 + 10 * (16 * 8 + 2 * 8 + 16 * 4 + 2 * 4) / 1e9
    assert seconds[0] == pytest.approx(forward, rel=1e-12)
    dq, dkv = 10 * (16 * 4 + 16 * 8), 10 * (16 * 4 + 16 * 8)
    backward = (
        10 * (2 * 16 * 4 + 6 * 16 * 8) / 1e9
        + 1e-4
        + 1e-5
        + 10 * 8 * 2 * pairs / 0.25e12
        + (2 * dq + 2 * dkv) / 1e9
        + 2 * 1e-4
        + (dq + dkv) / 1e9
    )
    assert seconds[1] == pytest.approx(backward, rel=1e-12)


def test_a_transfer_hides_under_the_blocks_before_it() -> None:
    free = replace(
        ROUND, flops_per_s=1e30, memory_bytes_per_s=1e30, kernel_overhead_s=0, slice_overhead_s=0, intra_latency_s=1
    )
    problem = one([400, 1], "2x1", cluster=free)
    alone = price(problem, run("ring", problem, {})).seconds[0][0]
    # Rank 1 needs the 201 rows of rank 0's KV: 2 × 8 elements of 4 bytes each, a latency, and nothing else counts.
    assert alone == pytest.approx(1 + 201 * 64 / 1e9, rel=1e-6)
    slow = replace(free, kernel_overhead_s=3)
    problem = one([400, 1], "2x1", cluster=slow)
    # Two kernels and the last copy; the transfer runs under the first.
    assert price(problem, run("ring", problem, {})).seconds[0][0] == pytest.approx(9, rel=1e-6)


def test_nodes_are_reached_over_the_slow_link() -> None:
    problem = one([800], "8x1")
    strategy = run("allgather", problem, {})
    near = price(problem, strategy, replace(ROUND, ranks_per_node=8)).seconds[0][0]
    assert price(problem, strategy, ROUND).seconds[0][0] > near


@pytest.mark.parametrize(
    ("lengths", "topology", "heads", "within"),
    [
        ([], "4x1", (4, 2, 8), 0.1),
        # Ranks without a token: nothing but latencies, and all-to-alls that some ranks take no part in.
        ([3], "4x2", (9, 3, 8), 0.3),
        ([1] * 9, "4x1", (4, 2, 8), 0.1),
        ([777, 1, 40, 1], "3x2", (9, 3, 16), 0.1),
        ([500], "2x8", (8, 2, 8), 0.1),
    ],
)
@pytest.mark.parametrize("planner", PLANNERS)
def test_odd_batches_agree_with_the_event_clock(planner, lengths, topology, heads, within) -> None:
    masks = (("causal", 2), ("window:32", 1))
    problem = one(lengths, topology, HeadShape(*heads, "bf16"), replace(ROUND, first_rank=1), masks)
    strategy = run(planner, problem, {})
    told = price(problem, strategy)
    timeline = simulate(build(problem, strategy, planner, {}))
    for direction, name in enumerate(DIRECTIONS):
        assert told.layer_s(problem, direction) == pytest.approx(timeline.seconds(name), rel=within)
    assert told.tokens == timeline.plan.tokens_per_rank.max()


def test_within_ten_percent_of_the_event_clock() -> None:
    found = np.array(
        [
            stagemodel.errors(planner, problem)
            for planner, _, problem in stagemodel.cases(PLANNERS, stagemodel.PACKS[:3], stagemodel.SHAPES[1:4])
        ]
    )
    assert np.abs(found[:, :2]).max() < 0.1 and np.median(np.abs(found[:, :2])) < 0.01
    assert np.abs(found[:, 2]).max() < 0.4 and np.median(np.abs(found[:, 2])) < 0.1


def test_neighbours_on_one_card_wait_for_each_other() -> None:
    free = {"flops_per_s": 1e30, "memory_bytes_per_s": 1e30, "kernel_overhead_s": 0, "slice_overhead_s": 0}
    own = replace(ROUND, ranks_per_node=2, inter_latency_s=0, **free)
    problem = one([800], "4x1", cluster=own)
    strategy = run("allgather", problem, {})
    alone, shared = (price(problem, strategy, replace(own, num_nics=n)).seconds[0][0] for n in (2, 1))
    assert alone < shared <= 2 * alone
    links = [
        Links.of(replace(problem, cluster=replace(own, num_nics=n)), [0], np.zeros(2, int), np.array([0, 1]),
                 np.array([2, 3]), np.array([1e8, 3e8]))
        for n in (2, 1)
    ]  # fmt: skip
    assert links[0].guess_s() == pytest.approx([1, 3]) and (links[0].cards == -1).all()
    seconds, start = links[1].guess_s(), np.zeros(2)
    for _ in range(50):
        seconds = links[1].corrected_s(start, seconds)
    # Both at half the rate until the first is through, then the other alone.
    assert seconds == pytest.approx([2, 4])


def test_a_link_that_shares_its_rate_between_directions() -> None:
    half = replace(ROUND, duplex=1.0)
    problem = one([8], "2x1", cluster=half)
    links = Links.of(problem, [0], np.zeros(2, int), np.array([0, 1]), np.array([1, 0]), np.array([1e9, 4e9]))
    assert links.alone_s == pytest.approx([2, 5])


def test_ranks_compute_slower_while_they_communicate() -> None:
    problem = one([400, 1], "2x1", cluster=replace(ROUND, comm_share=0.5, kernel_overhead_s=1, slice_overhead_s=0))
    free = replace(
        problem.cluster, flops_per_s=1e30, memory_bytes_per_s=1e30, intra_latency_s=0, intra_bytes_per_s=1e30
    )
    quick, slow = (
        price(problem, run("ring", problem, {}), replace(free, intra_latency_s=s)).seconds[0][0] for s in (0, 1.5)
    )
    # Two kernels and a copy; while the transfer is under way the first kernel does 0.75 of its second.
    assert (quick, slow) == (pytest.approx(3), pytest.approx(3.75))


def test_ranks_of_a_host_share_its_cores() -> None:
    free = {"flops_per_s": 1e30, "memory_bytes_per_s": 1e30, "kernel_overhead_s": 1, "slice_overhead_s": 0}
    problem = one([100] * 4, "4x1", cluster=replace(ROUND, **free))
    strategy = run("sap", problem, {})
    # A kernel and a copy each, nothing travels: side by side, or two at a time.
    for cores, seconds in ((None, 2), (4.0, 2), (2.0, 4)):
        assert price(problem, strategy, replace(problem.cluster, cores=cores)).seconds[0][0] == pytest.approx(seconds)


def test_hosts_agree_with_the_event_clock() -> None:
    host = replace(clusters.read("cpu-gloo"), cores=4.0, comm_cores=0.5, message_overhead_s=5e-5)
    problem = one([9000, 4000, 300, 40] * 2, "8x1", HeadShape(8, 2, 64, "fp32"), host)
    found = np.array([stagemodel.errors(planner, problem) for planner in PLANNERS])
    assert np.abs(found[:, :2]).max() < 0.2 and np.median(np.abs(found[:, :2])) < 0.05
