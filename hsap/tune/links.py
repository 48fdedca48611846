"""Links: how long what ranks send each other at the same time keeps them, where cards and directions are shared.

What begins together on one port shares its rate evenly, so that the longer one ends when all is through and a shorter
one when as much of each has gone. A message has two ports, a network card's or, inside the node, the rank's own; the
busier one counts. Where a link doesn't do both directions at once, what goes the other way costs time of its own.
"""

from __future__ import annotations

import numpy as np

from hsap.ir.problem import Cluster, Problem
from hsap.ir.sort import distinct


def both_ways_s(cluster: Cluster, seconds: np.ndarray, against: np.ndarray) -> np.ndarray:
    """Seconds of bytes that take `seconds` alone, while others flow the other way for `against` seconds."""
    return seconds + (2.0 / cluster.duplex - 1.0) * np.minimum(seconds, against)


def crowding(cluster: Cluster, problem: Problem) -> tuple[float, float]:
    """How many times longer everything takes where the ranks of a host want more cores than it has.

    Returns (while ranks compute, while they also communicate).
    """
    if cluster.cores is None:
        return 1.0, 1.0
    ranks = int(np.bincount(problem.node_of).max())
    return max(ranks / cluster.cores, 1.0), max(ranks * (1 + 2 * cluster.comm_cores) / cluster.cores, 1.0)


def round_s(
    problem: Problem, columns: list[int], round_: np.ndarray, src: np.ndarray, dst: np.ndarray, num_bytes: np.ndarray
) -> np.ndarray:
    """Seconds of what rounds carry from one InterSP rank to another, once both are there: float64 [n].

    Pairs of a round are distinct. columns: intra indices that are asked for, alike in their nodes; the slowest counts,
    while all columns of the problem send as much.
    """
    cluster, intra = problem.cluster, problem.topology.intra_sp
    nodes = problem.node_of.reshape(-1, intra)
    crosses = nodes[src] != nodes[dst]
    mine = crosses[:, columns[0]]
    latency_s = np.where(mine, cluster.inter_latency_s, cluster.intra_latency_s)
    seconds = num_bytes[:, None] / np.where(crosses, cluster.inter_bytes_per_s, cluster.intra_bytes_per_s)
    is_shared = cluster.num_nics not in (None, cluster.ranks_per_node) or cluster.duplex < 2
    if is_shared and len(src):
        seconds = _shared_s(problem, crosses, round_, src, dst, seconds)
    return seconds[:, columns].max(axis=1) * crowding(cluster, problem)[1] + latency_s


def _shared_s(problem: Problem, crosses, round_, src, dst, seconds) -> np.ndarray:
    cluster, intra = problem.cluster, problem.topology.intra_sp
    cards = cluster.nic_of(problem.num_ranks).reshape(-1, intra)
    ranks = np.arange(problem.num_ranks).reshape(-1, intra) + int(cards.max()) + 1
    num_ports = int(ranks.max()) + 1
    out, into = (
        (round_[:, None] * num_ports + np.where(crosses, cards[end], ranks[end])).ravel() for end in (src, dst)
    )
    alone = seconds.ravel()
    keys, which = distinct(np.concatenate([out, into]))
    out, into = which[: len(out)], which[len(out) :]
    through = np.maximum(_together(out, alone), _together(into, alone))
    sent, received = np.bincount(out, alone, len(keys)), np.bincount(into, alone, len(keys))
    return both_ways_s(cluster, through, np.maximum(received[out], sent[into])).reshape(seconds.shape)


def _together(port: np.ndarray, alone: np.ndarray) -> np.ndarray:
    """When each of those that begin together on a port is through: the sum, over all of them, of the shorter one."""
    order = np.lexsort((alone, port))
    port, size = port[order], alone[order]
    first = np.searchsorted(port, port)
    done = np.cumsum(size)
    longer = np.searchsorted(port, port, side="right") - 1 - np.arange(len(port))
    out = np.empty_like(size)
    out[order] = done - (done - size)[first] + size * longer
    return out
