"""Contention: how long what ranks send each other keeps them, where cards, directions and cores are shared.

A card divides its rate evenly among what flows through it. How long bytes flow then depends on when others do, and that
on how long theirs flow: a first guess is run through the stages, and corrected by when things really met, a few times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.problem import Problem
from hsap.ir.sort import distinct
from hsap.sim.share import both_ways_s

PASSES = 4
"""Corrections of the first guess; on 32 ranks of p4de 2 of them leave an error of 10 % at most, 4 of 5 and 8 of 4."""


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """What a column's ranks send each other, an entry for all that a round carries from one to another.

    alone_s: while bytes flow, with nobody else about; latency_s: until they arrive: float64 [n]. cards: int64 [2, n],
    which they leave and arrive by; -1 inside a node and where no card is shared. crowd: int64 [n], columns that send by
    the same card at the same time.
    """

    alone_s: np.ndarray
    latency_s: np.ndarray
    cards: np.ndarray
    crowd: np.ndarray

    @classmethod
    def of(
        cls,
        problem: Problem,
        columns: list[int],
        round_: np.ndarray,
        src: np.ndarray,
        dst: np.ndarray,
        num_bytes: np.ndarray,
    ) -> Links:
        """Look at what rounds carry between InterSP ranks; pairs of a round are distinct.

        columns: intra indices that are asked for, alike in their nodes; the others send as much at the same time.
        """
        cluster, intra, j = problem.cluster, problem.topology.intra_sp, columns[0]
        node, card = (each.reshape(-1, intra) for each in (problem.node_of, cluster.nic_of(problem.num_ranks)))
        crosses = node[src, j] != node[dst, j]
        rate, latency_s = cluster.link(crosses)
        alone_s = num_bytes / rate
        if cluster.duplex < 2:
            alone_s = both_ways_s(cluster, alone_s, _against(round_, src, dst, crosses, alone_s, len(node)))
        is_shared = crosses & (cluster.num_nics not in (None, cluster.ranks_per_node))
        crowd = (card == card[:, j : j + 1]).sum(axis=1)
        cards = np.where(is_shared, np.stack([card[src, j], card[dst, j]]), -1)
        return cls(alone_s, latency_s, cards, np.where(is_shared, np.maximum(crowd[src], crowd[dst]), 1))

    def guess_s(self) -> np.ndarray:
        """Seconds of each entry where different ranks don't meet: float64 [n]."""
        return self.alone_s * self.crowd + self.latency_s

    def corrected_s(self, start: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Seconds of each entry if it starts then, while all flow as long as they were said to: float64 [n]."""
        out, shared = seconds.copy(), np.flatnonzero(self.cards[0] >= 0)
        flows_s, crowd = (seconds - self.latency_s)[shared], self.crowd[shared]
        if len(shared):
            ends = [_through(card[shared], crowd, start[shared], flows_s, self.alone_s[shared]) for card in self.cards]
            out[shared] = np.maximum(*ends) + self.latency_s[shared]
        return out


def _through(
    card: np.ndarray, crowd: np.ndarray, start: np.ndarray, flows_s: np.ndarray, alone_s: np.ndarray
) -> np.ndarray:
    """How long bytes flow through cards that divide their rate evenly among what flows at a moment: float64 [n]."""
    # Cards lie one behind the other on one time axis, so far apart that nothing reaches into the next one's.
    apart = 2 * float((start + flows_s).max() + (alone_s * crowd).sum())
    start = start + card * apart
    times, steps = np.concatenate([start, start + flows_s]), np.concatenate([crowd, -crowd])
    order = np.argsort(times, kind="stable")
    times, flowing = times[order], np.maximum(np.cumsum(steps[order]), 1)
    served = np.concatenate([[0.0], np.cumsum(np.diff(times) / flowing[:-1])])
    times, served = np.append(times, times[-1] + apart), np.append(served, served[-1] + apart)
    return np.interp(np.interp(start, times, served) + alone_s, served, times) - start


def _against(
    round_: np.ndarray, src: np.ndarray, dst: np.ndarray, crosses: np.ndarray, alone_s: np.ndarray, num_ranks: int
) -> np.ndarray:
    """Seconds of what flows the other way on either end's link in the same round: float64 [n]."""
    out, into = ((round_ * num_ranks + end) * 2 + crosses for end in (src, dst))
    keys, which = distinct(np.concatenate([out, into]))
    out, into = which[: len(src)], which[len(src) :]
    sent, received = np.bincount(out, alone_s, len(keys)), np.bincount(into, alone_s, len(keys))
    return np.maximum(received[out], sent[into])
