"""Share: what ranks share of a cluster, and so how fast each thing goes at a moment.

- A network card serves its ranks. Messages that leave by one card, or arrive by one, divide its rate evenly; a message
  goes at the slower of its two ends.
- A link on which bytes flow both ways at once gives each way duplex / 2 of its rate: of a rank inside its node, of a
  card between nodes.
- A device computes at 1 - comm_share of its speed while a round is in progress on its rank: the communication's kernels
  keep their multiprocessors until the round is over, waiting included.
- A host's ranks share its cores: a rank that computes wants one, either end of a message whose bytes flow wants
  comm_cores. Where more are wanted than there are, everything on the host goes at cores / wanted of its speed, messages
  at the slower end's.

Speeds are constant between events, and an activity ends when what is left of it is done (processor sharing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hsap.ir.cluster import Cluster

Seconds = TypeVar("Seconds", float, np.ndarray)


def of_each_way(duplex: float) -> float:
    """Speed, of 1, of either direction of a link while bytes flow both ways."""
    return duplex / 2.0


def of_cores(cores: float, wanted: float) -> float:
    """Speed, of 1, of everything on a host of so many cores, of which `wanted` are wanted."""
    return cores / wanted if wanted > cores else 1.0


def both_ways_s(cluster: Cluster, seconds: Seconds, against: Seconds) -> Seconds:
    """Seconds of bytes that take `seconds` alone, while others flow the other way for `against` seconds."""
    return seconds + (1.0 / of_each_way(cluster.duplex) - 1.0) * np.minimum(seconds, against)


def crowding(cluster: Cluster, ranks: float) -> tuple[float, float]:
    """How many times longer things take where so many ranks of a host do the same: (to compute, to communicate).

    A rank that communicates both sends and receives, which are two ends of messages; one that does either counts half.
    """
    if cluster.cores is None:
        return 1.0, 1.0
    return 1.0 / of_cores(cluster.cores, ranks), 1.0 / of_cores(cluster.cores, 2 * ranks * cluster.comm_cores)


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """What each rank shares with whom. node, card: int64 [num_ranks], rising; the rest as in `Cluster`, cores finite or
    infinite."""

    node: np.ndarray
    card: np.ndarray
    duplex: float
    comm_share: float
    cores: float
    comm_cores: float

    @classmethod
    def of(cls, cluster: Cluster, num_ranks: int) -> Shares:
        """What ranks of a cluster share."""
        node, cores = cluster.node_of(num_ranks), math.inf if cluster.cores is None else cluster.cores
        # Computing, and with all four ports busy: cores for that many are never short, and the clock needn't look.
        most = int(np.bincount(node).max(initial=0)) * (1 + 4 * cluster.comm_cores)
        if cores >= most:
            cores = math.inf
        return cls(node, cluster.nic_of(num_ranks), cluster.duplex, cluster.comm_share, cores, cluster.comm_cores)

    @classmethod
    def nothing(cls, num_ranks: int) -> Shares:
        """Ranks with everything of their own."""
        own = np.arange(num_ranks)
        return cls(np.zeros(num_ranks, np.int64), own, 2.0, 0.0, math.inf, 0.0)

    def touched(self) -> tuple[np.ndarray, np.ndarray]:
        """Ranks [first, stop) that may go at another speed when a rank does something else: int64 [num_ranks] each."""
        by = self.node if math.isfinite(self.cores) else self.card
        return np.searchsorted(by, by, side="left"), np.searchsorted(by, by, side="right")
