"""Transports: how a round's messages get from rank to rank.

`Distributed` uses torch.distributed (NCCL or gloo), one process a rank. `Mailbox` moves them between ranks that live
in one process; it buffers none, so a program that passes needs no hidden buffering.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.runtime.groups import connect

Message = tuple[int, Tensor]
"""(peer rank within the SP group, contiguous tensor)."""


class Transport(Protocol):
    """One rank's way to the others. Messages between two ranks in one round match in the order given."""

    def launch(self, round: int, sends: list[Message], receives: list[Message]) -> None:
        """Start all messages of a round; their tensors stay untouched until `wait` says so."""
        ...

    def wait(self, round: int) -> bool:
        """Finish a round; False if it can't be finished yet and the caller must let other ranks run."""
        ...


class Distributed:
    """Batched point-to-point operations on one process group.

    group: the SP group (its ranks in order). NCCL runs them on its own stream; `wait` orders the current stream
    behind them without stopping the host. There, making one connects all pairs of ranks: collective over the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self.group: Any = group if group is not None else dist.group.WORLD
        self.ranks = dist.get_process_group_ranks(self.group)
        by_tag = dist.get_backend(self.group) == "gloo"
        self.start = self._one_by_one if by_tag else self._batched
        if not by_tag:
            connect(self.group, device)
        self.pending: dict[int, tuple[list[dist.Work], list[Message], list[Message]]] = {}
        self.awaited: tuple[list[Message], list[Message]] | None = None
        self.at = 0

    def launch(self, round: int, sends: list[Message], receives: list[Message]) -> None:
        works = self.start(round, sends, receives) if sends or receives else []
        self.pending[round] = works, sends, receives

    def wait(self, round: int) -> bool:
        works, sends, receives = self.pending.pop(round)
        self.awaited = sends, receives
        for self.at, work in enumerate(works):
            work.wait()
        self.awaited = None
        return True

    @property
    def waits_for(self) -> tuple[bool, int] | None:
        """What `wait` waits for, asked from another thread: whether it is received, and the job's rank of the peer.

        None outside `wait`, and where messages are waited for on the device.
        """
        awaited, at = self.awaited, self.at
        if awaited is None or self.start != self._one_by_one:
            return None
        sends, receives = awaited
        peer = [peer for peer, _ in (*receives, *sends)]
        return (at < len(receives), self.ranks[peer[at]]) if at < len(peer) else None

    def _one_by_one(self, round: int, sends: list[Message], receives: list[Message]) -> list[dist.Work]:
        """Gloo: receives first. A pair has one connection, on which a receiver says that it is ready; said behind our
        own message it would keep the peer's waiting until ours is through, and the link half idle.

        Between two nodes at 1 Gb/s 16 MiB both ways at once then take as long as one way (118 MB/s each, 60 before),
        whole or in chunks. Straight to the group, because torch's checks take as long as gloo itself.
        """
        works = []
        for start, messages in ((self.group.recv, receives), (self.group.send, sends)):
            count: dict[int, int] = defaultdict(int)
            for peer, tensor in messages:
                # Gloo matches by tag; a tag for each message keeps rounds in flight together apart.
                works.append(start([tensor], peer, (round << 6) + count[peer]))
                count[peer] += 1
        return works

    def _batched(self, _: int, sends: list[Message], receives: list[Message]) -> list[dist.Work]:
        """NCCL: one group of calls, matched by their order."""
        ops = [
            dist.P2POp(kind, tensor, self.ranks[peer], self.group)
            for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        return dist.batch_isend_irecv(ops)


class Mailbox:
    """Rendezvous between the ranks of one process: `for_rank` gives each its end."""

    def __init__(self) -> None:
        self.sends: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.open: dict[tuple[int, int], int] = defaultdict(int)

    def for_rank(self, rank: int) -> Transport:
        """The end of one rank."""
        return _End(self, rank)

    def match(self, src: int, dst: int, round: int) -> None:
        """Deliver what both sides of a pair have brought."""
        sends, receives = self.sends[src, dst, round], self.receives[src, dst, round]
        while sends and receives:
            target, source = receives.popleft(), sends.popleft()
            assert target.shape == source.shape and target.dtype == source.dtype, (
                f"round {round}: rank {src} sends {source.dtype} {tuple(source.shape)} where rank {dst} receives "
                f"{target.dtype} {tuple(target.shape)}"
            )
            target.copy_(source)
            self.open[src, round] -= 1
            self.open[dst, round] -= 1


class _End:
    def __init__(self, box: Mailbox, rank: int) -> None:
        self.box, self.rank = box, rank

    def launch(self, round: int, sends: list[Message], receives: list[Message]) -> None:
        self.box.open[self.rank, round] += len(sends) + len(receives)
        for peer, tensor in sends:
            self.box.sends[self.rank, peer, round].append(tensor)
            self.box.match(self.rank, peer, round)
        for peer, tensor in receives:
            self.box.receives[peer, self.rank, round].append(tensor)
            self.box.match(peer, self.rank, round)

    def wait(self, round: int) -> bool:
        return self.box.open[self.rank, round] == 0
