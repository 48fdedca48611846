"""Online softmax: partial outputs fold into an accumulator, in any order.

A partial result is (o, lse): the softmax-weighted mean of the values over some keys, and the natural log of the sum of
exponentials over them. Rows without keys have o = 0 and lse = -inf, and stay so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hsap.runtime.kernels.fused import fused


def reset(o: Tensor, lse: Tensor) -> None:
    """Empty an accumulator in place: o = 0, lse = -inf."""
    o.zero_()
    lse.fill_(-torch.inf)


def merge(
    o_acc: Tensor,
    lse_acc: Tensor,
    o_part: Tensor,
    lse_part: Tensor,
    acc_rows: Tensor | None = None,
    part_rows: Tensor | None = None,
) -> None:
    """Fold a partial output into the accumulator, in place.

    o_acc, o_part: [T, H, D]; lse_acc, lse_part: [T, H]. lse_acc should be float64 (see `hsap.ir.precision`), but may be
    float32. The part may have any floating dtypes; o_part must be finite, also in rows whose lse_part is -inf. The
    accumulator ends as if one softmax had gone over both sets of keys. acc_rows, part_rows: int64 [n], the rows that
    belong together, no accumulator row twice; None: all rows in their order.
    """
    own = fused(o_acc.device.type)
    if own is not None:
        own.merge(o_acc, lse_acc, o_part, lse_part, acc_rows, part_rows)
        return
    if part_rows is not None:
        o_part, lse_part = o_part[part_rows], lse_part[part_rows]
    if acc_rows is None:
        _merge(o_acc, lse_acc, o_part, lse_part)
        return
    # Indexing copies, so what was merged goes back.
    o_rows, lse_rows = o_acc[acc_rows], lse_acc[acc_rows]
    _merge(o_rows, lse_rows, o_part, lse_part)
    o_acc[acc_rows], lse_acc[acc_rows] = o_rows, lse_rows


def add_rows(total: Tensor, part: Tensor, total_rows: Tensor | None = None, part_rows: Tensor | None = None) -> None:
    """Add rows of `part` to rows of `total`, in place and rounded to its dtype; rows as in `merge`.

    total, part: [T, H, D].
    """
    own = fused(total.device.type)
    if own is not None:
        own.add_rows(total, part, total_rows, part_rows)
        return
    part = (part if part_rows is None else part[part_rows]).to(total.dtype)
    if total_rows is None:
        total += part
    else:
        total[total_rows] += part


def _merge(o_acc: Tensor, lse_acc: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    lse_part = lse_part.to(lse_acc.dtype)
    # The weight comes from the difference, not from the new lse: weights then sum to 1 however large lse is, and an
    # empty side has a weight of exactly 0. Two empty sides differ by NaN; they keep what they have.
    weight = lse_part - lse_acc
    weight.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).sigmoid_()
    o_acc.lerp_(o_part.to(o_acc.dtype), weight.to(o_acc.dtype).unsqueeze(-1))
    torch.logaddexp(lse_acc, lse_part, out=lse_acc)
