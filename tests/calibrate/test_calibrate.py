"""Calibration: what is fitted is what times were made of, and the file that is written is one that is read."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from hsap import clusters
from hsap.calibrate import fit, links
from hsap.calibrate.links import INTER, INTRA, MANY, MESSAGES
from hsap.calibrate.measure import MEMORY_ROWS, ROWS, shapes
from hsap.calibrate.readings import Kernel, Link, Memory, Network, Readings, together
from hsap.cli import main
from hsap.ir.cluster import Cluster
from hsap.ir.heads import HeadShape
from hsap.ir.precision import Precision
from hsap.ir.program import Op
from hsap.ir.slice import canonical, slices
from hsap.sim.cost import Kernels
from tests.parity import REPOSITORY

HEADS = HeadShape(8, 2, 64, "fp32")
TRUE = Cluster(
    "true",
    flops_per_s=6e10,
    tile_tokens=1,
    narrow_tokens=256,
    diagonal_tokens=128,
    rows_efficiency=tuple(zip(ROWS, (0.4, 0.7, 0.8, 0.85, 0.9, 1.0, 0.95))),
    kernel_overhead_s=2e-5,
    slice_overhead_s=1e-4,
    grad_slice_overhead_s=3e-4,
    attend_bytes_per_s=6e9,
    attend_grad_bytes_per_s=3e9,
    merge_bytes_per_s=8e9,
    memory_bytes_per_s=2e10,
    exchange_bytes_per_s=5e9,
    attend_efficiency=0.7,
    attend_grad_efficiency=0.6,
    cores=2,
    comm_cores=0.6,
    duplex=1.2,
    intra_bytes_per_s=3e9,
    intra_latency_s=6e-5,
    message_overhead_s=4e-5,
)


DEVICE = replace(TRUE, tile_tokens=64, narrow_tokens=None, num_units=132, cores=None, comm_cores=0.0)
"""A device of many processors that short slices leave partly empty."""


def kernel_seconds(direction: int, table: np.ndarray, cluster: Cluster) -> float:
    """What the simulator takes the kernel to need: what is fitted is to say the same again."""
    work = Kernels.of(table, np.zeros(len(table), np.int64), 1, cluster)
    op, every = (Op.ATTEND, Op.ATTEND_GRAD)[direction], np.array([HEADS.all_heads])
    return float(work.seconds(np.array([0]), op, every, HEADS.head_dim, Precision.of(HEADS.dtype), cluster)[0])


def made_up(cluster: Cluster) -> Readings:
    """Microbenchmarks of a machine that is exactly as the cluster says."""
    rates = {
        **dict.fromkeys(("copy", "sum"), cluster.memory_bytes_per_s),
        "merge": cluster.merge_bytes_per_s,
        "exchange": cluster.exchange_bytes_per_s,
    }
    kernels = tuple(
        Kernel(kind, direction, tuple(map(tuple, table.tolist())), kernel_seconds(direction, table, cluster))
        for kind, rows in shapes()
        for table in [canonical(slices(rows))]
        for direction in range(2)
    )
    memory = tuple(
        Memory(what, rows, cluster.kernel_overhead_s + fit._moved(what, rows, HEADS) / rate)
        for rows in MEMORY_ROWS
        for what, rate in rates.items()
    )
    return Readings(cluster.flops_per_s, kernels, memory)


def stretched(cluster: Cluster, ends: int) -> float:
    """How many times longer messages take whose ends on one host are so many."""
    return 1.0 if cluster.cores is None else max(1.0, ends * cluster.comm_cores / cluster.cores)


def made_up_link(cluster: Cluster, crosses: bool) -> Link:
    """Messages between two ranks, of a node or of two, exactly as the cluster says."""
    rate, latency_s = (float(value) for value in cluster.link(crosses))
    message, hosts = cluster.message_overhead_s, 1 + crosses
    one_way = rate / stretched(cluster, 2 // hosts)
    each_way = rate * cluster.duplex / 2 / stretched(cluster, 4 // hosts)
    return Link(
        hops=tuple((n, latency_s + message + n / one_way) for n in MESSAGES),
        exchanges=tuple((n, latency_s + 2 * message + n / each_way) for n in MESSAGES),
        launches=tuple((n, 9e-5 + n * message) for n in MANY),
        message_cores=cluster.comm_cores,
    )


def made_up_links(cluster: Cluster, num_ranks: int, ranks_per_node: int) -> Network:
    """Messages on a cluster whose nodes have so many of these ranks."""
    there = links.pairs(num_ranks, ranks_per_node)
    between = {kind: made_up_link(cluster, kind == INTER) if kind in there else None for kind in (INTRA, INTER)}
    others, inside = num_ranks - 1, ranks_per_node - 1
    a_card = ranks_per_node / (cluster.num_nics or ranks_per_node)
    slowest = max(inside / cluster.intra_bytes_per_s, (others - inside) * a_card / cluster.inter_bytes_per_s)
    latency_s = cluster.inter_latency_s if others > inside else cluster.intra_latency_s
    fixed, scale = latency_s + 2 * others * cluster.message_overhead_s, 2 / cluster.duplex
    scale *= stretched(cluster, 2 * ranks_per_node)
    everybody, counterparts = tuple((n, fixed + n * slowest * scale) for n in MESSAGES), None
    if num_ranks > ranks_per_node > 1:
        a_rank_s = MESSAGES[-1] / cluster.inter_bytes_per_s * 2 / cluster.duplex
        together_s = a_rank_s * a_card * stretched(cluster, 2 * ranks_per_node)
        counterparts = a_rank_s * stretched(cluster, 2), together_s
    return Network(**between, everybody=everybody, counterparts=counterparts)


FREE = replace(DEVICE, slice_overhead_s=0.0, grad_slice_overhead_s=0.0)
"""A device to which many pieces are as dear as one."""


KNOWN = ("ranks_per_node", "tile_tokens", "narrow_tokens", "num_units", "cores", "capacity_bytes")
"""What isn't measured."""


def assert_found(found: Cluster, true: Cluster, besides: tuple[str, ...] = ()) -> None:
    """All but some of the fields are what they really are."""
    for name in Cluster.__slots__:
        if name.startswith(besides):
            continue
        want, got = getattr(true, name), getattr(found, name)
        if name == "rows_efficiency":
            np.testing.assert_allclose(got, want, rtol=0.05)
        elif isinstance(want, float):
            assert got == pytest.approx(want, rel=0.05, abs=1e-12), name
        else:
            assert got == want, name


@pytest.mark.parametrize("true", [TRUE, DEVICE, FREE], ids=["host", "device", "free pieces"])
def test_a_machine_is_found_again(true: Cluster) -> None:
    base = Cluster("true", **{name: getattr(true, name) for name in KNOWN})
    found, residuals = fit.fit_kernels(made_up(true), HEADS, base)
    found, more = fit.fit_links(made_up_links(true, 2, 2), 2, 2, found)
    assert_found(found, replace(true, inter_bytes_per_s=found.intra_bytes_per_s), besides=("inter_latency_s",))
    assert found.inter_latency_s == found.intra_latency_s
    assert max(np.abs(residual.errors).max() for residual in residuals + more) < 0.05
    assert all("%" in str(residual) for residual in residuals)


FOURS = replace(TRUE, ranks_per_node=4, cores=8.0, inter_bytes_per_s=1e8, inter_latency_s=2e-4, duplex=1.9, num_nics=2)
"""Nodes of four ranks that share two cards."""


@pytest.mark.parametrize(
    ("true", "num_nodes"),
    [
        (FOURS, 2),
        (FOURS, 3),
        (replace(FOURS, num_nics=1, cores=3.0), 2),
        (replace(FOURS, num_nics=None), 2),
        (replace(DEVICE, ranks_per_node=8, num_nics=4, inter_bytes_per_s=25e9, inter_latency_s=1e-5), 2),
    ],
    ids=["two cards", "three nodes", "one card and few cores", "a card each", "devices"],
)
def test_links_of_both_kinds_and_their_cards_are_found_again(true: Cluster, num_nodes: int) -> None:
    num_ranks = num_nodes * true.ranks_per_node
    measured = made_up_links(true, num_ranks, true.ranks_per_node)
    base = replace(true, intra_bytes_per_s=1.0, inter_bytes_per_s=1.0, intra_latency_s=0.0, inter_latency_s=0.0)
    base = replace(base, duplex=1.0, num_nics=None, message_overhead_s=0.0, comm_cores=0.0)
    found, residuals = fit.fit_links(measured, num_ranks, true.ranks_per_node, base)
    assert_found(found, true)
    assert [residual.what for residual in residuals] == [
        *("hops inside a node", "exchanges inside a node", "hops between nodes", "exchanges between nodes"),
        "all to all, not fitted",
    ]
    assert max(np.abs(residual.errors).max() for residual in residuals) < 0.05


def test_the_rate_is_that_of_large_messages() -> None:
    # A shaper lets the first 64 KiB through at once; the line's own rate is 1e8.
    num_bytes = np.array(MESSAGES, float)
    start, slow = fit._start_and_slope(num_bytes, 1e-4 + np.maximum(num_bytes - 65536, 0) / 1e8)
    assert start == pytest.approx(1e-4 - 4096 * slow) and 1 / slow == pytest.approx(1e8, rel=1e-3)


def test_nodes_of_one_rank_have_only_a_network() -> None:
    true = replace(FOURS, ranks_per_node=1, num_nics=None)
    found, residuals = fit.fit_links(made_up_links(true, 2, 1), 2, 1, replace(true, inter_bytes_per_s=1.0))
    assert_found(found, replace(true, intra_bytes_per_s=found.inter_bytes_per_s), besides=("intra_latency_s",))
    assert found.intra_latency_s == found.inter_latency_s and len(residuals) == 2


@pytest.mark.parametrize(("reached", "cards"), [(0.9, 1), (1.3, 1), (1.9, 2), (2.6, 2), (3.5, None), (9.0, None)])
def test_cards_divide_a_node_s_ranks(reached: float, cards: int | None) -> None:
    assert fit._cards(1.0, 4 / reached, 4, DEVICE) == cards


def test_ranks_that_measured_are_averaged_and_the_slowest_counts() -> None:
    asks = Link(((8, 1.0),), ((8, 2.0),), ((1, 3.0),), 0.2)
    answers = Link((), ((8, 4.0),), ((1, 1.0),), 0.4)  # the second of a pair doesn't know how long a hop took
    links = [
        (asks, asks, (1.0, 5.0)),
        (answers, None, (2.0, 4.0)),
        (None, answers, (1.0, 4.0)),
        (None, None, (1.0, 4.0)),
    ]
    by_rank = [
        Readings(
            2.0 + i, (Kernel("x", 0, (), 1.0 + i),), (Memory("copy", 8, 2.0 + i),),
            Network(intra, inter, ((8, 1.0 + i),), counterparts),
        )
        for i, (intra, inter, counterparts) in enumerate(links)
    ]  # fmt: skip
    found = together(by_rank)
    both = Link(((8, 1.0),), ((8, 3.0),), ((1, 2.0),), pytest.approx(0.3))
    assert found == Readings(
        3.5, (Kernel("x", 0, (), 2.5),), (Memory("copy", 8, 3.5),), Network(both, both, ((8, 2.5),), (2.0, 5.0))
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_readings_go_between_processes_as_json(num_ranks: int) -> None:
    network = None if num_ranks == 1 else made_up_links(FOURS, num_ranks, 2)
    told = replace(made_up(TRUE), network=network)
    assert Readings.from_json(json.loads(json.dumps(told.to_json()))) == told


def test_other_ranks_than_the_launcher_s_are_refused(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["bench", "calibrate", "--ranks", "2"]) == 2
    assert "--ranks 2: a launcher started 4 ranks" in capsys.readouterr().err


def test_nonnegative_least_squares_are_the_best_of_all_subsets() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        terms, wanted = rng.normal(size=(9, 4)), rng.normal(size=9)
        found = fit.nonnegative(terms, wanted)
        best = np.square(wanted).sum()
        for size in range(1, 5):
            for chosen in itertools.combinations(range(4), size):
                x = np.linalg.lstsq(terms[:, chosen], wanted, rcond=None)[0]
                if (x >= 0).all():
                    best = min(best, np.square(terms[:, chosen] @ x - wanted).sum())
        assert (found >= 0).all() and np.square(terms @ found - wanted).sum() == pytest.approx(best, rel=1e-9)


@pytest.mark.slow
def test_the_command_measures_and_writes_a_cluster(tmp_path, capsys) -> None:
    path = str(tmp_path / "mine.yaml")
    assert (
        main(["bench", "calibrate", "--turns", "1", "--device", "cpu", "--heads", "2:1:16", "--json", "-o", path]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    cluster = clusters.read(path)
    assert cluster.name == "mine" and told["cluster"]["name"] == "mine"
    for name, value in told["cluster"].items():
        if isinstance(value, float):
            assert getattr(cluster, name) == pytest.approx(value, rel=1e-3)
    assert 1e6 < cluster.flops_per_s < 1e14 and 1e6 < cluster.intra_bytes_per_s < 1e13
    assert {"attend rectangle", "attend grad ragged", "hops inside a node"} <= told["residuals"].keys()
    lengths = ["--lengths", "300,100", "--topology", "2x1"]
    assert main(["plan", *lengths, "--cluster", path, "--json"]) == 0


@pytest.mark.slow
def test_a_launcher_s_ranks_measure_together(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    where = ["--out", str(path), "--turns", "1", "--device", "cpu", "--heads", "2:1:16"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command = [*agent, "--nproc-per-node=2", "-m", "hsap.cli", "bench", "calibrate", *where]
    told = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert told.count("hops inside a node") == 1 and "2 ranks" in told
    assert 1e6 < clusters.read(str(path)).intra_bytes_per_s < 1e13


def test_what_can_t_be_calibrated_is_refused(capsys) -> None:
    for more, told in (
        (["-o", "mine.txt"], "--out mine.txt: --cluster takes files that end with .yaml"),
        (["-o", "no/such/mine.yaml"], "--out no/such/mine.yaml: its folder isn't there"),
        (["--ranks", "0"], "calibrate: ranks is 0"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["--heads", "8:3"], "--heads, --dtype: heads: can't read '8:3'"),
        (["--turns", "0"], "calibrate: turns is 0"),
    ):
        assert main(["bench", "calibrate", *more]) == 2
        assert told in capsys.readouterr().err
