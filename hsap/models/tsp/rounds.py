"""Going round the weight shards: by broadcast or by ring, and the gradients' way back to their owners.

A bundle is what a block needs of one shard, as one flat tensor, so that it is one message. At any time a rank holds
its own bundle and at most two that travel: the one in use and the one that comes under its computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hsap.models.wide import wide_dtype

Wait = Callable[[], object]
Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors in a bundle."""


class Transport(Protocol):
    """What blocks ask of the group; `hsap.runtime.weights` has it on torch.distributed, and says what each does.

    index: this rank's shard; degree: how many shards. A call that gives a `Wait` has begun, and tensors stay untouched
    until that is called. kind: by which name its bytes are counted.
    """

    index: int
    degree: int

    def broadcast(self, tensor: Tensor, owner: int) -> Wait: ...
    def reduce(self, tensor: Tensor, owner: int) -> Wait: ...
    def shift(self, out: Tensor, into: Tensor, kind: str) -> Wait: ...
    def exchange(self, out: Tensor, into: Sequence[tuple[int, Tensor]], kind: str) -> Wait: ...
    def sum(self, tensor: Tensor) -> None: ...


def bundle(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors into one flat tensor; a single one isn't copied."""
    flats = [tensor.detach().reshape(-1) for tensor in tensors]
    return flats[0].contiguous() if len(flats) == 1 else torch.cat(flats)


def unbundle(flat: Tensor, shapes: Shapes) -> list[Tensor]:
    """The tensors in a bundle, as views."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def broadcasts(transport: Transport, own: Tensor, shapes: Sequence[Shapes]) -> Iterator[tuple[int, list[Tensor]]]:
    """Give every shard's tensors in the order of shards, each broadcast under the use of the one before.

    own: this rank's bundle. shapes: of every shard's tensors.
    """

    def start(shard: int) -> tuple[Tensor, Wait]:
        flat = own if shard == transport.index else own.new_empty(_size(shapes[shard]))
        return flat, transport.broadcast(flat, shard)

    coming = start(0)
    for shard in range(transport.degree):
        flat, wait = coming
        wait()
        if shard + 1 < transport.degree:
            coming = start(shard + 1)
        yield shard, unbundle(flat, shapes[shard])


def ring(transport: Transport, own: Tensor, shapes: Sequence[Shapes]) -> Iterator[tuple[int, list[Tensor]]]:
    """Give every shard's tensors, this rank's first; each is on its way to the next rank while it is used here."""
    flat = own
    for step in range(transport.degree):
        shard = (transport.index - step) % transport.degree
        if step + 1 == transport.degree:
            yield shard, unbundle(flat, shapes[shard])
            return
        fresh = own.new_empty(_size(shapes[(shard - 1) % transport.degree]))
        wait = transport.shift(flat, fresh, "weights")
        yield shard, unbundle(flat, shapes[shard])
        wait()
        flat = fresh


class Homeward:
    """Gradients of shards that go round the ring: sums travel one rank behind the weights, and home at the end.

    `add` is called with every shard's gradient in the ring's order. A rank's own is kept; what it adds to another's sum
    is sent on, and the sum of shard s leaves the last rank of the ring, s - 1, for home: D - 1 messages a rank, as many
    as the weights take. Sums are float32 or wider.
    """

    def __init__(self, transport: Transport, shapes: Sequence[Shapes]) -> None:
        self.transport, self.shapes = transport, shapes
        self._own: Tensor | None = None
        self._coming: tuple[Tensor, Wait] | None = None
        self._sent: Tensor | None = None

    def add(self, shard: int, gradients: Sequence[Tensor]) -> None:
        """Add this rank's gradient of a shard."""
        flat = bundle(gradients).to(wide_dtype(gradients[0].dtype))
        if shard == self.transport.index:
            self._own = flat
            return
        flat += self._receive()
        degree = self.transport.degree
        into = flat.new_empty(_size(self.shapes[(shard - 1) % degree]))
        self._sent = flat  # stays until the message is through
        self._coming = into, self.transport.shift(flat, into, "gradients")

    def own(self) -> list[Tensor]:
        """This rank's own shard's gradients, of all ranks' rows."""
        assert self._own is not None, "a rank adds its own shard's gradient"
        self._own += self._receive()
        return unbundle(self._own, self.shapes[self.transport.index])

    def _receive(self) -> Tensor | float:
        if self._coming is None:
            return 0.0
        into, wait = self._coming
        wait()
        self._coming = self._sent = None
        return into


class Reductions:
    """Gradients of broadcast shards: each is reduced to its owner under the computation of the next."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._own: Tensor | None = None
        self._going: tuple[Tensor, Wait] | None = None

    def add(self, shard: int, gradients: Sequence[Tensor]) -> None:
        """Start reducing this rank's gradient of a shard; the one before is through."""
        flat = bundle(gradients).to(wide_dtype(gradients[0].dtype))
        self._finish()
        self._going = flat, self.transport.reduce(flat, shard)
        if shard == self.transport.index:
            self._own = flat

    def own(self) -> Tensor:
        """This rank's own shard's gradient, of all ranks' rows, as a bundle."""
        self._finish()
        assert self._own is not None, "a rank adds its own shard's gradient"
        return self._own

    def _finish(self) -> None:
        if self._going is not None:
            self._going[1]()
            self._going = None


def _size(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)
