"""What an attention kernel is asked for, and the interface that every kernel has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hsap.ir.heads import HeadRun
from hsap.ir.slice import canonical
from hsap.runtime.upload import Upload


@dataclass(frozen=True, slots=True)
class Work:
    """What one Attend or AttendGrad computes, in rows of its own buffers.

    slices: int64 [n, 6], canonical, disjoint as sets of pairs; q0, q1 are rows of the query buffer, k0, k1 rows of the
    KV buffer, and lo <= k_row - q_row <= hi. Several slices may share query rows or KV rows.
    heads: runs with disjoint query heads; runs may share KV heads.
    """

    slices: np.ndarray
    heads: tuple[HeadRun, ...]

    def __post_init__(self) -> None:
        # Kernels rely on it: a row that sees nothing has no log-sum-exp, and an empty slice kills torch's CPU kernel.
        if (
            self.slices.ndim != 2
            or self.slices.shape[1] != 6
            or not np.array_equal(canonical(self.slices), self.slices)
        ):
            raise ValueError(
                f"the slices of a kernel's work must be a canonical int64 table [n, 6], but they are a table of shape "
                f"{list(self.slices.shape)} that hsap.ir.slice.canonical would change; pass it through canonical first"
            )
        for run in self.heads:
            if run.kv_count < 1 or run.q_count < 1 or run.q_count % run.kv_count:
                raise ValueError(
                    f"a head run of {run.q_count} query heads on {run.kv_count} KV heads isn't evenly grouped; "
                    "give one run for each ratio of query to KV heads"
                )


class Kernel(Protocol):
    """Attention over slices that folds into accumulators; see `select_kernel` for the ones there are.

    q, o, do, dq: [T_q, H_q, D]; kv, dkv: [T_k, 2, H_kv, D], keys then values; lse, delta: [T_q, H_q], natural log.
    o, dq, dkv and lse have the dtypes of `hsap.ir.precision`'s accumulators, or wider; delta is `row_delta`'s.
    Rows and heads may have any strides; the head dimension is contiguous.

    What is prepared may have an attribute `stores`, for (o, lse, dq) and for dkv: true where one call makes each of
    their rows at most once. Then `attend` takes a last argument `fresh`, and `attend_grad` one for dq and one for dkv:
    what is fresh holds nothing yet, the call writes all of it, and it may have the inputs' own dtypes, as nothing is
    added to it.
    """

    name: str

    def prepare(self, work: Work, device: torch.device | str, upload: Upload | None = None) -> Any:
        """Decompose the work and put what the device needs there, once a plan; ValueError if it can't be done.

        upload: takes what goes to the device, and the caller flushes it before the first call; None: it's there at
        once.
        """
        ...

    def attend(
        self, prepared: Any, q_THD: Tensor, kv_T2HD: Tensor, o_THD: Tensor, lse_TH: Tensor, scale: float
    ) -> None:
        """Attend query rows to KV rows over slices and fold the result into the accumulators.

        Roughly: o, lse = merge(o, lse, attention(q, kv, slices)). Reads q, kv, o, lse; writes o, lse.
        """
        ...

    def attend_grad(
        self,
        prepared: Any,
        q_THD: Tensor,
        kv_T2HD: Tensor,
        do_THD: Tensor,
        lse_TH: Tensor,
        delta_TH: Tensor,
        dq_THD: Tensor,
        dkv_T2HD: Tensor,
        scale: float,
    ) -> None:
        """Add the gradients that flow through the slices to dq and dkv.

        lse and delta = rowsum(do * o) are those of the whole attention, so that partial gradients add up exactly.
        Reads q, kv, do, lse, delta; adds to dq, dkv.
        """
        ...
