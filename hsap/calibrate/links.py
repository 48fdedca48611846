"""Links: microbenchmarks of messages between ranks, inside a node and between nodes.

Messages go through the executor's own transport. Two ranks of the first node stand for links inside nodes, the first
ranks of the first two nodes for the network between them; all ranks of the first node, each with its counterpart on the
second, show how many network cards they share. What else the machine does can't be told from a message's own time as it
can be from a kernel's, so the fastest turn counts.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hsap.calibrate.readings import Link, Network
from hsap.runtime.transport import Distributed

INTRA, INTER = "intra", "inter"
MESSAGES = (4 << 10, 64 << 10, 512 << 10, 2 << 20, 8 << 20)
"""Bytes of the messages that are sent back and forth."""
MANY = (1, 2, 4, 8)
"""Messages that one launch starts."""


def pairs(num_ranks: int, ranks_per_node: int) -> dict[str, tuple[int, int]]:
    """Ranks that each kind of link is measured between; a kind that isn't there is left out."""
    out = {}
    if min(num_ranks, ranks_per_node) > 1:
        out[INTRA] = (0, 1)
    if num_ranks > ranks_per_node:
        out[INTER] = (0, ranks_per_node)
    return out


def measure_links(rank: int, device: str, turns: int, ranks_per_node: int) -> Network:
    """Measure messages on one rank of several, all ranks together; of `pairs`, on their own ranks."""
    links = Links(rank, device)
    between: dict[str, Link | None] = {INTRA: None, INTER: None}
    for kind, pair in pairs(links.num_ranks, ranks_per_node).items():
        found = _between(links, pair, turns)  # the other ranks wait meanwhile
        between[kind] = found if rank in pair else None
    everybody = tuple(
        (num_bytes, min(links.everybody(num_bytes, _times(num_bytes)) for _ in range(turns))) for num_bytes in MESSAGES
    )
    counterparts = None
    if links.num_ranks > ranks_per_node > 1:
        alone_s, together_s = (
            min(links.counterparts(count, ranks_per_node) for _ in range(turns)) for count in (1, ranks_per_node)
        )
        counterparts = alone_s, together_s
    return Network(**between, everybody=everybody, counterparts=counterparts)


def _times(num_bytes: int) -> int:
    return max(3, min(20, (8 << 20) // num_bytes))


def _between(links: Links, pair: tuple[int, int], turns: int) -> Link:
    hops: list[tuple[int, float]] = []
    exchanges: list[tuple[int, float]] = []
    for num_bytes in MESSAGES:
        for found, how in ((hops, links.hop), (exchanges, links.exchange)):
            found.append((num_bytes, min(how(pair, num_bytes, _times(num_bytes)) for _ in range(turns))))
    # The other's answer is out of its hands long before it has arrived: only who asks knows how long both ways took.
    if links.rank != pair[0]:
        hops = []
    launches = tuple((count, min(links.launch(pair, count) for _ in range(4 * turns))) for count in MANY)
    return Link(tuple(hops), tuple(exchanges), launches, links.cores_of_a_message(pair))


class Links:
    """Rounds of messages among all ranks. Ranks that a round doesn't need wait for the others in `dist.barrier`."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank, self.device, self.num_ranks = rank, device, dist.get_world_size()
        self.transport = Distributed(device=device)

    def _peers(self, pair: tuple[int, int]) -> list[int]:
        """Whom this rank talks to: the other of a pair, or nobody."""
        return [sum(pair) - self.rank] if self.rank in pair else []

    def _messages(self, num_bytes: int, peers: list[int]) -> list[tuple[int, torch.Tensor]]:
        return [(peer, torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)) for peer in peers]

    def go(self, sends: list[Any], receives: list[Any]) -> None:
        """Send and receive (peer, bytes), and wait."""
        # Every round is number 0: two ranks' messages match in order, whatever they have done with others before.
        self.transport.launch(0, sends, receives)
        self.transport.wait(0)
        if self.device != "cpu":
            torch.cuda.synchronize()

    def hop(self, pair: tuple[int, int], num_bytes: int, times: int) -> float:
        """Seconds of one way, of a message that goes back and forth between two ranks."""
        there = self._messages(num_bytes, self._peers(pair))
        dist.barrier()
        both = [(there, []), ([], there)]
        seconds = [np.inf]
        for _ in range(times if there else 0):
            start = time.perf_counter()
            for sends, receives in both if self.rank == pair[0] else both[::-1]:
                self.go(sends, receives)
            seconds.append((time.perf_counter() - start) / 2)
        dist.barrier()
        return min(seconds)

    def exchange(self, pair: tuple[int, int], num_bytes: int, times: int) -> float:
        """Seconds in which two ranks send each other a message."""
        return self.everyone(num_bytes, times, self._peers(pair))

    def everybody(self, num_bytes: int, times: int) -> float:
        """Seconds in which each rank sends each other one a message."""
        return self.everyone(num_bytes, times, [r for r in range(self.num_ranks) if r != self.rank])

    def everyone(self, num_bytes: int, times: int, peers: list[int]) -> float:
        """Seconds in which this rank and each of its peers send each other a message; all ranks call it together."""
        out, back = self._messages(num_bytes, peers), self._messages(num_bytes, peers)
        dist.barrier()
        seconds = [np.inf]
        for _ in range(times if peers else 0):
            start = time.perf_counter()
            self.go(out, back)
            seconds.append(time.perf_counter() - start)
        dist.barrier()
        return min(seconds)

    def counterparts(self, count: int, ranks_per_node: int) -> float:
        """Seconds in which `count` ranks of the first node and those of the second send each other a large message.

        From the first one's start to the last one's end: one pair alone is quick while the others aren't there yet.
        """
        node, place = divmod(self.rank, ranks_per_node)
        peers = [(1 - node) * ranks_per_node + place] if node < 2 and place < count else []
        out, back = self._messages(MESSAGES[-1], peers), self._messages(MESSAGES[-1], peers)
        times = _times(MESSAGES[-1])
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times if peers else 0):
            self.go(out, back)
        dist.barrier()
        return (time.perf_counter() - start) / times

    def launch(self, pair: tuple[int, int], count: int) -> float:
        """Seconds of the thread that launches `count` messages from one rank to another and later waits for them."""
        there = self._messages(8, self._peers(pair) * count)
        dist.barrier()
        start = time.thread_time()
        self.go(*((there, []) if self.rank == pair[0] else ([], there)))
        return time.thread_time() - start

    def cores_of_a_message(self, pair: tuple[int, int]) -> float:
        """Cores that this rank keeps busy while large messages go back and forth between it and another."""
        if self.device != "cpu":
            return 0.0
        start, wall = _cpu_seconds(), time.perf_counter()
        self.hop(pair, MESSAGES[-1], 6)
        return (_cpu_seconds() - start) / (time.perf_counter() - wall)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
