"""Online softmax: partial outputs fold into an accumulator, in any order.

A partial result is (o, lse): the softmax-weighted mean of the values over some keys, and the natural log of the sum of
exponentials over them. Rows without keys have o = 0 and lse = -inf, and stay so.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reset(o: Tensor, lse: Tensor) -> None:
    """Empty an accumulator in place: o = 0, lse = -inf."""
    o.zero_()
    lse.fill_(-torch.inf)


def merge(o_acc: Tensor, lse_acc: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """Fold a partial output into the accumulator, in place.

    o_acc, o_part: [T, H, D]; lse_acc, lse_part: [T, H]. lse_acc should be float64 (see `hsap.ir.precision`), but may be
    float32. The part may have any floating dtypes; o_part must be finite, also in rows whose lse_part is -inf. The
    accumulator ends as if one softmax had gone over both sets of keys.
    """
    lse_part = lse_part.to(lse_acc.dtype)
    # The weight comes from the difference, not from the new lse: weights then sum to 1 however large lse is, and an
    # empty side has a weight of exactly 0. Two empty sides differ by NaN; they keep what they have.
    weight = lse_part - lse_acc
    weight.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).sigmoid_()
    o_acc.lerp_(o_part.to(o_acc.dtype), weight.to(o_acc.dtype).unsqueeze(-1))
    torch.logaddexp(lse_acc, lse_part, out=lse_acc)
