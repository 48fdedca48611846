"""Collectives: seconds of ZeRO's traffic over all ranks of a job, on links of two speeds.

A ring or tree of NCCL's kind over nodes of g ranks: every byte that a node lacks comes through its cards once, all of
them together, and every byte that a rank lacks comes over its own link in the node; the two run at the same time, so
the slower counts. Everybody sends and receives at once. Latency: a hop a node, and one a rank inside. An all-reduce is
a reduce-scatter and an all-gather.
"""

from __future__ import annotations

from hsap.ir.problem import Cluster
from hsap.sim.share import both_ways_s


def gather_s(num_bytes: float, cluster: Cluster, world: int) -> float:
    """Seconds until every rank has num_bytes of which each held 1 / world: also those of a reduce-scatter."""
    if world < 2:
        return 0.0
    per_node = min(cluster.ranks_per_node, world)
    nodes = -(-world // per_node)
    inside = num_bytes * (1 - 1 / world) / cluster.intra_bytes_per_s if per_node > 1 else 0.0
    cards = min(cluster.num_nics or per_node, per_node)
    between = num_bytes * (1 - 1 / nodes) / (cards * cluster.inter_bytes_per_s)
    through = both_ways_s(cluster, max(inside, between), max(inside, between))
    return float(through) + (nodes - 1) * cluster.inter_latency_s + (per_node - 1) * cluster.intra_latency_s


def reduce_s(num_bytes: float, cluster: Cluster, world: int) -> float:
    """Seconds of an all-reduce of num_bytes."""
    return 2 * gather_s(num_bytes, cluster, world)
