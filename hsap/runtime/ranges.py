"""Ranges: the names of what runs, for a profiler of the device (NVTX, which Nsight Systems shows)."""

from __future__ import annotations

from typing import Protocol

import torch

from hsap.ir.schedule import DIRECTIONS


class Ranges(Protocol):
    """Nested ranges of the host's time; the profiler finds the device's work that was launched in them."""

    def push(self, name: str) -> None:
        """Begin a range."""
        ...

    def pop(self) -> None:
        """End the range begun last."""
        ...


class Nvtx:
    """NVTX's ranges, which cost some hundred nanoseconds each where no profiler listens; for CUDA builds of torch."""

    push = staticmethod(torch.cuda.nvtx.range_push)
    pop = staticmethod(torch.cuda.nvtx.range_pop)


def stream_name(direction: int, layer: int, mask: int) -> str:
    """Name one run of a stream: `hsap forward, layer 3, mask 0`."""
    return f"hsap {DIRECTIONS[direction]}, layer {layer}, mask {mask}"
