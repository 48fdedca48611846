"""Machine: measure this machine or cluster, and give it as one that the simulator, planners and tuner can use."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hsap import clusters
from hsap.calibrate.fit import Residual, fit_kernels, fit_links
from hsap.calibrate.measure import measure, num_cores
from hsap.calibrate.processes import Inside, joined, run_ranks, told_to_first
from hsap.calibrate.readings import Network, Readings, together
from hsap.ir.check import Refused, one_of, whole
from hsap.ir.cluster import BOUNDLESS, Cluster
from hsap.ir.heads import HeadShape
from hsap.launched import Place

HEADS = {"cpu": HeadShape(8, 2, 64, "fp32"), "cuda": HeadShape(32, 8, 128, "bf16")}
"""Heads that kernels are measured with, by device."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured machine or cluster.

    residuals: what the fit left of each microbenchmark. links: what was measured of them, and what not. head: what,
    when and with what.
    """

    cluster: Cluster
    residuals: tuple[Residual, ...]
    links: str
    head: str

    def save(self, path: str) -> None:
        """Write the file that `--cluster` reads."""
        comments = {
            "ranks_per_node": self.links,
            "rows_efficiency": "[query rows, part of the rate]",
            "cores": "Cores that ranks of this machine share, and what either end of a flowing message takes of them.",
        }
        clusters.write(self.cluster, path, comments, self.head)

    def table(self) -> str:
        """What the fit left: relative errors of predicted against measured times."""
        lines = [f"{'microbenchmark':<24} {'n':>3} {'median':>8} {'largest':>8}", *map(str, self.residuals)]
        return "\n".join(lines)


def calibrate(
    num_ranks: int = 2,
    device: str | None = None,
    heads: HeadShape | None = None,
    turns: int = 8,
    name: str = "here",
    *,
    ranks_per_node: int | None = None,
    inside: Sequence[Inside] | None = None,
    cores: float | None = None,
) -> Calibration:
    """Measure kernels, memory and links of this machine with `num_ranks` processes of one thread each.

    device: cpu or cuda (None: cuda where there is one). turns: how often each microbenchmark is run. ranks_per_node,
    inside, cores: of nodes that are emulated on this machine: how many ranks each has, where each rank lives, and a
    node's part of the cores (None: one node, and all). ValueError: more ranks than GPUs; nodes that aren't alike. Takes
    half a minute on a CPU.
    """
    device, heads = _checked(device, heads, turns)
    whole("calibrate: ranks", num_ranks, 1, 64)
    per_node = num_ranks if ranks_per_node is None else whole("calibrate: ranks_per_node", ranks_per_node, 1, num_ranks)
    if num_ranks % per_node:
        raise Refused(f"calibrate: {num_ranks} ranks are no whole nodes of {per_node}; give a multiple")
    if device == "cuda" and num_ranks > torch.cuda.device_count():
        raise Refused(
            f"calibrate: {num_ranks} ranks need as many GPUs, here are {torch.cuda.device_count()}; give --ranks"
        )
    by_rank = run_ranks(num_ranks, measure, device, heads, turns, per_node, backend=_backend(device), inside=inside)
    return _fitted(by_rank, per_node, _base(device, name, cores), device, heads, turns)


def calibrate_launched(
    place: Place, device: str | None = None, heads: HeadShape | None = None, turns: int = 8, name: str = "here"
) -> Calibration | None:
    """Measure the cluster whose ranks a launcher started, this process one of them; on rank 0 what was found.

    Collective over all its ranks; None on the others. The rest as in `calibrate`.
    """
    device, heads = _checked(device, heads, turns)
    with joined(place, _backend(device)):
        own = measure(place.rank, device, heads, turns, place.local_world_size)
        by_rank = told_to_first(own, "calibrated")
    if by_rank is None:
        return None
    return _fitted(by_rank, place.local_world_size, _base(device, name), device, heads, turns)


def _checked(device: str | None, heads: HeadShape | None, turns: int) -> tuple[str, HeadShape]:
    """Where and with what is measured."""
    device = one_of("calibrate: unknown device", device or ("cuda" if torch.cuda.is_available() else "cpu"), HEADS)
    whole("calibrate: turns", turns, 1, 1000)
    return device, heads or HEADS[device]


def _backend(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def _fitted(
    by_rank: list[dict[str, Any]], ranks_per_node: int, base: Cluster, device: str, heads: HeadShape, turns: int
) -> Calibration:
    """Make a cluster of what all ranks measured, as JSON values. base: what is known beforehand."""
    found, num_ranks = together([Readings.from_json(own) for own in by_rank]), len(by_rank)
    num_nodes = num_ranks // ranks_per_node
    if num_nodes > 1:
        base = replace(base, ranks_per_node=ranks_per_node)
    cluster, residuals = fit_kernels(found, heads, base)
    if found.network is not None:
        cluster, more = fit_links(found.network, num_ranks, ranks_per_node, cluster)
        residuals += more
    head = _head(f"{num_ranks} ranks on {num_nodes} nodes" if num_nodes > 1 else f"{num_ranks} ranks", device, heads)
    return Calibration(cluster, tuple(residuals), _links_told(found.network), f"{head}, {turns} turns.")


def _links_told(network: Network | None) -> str:
    """Say which links were measured; what is between nodes and inside them is else taken to be the same."""
    if network is None:
        return "One rank has no links to measure: these are assumed."
    if network.inter is None:
        return "Links inside one machine were measured; between nodes they are taken to be the same."
    if network.intra is None:
        return "Links between nodes of one rank each were measured; inside nodes they are taken to be the same."
    return "Links inside nodes and between them were measured; duplex and comm_cores are those between them."


def _base(device: str, name: str, cores: float | None = None) -> Cluster:
    """What isn't measured but known. cores: of a node (None: those of this machine)."""
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

    rank_bytes, cores = memory / num_cores(), float(num_cores()) if cores is None else cores
    return Cluster(name, BOUNDLESS, tile_tokens=1, narrow_tokens=NARROW, cores=cores, capacity_bytes=rank_bytes)


def _head(ranks: str, device: str, heads: HeadShape) -> str:
    what = torch.cuda.get_device_name(0) if device == "cuda" else f"{platform.machine()}, {num_cores()} cores"
    shape = f"{heads.num_q_heads}:{heads.num_kv_heads}:{heads.head_dim} {heads.dtype}"
    return (
        f"Measured by `hsap bench calibrate` on {time.strftime('%Y-%m-%d')}: {what}, torch {torch.__version__},\n"
        f"{ranks}, heads {shape}"
    )
