"""What backward needs of the output, without the output."""

from __future__ import annotations

import torch
from torch import Tensor

from hsap.runtime.kernels.fused import fused

CHUNK_BYTES = 1 << 20
"""What a CPU's cache holds: over 16,384 rows of 8 × 64 float32 a whole wide product takes ten times as long (141 ms
against 14 on one thread), nearly all of it for fresh pages; chunks of 512 KiB to 2 MiB are within a fifth of each
other."""


def row_delta(do: Tensor, o: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum do * o over the head dimension in a dtype that holds both (None: o's): do, o: [T, H, D] -> [T, H] of it."""
    dtype = dtype or o.dtype
    own = fused(do.device.type)
    if own is not None:
        return own.row_delta(do, o, dtype)
    if do.device.type != "cpu":
        return (do.to(dtype) * o.to(dtype)).sum(-1)
    delta = torch.empty(do.shape[:-1], dtype=dtype)
    step = max(CHUNK_BYTES // max(do[:1].numel() * dtype.itemsize, 1), 1)
    product = torch.empty((min(step, len(do)), *do.shape[1:]), dtype=dtype)
    for first in range(0, len(do), step):
        rows = slice(first, first + step)
        part = product[: len(do[rows])]
        torch.sum(part.copy_(do[rows]).mul_(o[rows]), -1, out=delta[rows])
    return delta


def stand_in_output(do: Tensor, delta: Tensor) -> Tensor:
    """Make an output whose row sum with do is delta, for kernels whose backward wants `out` and uses only that sum.

    out = do * delta / |do|^2 per row and head, 0 where do = 0. do: [T, H, D]; delta: [T, H]; returns do's dtype.
    Never larger than the true output (Cauchy-Schwarz), so half precision holds it.
    """
    own = fused(do.device.type)
    if own is not None:
        return own.stand_in_output(do, delta)
    wide = delta.dtype
    # Scaled by the largest entry first: the squares of small gradients would underflow.
    largest = do.abs().amax(-1, keepdim=True).to(wide)
    largest.masked_fill_(largest == 0, 1)
    direction = do.to(wide) / largest
    norm = direction.square().sum(-1, keepdim=True)
    norm.masked_fill_(norm == 0, 1)
    return direction.mul_(delta.unsqueeze(-1) / largest / norm).to(do.dtype)


def cast_statistic(x_TH: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring lse or delta [T, H] to the dtype that a kernel for inputs of `dtype` keeps them in."""
    return x_TH.to(torch.float64 if dtype == torch.float64 else torch.float32)
