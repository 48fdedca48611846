"""Weights on the move: how the ranks that hold a model's shards exchange them, and what that sends.

Two ways, as TSP has it: broadcasts from each owner in turn, whose gradients are reduced to the owner; and a ring, in
which every message goes to the next rank while another comes from the one before. All calls are collective over the
group and made in the same order on all of its ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.runtime.transport import Distributed, Message

Wait = Callable[[], object]
"""Finishes what was started; the tensors that travel stay untouched until then."""

_ROUNDS_IN_FLIGHT = 1 << 10


class WeightTransport:
    """One rank's way to the others that hold shards of the same weights.

    group: those ranks in the order of their shards. sent_bytes: what this rank has sent, by kind: `broadcast`,
    `reduce`, `weights` and `gradients` of rings, `replicas` and `sum`. Collectives count as what they move without
    regard to the library's way of doing it: a broadcast of b bytes as b for every receiver, a reduction as b from every
    rank but the owner, a sum as the 2 (D - 1) / D · b of a ring's all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | str = "cpu") -> None:
        self.group = group
        self.index, self.degree = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes: Counter[str] = Counter()
        self._points = Distributed(group, device)
        self._round = 0

    def broadcast(self, tensor: Tensor, owner: int) -> Wait:
        """Start sending the owner's tensor to all; the others' tensors receive it."""
        if owner == self.index:
            self.sent_bytes["broadcast"] += (self.degree - 1) * _bytes(tensor)
        return dist.broadcast(tensor, self._points.ranks[owner], self.group, async_op=True).wait

    def reduce(self, tensor: Tensor, owner: int) -> Wait:
        """Start adding all ranks' tensors up in the owner's; the others' are worthless afterwards."""
        if owner != self.index:
            self.sent_bytes["reduce"] += _bytes(tensor)
        return dist.reduce(tensor, self._points.ranks[owner], group=self.group, async_op=True).wait

    def shift(self, out: Tensor, into: Tensor, kind: str) -> Wait:
        """Start sending a tensor to the next rank and receiving one from the rank before."""
        after, before = (self.index + 1) % self.degree, (self.index - 1) % self.degree
        return self._launch(kind, [(after, out)], [(before, into)])

    def exchange(self, out: Tensor, into: Sequence[tuple[int, Tensor]], kind: str) -> Wait:
        """Start sending a tensor to each of some ranks and receiving one of each: (rank, tensor to receive into)."""
        return self._launch(kind, [(peer, out) for peer, _ in into], list(into))

    def sum(self, tensor: Tensor) -> None:
        """Add all ranks' tensors up, on all of them."""
        self.sent_bytes["sum"] += 2 * (self.degree - 1) * _bytes(tensor) // self.degree
        dist.all_reduce(tensor, group=self.group)

    def _launch(self, kind: str, sends: list[Message], receives: list[Message]) -> Wait:
        self.sent_bytes[kind] += sum(_bytes(tensor) for _, tensor in sends)
        number, self._round = self._round, (self._round + 1) % _ROUNDS_IN_FLIGHT
        self._points.launch(number, sends, receives)
        return lambda: self._points.wait(number)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
