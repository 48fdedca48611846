"""What backward needs of the output, without the output."""

from __future__ import annotations

import torch
from torch import Tensor


def row_delta(do: Tensor, o: Tensor) -> Tensor:
    """Sum do * o over the head dimension, in the accumulator's dtype: do, o: [T, H, D] -> [T, H] of o's dtype."""
    return (do.to(o.dtype) * o).sum(-1)


def stand_in_output(do: Tensor, delta: Tensor) -> Tensor:
    """Make an output whose row sum with do is delta, for kernels whose backward wants `out` and uses only that sum.

    out = do * delta / |do|^2 per row and head, 0 where do = 0. do: [T, H, D]; delta: [T, H]; returns do's dtype.
    Never larger than the true output (Cauchy-Schwarz), so half precision holds it.
    """
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
