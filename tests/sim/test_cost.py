"""Costs by hand."""

from dataclasses import replace

import numpy as np
import pytest

import hsap
from hsap import clusters
from hsap.compiler.pipeline import build
from hsap.ir.block import Shards, cut_blocks
from hsap.ir.cluster import Cluster
from hsap.ir.effects import flows
from hsap.ir.program import Op, Role
from hsap.ir.schedule import DIRECTIONS, Schedule, Strategy
from hsap.ir.slice import area, canonical, slices
from hsap.runtime.kernels.cpu_flash import NARROW, STRIP_ROWS, _decompose
from hsap.sim.cost import Messages, compute_seconds, kernel_pieces, opening_seconds, tiled_pairs

FREE = Cluster(memory_bytes_per_s=1e30, kernel_overhead_s=0, slice_overhead_s=0)
TILE = 16


@pytest.mark.parametrize(
    ("slice_", "pairs"),
    [
        ((0, 1, 0, 1, -9, 9), TILE**2),  # one token costs a tile
        ((0, 32, 0, 48, -99, 99), 32 * 48),  # whole tiles cost what they are
        ((0, 33, 0, 48, -99, 99), 48 * 48),
        ((5, 21, 3, 20, -99, 99), 16 * 32),  # a tile begins where the slice does
        ((0, 64, 0, 64, -1000, 0), 64 * 65 / 2 + 63 * TILE / 2),  # causal: half a tile for each row but the last
        ((0, 2, 0, 2, -9, 0), 3 * 64 + TILE / 2),
    ],
)
def test_kernels_compute_whole_tiles(slice_, pairs) -> None:
    assert tiled_pairs(canonical(slices([slice_])), TILE).tolist() == [pairs]


def test_tiles_lie_between_the_area_and_what_is_drawn() -> None:
    """Counted one by one: the closed form is within a fifth, or a row of tiles, of the tiles that are touched."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        q0, k0, height, width = rng.integers(1, 200, 4)
        lo, hi = sorted((k0 - q0 + rng.integers(-200, 200, 2)).tolist())
        table = canonical(slices([(q0, q0 + height, k0, k0 + width, lo, hi)]))
        if not len(table):
            continue
        (q0, q1, k0, k1, lo, hi), (found,) = table[0].tolist(), tiled_pairs(table, TILE)
        touched = sum(
            max(k0 + b, q + lo) <= min(k0 + b + TILE - 1, k1 - 1, q_last + hi)
            for a in range(0, q1 - q0, TILE)
            for q, q_last in [(q0 + a, min(q0 + a + TILE, q1) - 1)]
            for b in range(0, k1 - k0, TILE)
        ) * TILE**2  # fmt: skip
        assert area(table)[0] <= found
        assert abs(found - touched) <= 0.2 * touched + TILE * (q1 - q0 + k1 - k0 + 2 * TILE)


def one_rank(lengths=(256,), mask="full", heads="8:2:64", topology="1x1"):
    return hsap.compile(
        hsap.Problem(
            hsap.Layout.from_lengths(lengths), hsap.HeadShape.parse(heads), hsap.Topology.parse(topology), ((mask, 1),)
        ),
        "ring",
    )


def costs(plan, direction: int, op: Op, cluster: Cluster) -> np.ndarray:
    programs = plan.programs[0][direction]
    return compute_seconds(plan, programs, plan.slices[0], cluster)[programs.op == op]


def test_attention_costs_its_operations_its_fold_and_its_overheads() -> None:
    plan = one_rank((256, 128))
    pairs = 256 * 256 + 128 * 128
    forward = costs(plan, 0, Op.ATTEND, replace(FREE, flops_per_s=1e12, attend_efficiency=0.5))
    np.testing.assert_allclose(forward, [4 * 64 * 8 * pairs / 0.5e12], rtol=1e-12)
    backward = costs(plan, 1, Op.ATTEND_GRAD, replace(FREE, flops_per_s=1e12, attend_grad_efficiency=0.25))
    np.testing.assert_allclose(backward, [10 * 64 * 8 * pairs / 0.25e12], rtol=1e-12)
    fast = replace(FREE, flops_per_s=1e30)
    np.testing.assert_allclose(costs(plan, 0, Op.ATTEND, replace(fast, kernel_overhead_s=1e-5)), [1e-5])
    np.testing.assert_allclose(costs(plan, 0, Op.ATTEND, replace(fast, slice_overhead_s=1e-6)), [2e-6])
    # 384 rows: o in bf16 and float32 with an lse in float32 and float64; dq as o without, dk and dv for 2 heads.
    o = 2 * 384 * 8 * (64 * (2 + 4) + 4 + 8)
    np.testing.assert_allclose(costs(plan, 0, Op.ATTEND, replace(fast, memory_bytes_per_s=1e9)), [o / 1e9])
    grads = 2 * 384 * 64 * (2 + 4) * (8 + 2 * 2)
    np.testing.assert_allclose(costs(plan, 1, Op.ATTEND_GRAD, replace(fast, memory_bytes_per_s=1e9)), [grads / 1e9])


def test_copies_and_folds_cost_the_bytes_they_touch() -> None:
    cluster = Cluster(memory_bytes_per_s=1e9, kernel_overhead_s=1e-3)
    # o: accumulator in float32 with an lse in float64, result in bf16 with one in float32.
    copied = 256 * 8 * (64 * 4 + 8 + 64 * 2 + 4)
    np.testing.assert_allclose(costs(one_rank(), 0, Op.COPY, cluster), [1e-3 + copied / 1e9], rtol=1e-12)
    assert costs(one_rank(()), 0, Op.COPY, cluster).tolist() == [0]  # nothing is no kernel
    plan = hsap.compile(
        hsap.Problem(hsap.Layout.from_lengths([96, 32]), hsap.HeadShape(4, 2, 16), hsap.Topology(4, 1)), "distflash"
    )
    programs = plan.programs[0][0]
    merges = np.flatnonzero(programs.op == Op.MERGE)
    assert len(merges) == 1
    merged = 32 * 4 * (16 * 2 + 4 + 2 * (16 * 4 + 8))  # the part is read, the accumulator read and written
    np.testing.assert_allclose(costs(plan, 0, Op.MERGE, cluster), [1e-3 + merged / 1e9], rtol=1e-12)
    sums = plan.programs[0][1]
    dkv = np.flatnonzero((sums.op == Op.SUM) & (sums.role == Role.DKV))
    summed = 32 * 2 * 2 * 16 * (2 + 2 * 4)
    assert len(dkv) >= 2
    found = compute_seconds(plan, sums, plan.slices[0], cluster)[dkv]
    np.testing.assert_allclose(found, 1e-3 + summed / 1e9, rtol=1e-12)


def test_an_all_to_all_reorders_what_it_holds() -> None:
    """q of 2 ranks: 128 rows of 8 heads are read, half of them packed and read again, 256 rows of 4 heads written."""
    plan = one_rank(topology="1x2")
    found = costs(plan, 0, Op.ALL_TO_ALL, Cluster(memory_bytes_per_s=1e9, kernel_overhead_s=0))
    row = 64 * 2
    np.testing.assert_allclose(found[0], (128 * 8 * row + 2 * (128 * 4 * row) + 256 * 4 * row) / 1e9)


def test_messages_cost_their_own_link() -> None:
    plan = hsap.compile(
        hsap.Problem(hsap.Layout.from_lengths([90]), hsap.HeadShape(4, 2, 16), hsap.Topology(3, 1)), "ring"
    )
    cluster = Cluster(intra_bytes_per_s=1e9, inter_bytes_per_s=1e8, intra_latency_s=1e-3, inter_latency_s=2e-3)
    carried = flows(plan, plan.programs[0][0])
    prices = Messages.of(carried, np.array([0, 0, 1]), cluster)
    num_bytes = 30 * 2 * 2 * 16 * 2
    for src, dst, crosses, transfer, latency in zip(
        carried.src, carried.dst, prices.crosses, prices.transfer_s, prices.latency_s
    ):
        assert crosses == (2 in (src, dst))
        assert transfer == num_bytes / (1e8 if crosses else 1e9) and latency == (2e-3 if crosses else 1e-3)


@pytest.mark.parametrize("name", clusters.names())
def test_presets_are_sane(name: str) -> None:
    """A causal document of 32K tokens on one device reaches most of the kernel's rate, one of 32 tokens nearly none."""
    cluster = clusters.read(name)
    for tokens, low, high in ((32768, 0.85, 1.0), (32, 0.0, 0.2)):
        plan = one_rank((tokens,), "causal", "8:2:128")
        ideal = 4 * 128 * 8 * tokens * (tokens + 1) / 2 / (cluster.flops_per_s * cluster.attend_efficiency)
        assert low <= ideal / costs(plan, 0, Op.ATTEND, cluster)[0] <= high


def test_few_rows_and_few_tiles_reach_a_part_of_the_rate() -> None:
    plan = one_rank((256,))
    fast = replace(FREE, flops_per_s=1e12, attend_efficiency=1.0, tile_tokens=1)
    (whole,) = costs(plan, 0, Op.ATTEND, fast)
    for points, part in ((((64, 0.25), (1024, 0.75)), 0.5), (((512, 0.25),), 0.25), (((2, 0.1), (256, 1.0)), 1.0)):
        found = costs(plan, 0, Op.ATTEND, replace(fast, rows_efficiency=points))
        np.testing.assert_allclose(found, whole / part, rtol=1e-12)
    # 8 heads of 4 tiles on 64 processors: half of them stand idle.
    tiled = replace(fast, tile_tokens=64)
    assert costs(plan, 0, Op.ATTEND, replace(tiled, num_units=64)) == pytest.approx(2 * whole, rel=1e-12)
    assert costs(plan, 0, Op.ATTEND, replace(tiled, num_units=32)) == pytest.approx(whole, rel=1e-12)


def test_pieces_of_kernels_that_know_squares_are_those_of_the_cpu_kernel() -> None:
    """The runtime's own decomposition: pieces of the same rows, columns and kind."""
    rng, lone = np.random.default_rng(2), clusters.read("cpu-gloo")
    assert lone.narrow_tokens == NARROW == 2 * STRIP_ROWS
    for _ in range(200):
        q0, k0, height, width = rng.integers(1, 1500, 4)
        lo, hi = sorted((k0 - q0 + rng.integers(-1500, 1500, 2)).tolist())
        table = canonical(slices([(q0, q0 + height, k0, k0 + width, lo, hi)]))
        pieces, owner = kernel_pieces(table, np.zeros(len(table), int), lone.narrow_tokens)
        assert not owner.any()
        want = [(p.rows.stop - p.rows.start, p.cols.stop - p.cols.start, p.causal) for p in _decompose(table)]
        rows, cols = pieces[:, 1] - pieces[:, 0], pieces[:, 3] - pieces[:, 2]
        found = zip(rows.tolist(), cols.tolist(), (area(pieces) < rows * cols).tolist())
        assert sorted(want) == sorted(found)


def test_folds_have_rates_of_their_own() -> None:
    plan = one_rank()
    slow = replace(FREE, memory_bytes_per_s=1e9, flops_per_s=1e30)
    for direction, op, field in ((0, Op.ATTEND, "attend_bytes_per_s"), (1, Op.ATTEND_GRAD, "attend_grad_bytes_per_s")):
        found = costs(plan, direction, op, replace(slow, **{field: 2e9}))
        np.testing.assert_allclose(found, costs(plan, direction, op, slow) / 2, rtol=1e-12)


def test_before_its_stream_a_rank_packs_keys_and_sums_gradients() -> None:
    plan = one_rank((96, 32), heads="8:2:64")
    cluster = replace(FREE, memory_bytes_per_s=1e9, attend_grad_bytes_per_s=1e8)
    # bf16: keys and values of 2 heads read and written; do and o of 8 read, and six times in float32.
    forward, backward = (opening_seconds(plan, programs, cluster) for programs in plan.programs[0])
    np.testing.assert_allclose(forward, [128 * 2 * (2 * 2 * 64 * 2) / 1e9], rtol=1e-12)
    np.testing.assert_allclose(backward, [128 * 8 * 64 * (2 * 2 + 6 * 4) / 1e8], rtol=1e-12)
    timeline = hsap.simulate(plan, cluster)
    for found, programs, (trace,) in zip((forward, backward), plan.programs[0], map(timeline.__getitem__, DIRECTIONS)):
        alone = compute_seconds(plan, programs, plan.slices[0], cluster)
        np.testing.assert_allclose(trace.makespan_s, alone.sum() + found[0], rtol=1e-12)


def test_launches_cost_what_their_messages_do() -> None:
    """A ring of 3: each launch sends and receives one message; an exchange of 2 ranks one each way."""
    plan = hsap.compile(
        hsap.Problem(hsap.Layout.from_lengths([90]), hsap.HeadShape(4, 2, 16), hsap.Topology(3, 1)), "ring"
    )
    assert costs(plan, 0, Op.LAUNCH, replace(FREE, message_overhead_s=1e-3)).tolist() == [2e-3] * 6
    found = costs(one_rank(topology="1x2"), 0, Op.ALL_TO_ALL, replace(FREE, message_overhead_s=1e-3))
    np.testing.assert_allclose(found, 2e-3, rtol=1e-9)


def test_a_document_cut_into_shards_costs_on_one_rank_what_it_costs_whole() -> None:
    """Ten shards make 55 slices of one kernel, which are one causal slice."""
    problem = hsap.Problem(hsap.Layout.from_lengths((640,)), hsap.HeadShape.parse("8:2:64"), hsap.Topology.parse("1x1"))
    whole = one_rank((640,), "causal")
    shards = Shards.of([(0, np.array([[64 * i, 64 * i + 64]])) for i in range(10)])
    blocks = cut_blocks(shards, problem.slices(0))
    schedule = Schedule.of(blocks, np.zeros(len(blocks), int), np.zeros(len(blocks), int))
    cut = build(problem, Strategy(shards, (schedule,), (schedule,)), "cut", {})
    assert len(cut.slices[0]) == 55
    for direction, op in enumerate((Op.ATTEND, Op.ATTEND_GRAD)):
        assert costs(cut, direction, op, Cluster()).tolist() == costs(whole, direction, op, Cluster()).tolist()
