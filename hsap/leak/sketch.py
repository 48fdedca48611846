"""Sketch: a tensor's rows in a few numbers each, so that a whole model's can be kept and compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_PARTS = 4
"""Random projections of a row. The mean of their squares is the row's squared norm, give or take a factor of 2."""
CHUNK_ROWS = 4096
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Rows of a tensor, on the CPU. digest: int64 [T], of their bits; parts: float32 [T, NUM_PARTS]; dtype: theirs."""

    digest: Tensor
    parts: Tensor
    dtype: torch.dtype

    def first(self, num_rows: int) -> Sketch:
        """The first rows alone."""
        return Sketch(self.digest[:num_rows], self.parts[:num_rows], self.dtype)


class Sketcher:
    """Makes sketches, by the same random numbers for every tensor of a width."""

    def __init__(self) -> None:
        self._weights: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def of(self, x: Tensor) -> Sketch:
        """Sketch the rows of a floating-point tensor [T, …]."""
        rows = x.detach().reshape(x.shape[0], -1 if x.numel() else 0)
        odd, signs = self._of_width(rows.shape[1], rows.device)
        digests, parts = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, NUM_PARTS)]
        for chunk in rows.split(CHUNK_ROWS) if len(rows) else ():
            # Plus zero: it may be a negative one, which is no other number.
            if chunk.element_size() == 1:  # of float8, which can't be added to
                chunk = chunk.float()
            bits = (chunk + 0.0).contiguous().view(_BITS[chunk.element_size()]).long()
            digests.append((bits * odd).sum(dim=1).cpu())
            parts.append((chunk.double() @ signs).float().cpu())
        return Sketch(torch.cat(digests), torch.cat(parts), x.dtype)

    def _of_width(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if (width, device) not in self._weights:
            generator = torch.Generator().manual_seed(width)
            odd = torch.randint(1 << 62, (width,), generator=generator) * 2 + 1  # wraps round, as is wanted
            signs = torch.randint(2, (width, NUM_PARTS), generator=generator).double() * 2 - 1
            self._weights[width, device] = odd.to(device), signs.to(device)
        return self._weights[width, device]
