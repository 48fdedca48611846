"""Offload: what layers keep for backward waits on the host, and is back one layer ahead of its use.

A shelf decides what moves and when; a mover moves, and alone knows the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Mover(Protocol):
    """Starts copies that run beside computation. What `leave` and `come` give second is waited for by `wait`."""

    def leave(self, there: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy a tensor to the host; it stays untouched until waited for."""
        ...

    def come(self, host: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy it back."""
        ...

    def wait(self, copy: Any) -> None:
        """Let what is computed from now on come after a copy."""
        ...


class CudaMover:
    """Copies to pinned memory on a stream of its own; waits order streams and never stop the host.

    device: a GPU's. ValueError for any other, which has nothing to gain.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"model.offload_checkpoints=true moves what layers keep from the GPU to the host, but the model is on "
                f"{device.type}: there is no memory to save, leave it off."
            )
        self.stream = torch.cuda.Stream(device)
        self.device = device

    def leave(self, there: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        return self._copy(there, torch.empty(there.shape, dtype=there.dtype, pin_memory=True))

    def come(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        # Memory of the current stream: freed at the layer's end, it is used again behind all that reads it.
        return self._copy(host, torch.empty(host.shape, dtype=host.dtype, device=self.device))

    def wait(self, copy: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(copy)

    def _copy(self, source: Tensor, target: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return target, self.stream.record_event()


@dataclass(slots=True, eq=False)
class _Item:
    """One tensor's memory, as bytes: there (on the device), on the host, or both. copy: what is under way."""

    layer: int
    there: Tensor | None
    host: Tensor | None = None
    copy: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A tensor on the shelf: which memory, and how it is seen."""

    item: _Item
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Shelf:
    """The tensors that the layers of one forward keep. stays: tensors that all layers share, left where they are.

    On the device are at most two layers' tensors at any time: forward, those of a layer while the one before leaves;
    backward, those of a layer while the one below it comes. The last layer's stay, as backward begins with them.
    Tensors of one storage move once, the whole storage. Memory on the device is let go only when what is computed next
    comes after the copies to or from it, else it would be used again under them.
    """

    def __init__(self, mover: Mover, num_layers: int, stays: Sequence[Tensor] = ()) -> None:
        self.mover, self.last = mover, num_layers - 1
        self.items: list[dict[int, _Item]] = [{} for _ in range(num_layers)]
        self.stays = {tensor.untyped_storage().data_ptr() for tensor in stays}
        self.at = -1

    def __del__(self) -> None:
        # A backward that ends above the first layer never asks for what it brought of the next one.
        for items in self.items:
            self._let_go(items)

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Whatever autograd saves inside belongs to that layer. Layers come in order."""
        self.at = index
        with saved_tensors_hooks(self.put, self.get):
            yield
        self.at = -1
        if index == self.last:
            self.items[index].clear()
        if index:
            self._let_go(self.items[index - 1])

    def put(self, tensor: Tensor) -> Tensor | Handle:
        """Take a tensor that the layer keeps: it begins to leave."""
        storage = tensor.untyped_storage()
        if not storage.nbytes() or storage.data_ptr() in self.stays:
            return tensor
        items = self.items[self.at]
        if storage.data_ptr() not in items:
            there = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            item = items[storage.data_ptr()] = _Item(self.at, there)
            if self.at != self.last:
                item.host, item.copy = self.mover.leave(there)
        item = items[storage.data_ptr()]
        return Handle(item, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def get(self, kept: Tensor | Handle) -> Tensor:
        """Give back what `put` took. The first that a layer asks for brings all of it, and starts the next below."""
        if isinstance(kept, Tensor):
            return kept
        if kept.item.layer != self.at or kept.item.there is None:
            self._turn(kept.item.layer)
        assert kept.item.there is not None, "it came back with its layer"
        whole = kept.item.there.view(kept.dtype)
        return whole.as_strided(kept.shape, kept.stride, kept.offset)

    def _turn(self, layer: int) -> None:
        """Begin the backward of a layer."""
        self.at = layer
        for above in self.items[layer + 1 :]:
            self._let_go(above)
        self._fetch(layer)
        for item in self.items[layer].values():
            self._await(item)
        if layer:
            self._fetch(layer - 1)

    def _let_go(self, items: dict[int, _Item]) -> None:
        for item in items.values():
            self._await(item)
            item.there = None

    def _await(self, item: _Item) -> None:
        if item.copy is not None:
            self.mover.wait(item.copy)
            item.copy = None

    def _fetch(self, layer: int) -> None:
        for item in self.items[layer].values():
            if item.there is None and item.host is not None:
                item.there, item.copy = self.mover.come(item.host)
