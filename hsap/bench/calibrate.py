"""Calibrate: measure this machine, and give it as a cluster that the simulator, planners and tuner can use."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass

import numpy as np
import torch

from hsap import clusters
from hsap.bench.fit import Residual, fit_kernels, fit_links
from hsap.bench.measure import measure, num_cores
from hsap.bench.processes import run_ranks
from hsap.ir.check import Refused, one_of, whole
from hsap.ir.cluster import BOUNDLESS, Cluster
from hsap.ir.heads import HeadShape

HEADS = {"cpu": HeadShape(8, 2, 64, "fp32"), "cuda": HeadShape(32, 8, 128, "bf16")}
"""Heads that kernels are measured with, by device."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured machine. residuals: what the fit left of each microbenchmark. head: what, when and with what."""

    cluster: Cluster
    residuals: tuple[Residual, ...]
    head: str

    def save(self, path: str) -> None:
        """Write the file that `--cluster` reads."""
        comments = {
            "ranks_per_node": "Links inside one machine were measured; between nodes they are taken to be the same.",
            "rows_efficiency": "[query rows, part of the rate]",
            "cores": "Cores that ranks of this machine share, and what either end of a flowing message takes of them.",
        }
        clusters.write(self.cluster, path, comments, self.head)

    def table(self) -> str:
        """What the fit left: relative errors of predicted against measured times."""
        lines = [f"{'microbenchmark':<24} {'n':>3} {'median':>8} {'largest':>8}", *map(str, self.residuals)]
        return "\n".join(lines)


def calibrate(
    num_ranks: int = 2, device: str | None = None, heads: HeadShape | None = None, turns: int = 8, name: str = "here"
) -> Calibration:
    """Measure kernels, memory and links of this machine with `num_ranks` processes of one thread each.

    device: cpu or cuda (None: cuda where there is one). turns: how often each microbenchmark is run. ValueError: more
    ranks than GPUs. Takes half a minute on a CPU.
    """
    device = one_of("calibrate: unknown device", device or ("cuda" if torch.cuda.is_available() else "cpu"), HEADS)
    whole("calibrate: ranks", num_ranks, 1, 64)
    whole("calibrate: turns", turns, 1, 1000)
    if device == "cuda" and num_ranks > torch.cuda.device_count():
        raise Refused(
            f"calibrate: {num_ranks} ranks need as many GPUs, here are {torch.cuda.device_count()}; give --ranks"
        )
    heads = heads or HEADS[device]
    by_rank = run_ranks(num_ranks, measure, device, heads, turns, backend="nccl" if device == "cuda" else "gloo")
    measured = _together(by_rank)
    cluster, residuals = fit_kernels(measured, heads, _base(device, name))
    if num_ranks > 1:
        cluster, more = fit_links(measured, num_ranks, cluster)
        residuals += more
    return Calibration(cluster, tuple(residuals), _head(num_ranks, device, heads, turns))


def _base(device: str, name: str) -> Cluster:
    """What isn't measured but known."""
    if device == "cuda":
        known = torch.cuda.get_device_properties(0)
        return Cluster(
            name,
            ranks_per_node=torch.cuda.device_count(),
            capacity_bytes=float(known.total_memory),
            num_units=known.multi_processor_count,
        )
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # torch's kernel for CPUs computes no whole tiles of rectangles, and knows squares; see hsap.runtime.kernels.
    from hsap.runtime.kernels.cpu_flash import NARROW

    cores = float(num_cores())
    return Cluster(name, BOUNDLESS, tile_tokens=1, narrow_tokens=NARROW, cores=cores, capacity_bytes=memory / cores)


def _together(by_rank: list[dict]) -> dict:
    """Means over ranks of what all measured; of messages, what the ranks that sent them did."""
    out = {"matmul": float(np.mean([own["matmul"] for own in by_rank]))}
    for key in ("kernels", "memory"):
        seconds = np.mean([[sample[-1] for sample in own[key]] for own in by_rank], axis=0)
        out[key] = [[*sample[:-1], mean] for sample, mean in zip(by_rank[0][key], seconds.tolist())]
    if len(by_rank) > 1:
        pair = by_rank[:2]
        for key in ("hops", "exchanges", "everybody", "launches"):
            out[key] = np.mean([own[key] for own in pair], axis=0).tolist()
        out["message_cores"] = float(np.mean([own["message_cores"] for own in pair]))
    return out


def _head(num_ranks: int, device: str, heads: HeadShape, turns: int) -> str:
    what = torch.cuda.get_device_name(0) if device == "cuda" else f"{platform.machine()}, {num_cores()} cores"
    shape = f"{heads.num_q_heads}:{heads.num_kv_heads}:{heads.head_dim} {heads.dtype}"
    return (
        f"Measured by `hsap bench calibrate` on {time.strftime('%Y-%m-%d')}: {what}, torch {torch.__version__},\n"
        f"{num_ranks} ranks, heads {shape}, {turns} turns."
    )
