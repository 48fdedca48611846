"""Calibration: what is fitted is what times were made of, and the file that is written is one that is read."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from hsap import clusters
from hsap.bench import fit
from hsap.bench.measure import MANY, MEMORY_ROWS, MESSAGES, ROWS, shapes
from hsap.cli import main
from hsap.ir.cluster import Cluster
from hsap.ir.heads import HeadShape
from hsap.ir.precision import Precision
from hsap.ir.program import Op
from hsap.ir.slice import canonical, slices
from hsap.sim.cost import Kernels

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


def made_up(cluster: Cluster) -> dict:
    """Microbenchmarks of a machine that is exactly as the cluster says."""
    rates = {
        **dict.fromkeys(("copy", "sum"), cluster.memory_bytes_per_s),
        "merge": cluster.merge_bytes_per_s,
        "exchange": cluster.exchange_bytes_per_s,
    }
    kernels = [
        [kind, direction, table.tolist(), kernel_seconds(direction, table, cluster)]
        for kind, rows in shapes()
        for table in [canonical(slices(rows))]
        for direction in range(2)
    ]
    memory = [
        [what, rows, cluster.kernel_overhead_s + fit._moved(what, rows, HEADS) / rate]
        for rows in MEMORY_ROWS
        for what, rate in rates.items()
    ]
    # On a host two ends of 0.6 cores each way: two messages want 2.4 of the 2 cores.
    both = cluster.intra_bytes_per_s * (cluster.duplex / 2) * (1 if cluster.cores is None else 2 / 2.4)
    fixed = cluster.intra_latency_s + cluster.message_overhead_s
    return {
        "matmul": cluster.flops_per_s,
        "kernels": kernels,
        "memory": memory,
        "hops": [[n, fixed + n / cluster.intra_bytes_per_s] for n in MESSAGES],
        "exchanges": [[n, fixed + cluster.message_overhead_s + n / both] for n in MESSAGES],
        "everybody": [[n, fixed + cluster.message_overhead_s + n / both] for n in MESSAGES],
        "launches": [[n, 9e-5 + n * cluster.message_overhead_s] for n in MANY],
        "message_cores": cluster.comm_cores,
    }


FREE = replace(DEVICE, slice_overhead_s=0.0, grad_slice_overhead_s=0.0)
"""A device to which many pieces are as dear as one."""


@pytest.mark.parametrize("true", [TRUE, DEVICE, FREE], ids=["host", "device", "free pieces"])
def test_a_machine_is_found_again(true: Cluster) -> None:
    known = ("tile_tokens", "narrow_tokens", "num_units", "cores", "capacity_bytes")
    base = Cluster("true", **{name: getattr(true, name) for name in known})
    found, residuals = fit.fit_kernels(made_up(true), HEADS, base)
    found, more = fit.fit_links(made_up(true), 2, found)
    for name in Cluster.__slots__:
        if name.startswith("inter_"):
            continue  # what is between nodes isn't measured
        want, got = getattr(true, name), getattr(found, name)
        if name == "rows_efficiency":
            np.testing.assert_allclose(got, want, rtol=0.05)
        elif isinstance(want, float):
            assert got == pytest.approx(want, rel=0.05, abs=1e-12), name
        else:
            assert got == want, name
    assert max(np.abs(residual.errors).max() for residual in residuals + more) < 0.05
    assert all("%" in str(residual) for residual in residuals)


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
    assert {"attend rectangle", "attend grad ragged", "messages: hops"} <= told["residuals"].keys()
    lengths = ["--lengths", "300,100", "--topology", "2x1"]
    assert main(["plan", *lengths, "--cluster", path, "--json"]) == 0


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
