"""Upload: tables on their way to a device, many small ones in one copy that the host doesn't wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsap.ir.precision import aligned

CHUNK_BYTES = 1 << 18
"""Small enough that what is left of a chunk is nothing beside a plan's arena."""


class Upload:
    """Puts arrays side by side into page-locked memory and copies them together.

    A copy from ordinary memory stops the host until the device has done all work before it: one such copy for each
    table of a plan would drain the device many times a micro-step. On CPUs the way is the same, without the locking.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._host: Tensor | None = None
        self._there: Any = None
        self._used = 0

    def put(self, array: np.ndarray) -> Tensor:
        """Give the device's tensor of an array of any shape; it holds the array's values from `flush` on."""
        array = np.ascontiguousarray(array)
        start = aligned(self._used)
        if self._host is None or start + array.nbytes > len(self._host):
            self.flush()
            start, size = 0, max(array.nbytes, CHUNK_BYTES)
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self._there = torch.empty(size, dtype=torch.uint8, device=self.device)
        rows = slice(start, start + array.nbytes)
        self._host[rows].numpy()[:] = array.reshape(-1).view(np.uint8)
        self._used = rows.stop
        return self._there[rows].view(torch.from_numpy(array[:0]).dtype).view(array.shape)

    def flush(self) -> None:
        """Start copying what was put since the last time, on the current stream. Waits for nothing.

        The locked memory may be let go at once: torch hands it out again only when the copy is through.
        """
        if self._host is not None:
            self._there[: self._used].copy_(self._host[: self._used], non_blocking=True)
        self._host, self._there, self._used = None, None, 0


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Give a tensor on a device, as `tensor.to` does, but from a CPU to a GPU without stopping the host."""
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # back to the host it must wait, or nothing would be there yet
