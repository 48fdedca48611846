"""Determinism: torch's flash attention for CUDA has no argument for it, only a switch for the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

fills: Any = deterministic


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Have torch's operations choose deterministic algorithms inside, if wanted; then as it was before."""
    if not wanted:
        yield
        return
    before = torch.get_deterministic_debug_mode(), fills.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    fills.fill_uninitialized_memory = False  # by default fresh tensors are filled, which only costs time here
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        fills.fill_uninitialized_memory = before[1]
