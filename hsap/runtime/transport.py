"""Transports: how a round's messages get from rank to rank.

`Distributed` uses torch.distributed (NCCL or gloo), one process a rank. `Mailbox` moves them between ranks that live
in one process; it buffers none, so a program that passes needs no hidden buffering.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

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
    behind them without stopping the host.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.ranks = dist.get_process_group_ranks(self.group)
        self.tagged = dist.get_backend(self.group) == "gloo"
        self.pending: dict[int, list[dist.Work]] = {}

    def launch(self, round: int, sends: list[Message], receives: list[Message]) -> None:
        ops = self._ops(dist.isend, round, sends) + self._ops(dist.irecv, round, receives)
        self.pending[round] = dist.batch_isend_irecv(ops) if ops else []

    def wait(self, round: int) -> bool:
        for work in self.pending.pop(round):
            work.wait()
        return True

    def _ops(self, kind, round: int, messages: list[Message]) -> list[dist.P2POp]:
        count: dict[int, int] = defaultdict(int)
        ops = []
        for peer, tensor in messages:
            # Gloo matches by tag; a tag for each message keeps rounds in flight together apart. NCCL matches by order.
            tag = (round << 6) + count[peer] if self.tagged else 0
            count[peer] += 1
            ops.append(dist.P2POp(kind, tensor, self.ranks[peer], self.group, tag))
        return ops


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
