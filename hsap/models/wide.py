"""Wide: sums, statistics and losses in more bits than what they are made of, and rows a chunk at a time."""

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics, logits and losses: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_product(total: Tensor, left_NA: Tensor, right_NB: Tensor) -> None:
    """Add leftᵀ · right to a total in the same or a wider dtype."""
    if total.dtype == left_NA.dtype:
        total.addmm_(left_NA.t(), right_NB)
    else:
        total += left_NA.t() @ right_NB


def chunks(num_rows: int, chunk: int) -> list[slice]:
    """Rows (or words) in their order, so many at a time."""
    return [slice(start, min(start + chunk, num_rows)) for start in range(0, num_rows, chunk)]
