"""Attention as it's written in a textbook, in float64: for any slice, any dtype and any device, and slow."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hsap.ir.heads import HeadRun
from hsap.ir.slice import canonical
from hsap.runtime.kernels.merge import merge
from hsap.runtime.kernels.work import Work
from hsap.runtime.upload import Upload

MAX_SCORES = 1 << 22
"""Scores held at once, per head run; slices are cut into strips of rows to stay below it."""


class MathKernel:
    """Dense float64 attention, one strip of a slice at a time: the yardstick of the other kernels."""

    name = "math"

    def prepare(self, work: Work, device: torch.device | str, upload: Upload | None = None) -> Work:
        """Return the work: there is nothing to decompose."""
        return work

    def attend(
        self, prepared: Work, q_THD: Tensor, kv_T2HD: Tensor, o_THD: Tensor, lse_TH: Tensor, scale: float
    ) -> None:
        """Fold attention over the slices into o and lse; see `Kernel`."""
        for run, rows, cols, score in _scores(prepared, q_THD, kv_T2HD, scale):
            lse = torch.logsumexp(score, dim=-1)
            weight = torch.exp(score - lse.unsqueeze(-1))
            v = kv_T2HD[cols, 1, run.kv].double()
            o = torch.einsum("hgtk,khd->thgd", weight, v).flatten(1, 2)
            merge(o_THD[rows, run.q], lse_TH[rows, run.q], o, lse.flatten(0, 1).T)

    def attend_grad(
        self,
        prepared: Work,
        q_THD: Tensor,
        kv_T2HD: Tensor,
        do_THD: Tensor,
        lse_TH: Tensor,
        delta_TH: Tensor,
        dq_THD: Tensor,
        dkv_T2HD: Tensor,
        scale: float,
    ) -> None:
        """Add the gradients of the slices to dq and dkv; see `Kernel`."""
        for run, rows, cols, score in _scores(prepared, q_THD, kv_T2HD, scale):
            k, v = kv_T2HD[cols, :, run.kv].double().unbind(1)
            q, do = (_grouped(x[rows, run.q], run) for x in (q_THD, do_THD))
            lse, delta = (_grouped(x[rows, run.q], run).permute(1, 2, 0).unsqueeze(-1) for x in (lse_TH, delta_TH))
            weight = torch.exp(score - lse)
            d_weight = torch.einsum("thgd,khd->hgtk", do, v)
            d_score = weight * (d_weight - delta) * scale
            dq_THD[rows, run.q] += torch.einsum("hgtk,khd->thgd", d_score, k).flatten(1, 2)
            dkv_T2HD[cols, 0, run.kv] += torch.einsum("hgtk,thgd->khd", d_score, q)
            dkv_T2HD[cols, 1, run.kv] += torch.einsum("hgtk,thgd->khd", weight, do)


def _grouped(x: Tensor, run: HeadRun) -> Tensor:
    """View [T, H_q, ...] as float64 [T, H_kv, group, ...]."""
    return x.double().unflatten(1, (run.kv_count, -1))


def _scores(work: Work, q_THD: Tensor, kv_T2HD: Tensor, scale: float) -> Iterator[tuple[HeadRun, slice, slice, Tensor]]:
    """Yield (head run, query rows, KV rows, masked scores float64 [H_kv, group, rows, cols]) for strips of slices."""
    for run in work.heads:
        for q0, q1, k0, k1, lo, hi in work.slices.tolist():
            most, width = MAX_SCORES // run.q_count, hi - lo
            # A strip of h rows of a band has at most h + width columns, however long the band is.
            height = max(1, most // (k1 - k0), (math.isqrt(width * width + 4 * most) - width) // 2)
            strips = [(top, min(top + height, q1), k0, k1, lo, hi) for top in range(q0, q1, height)]
            for r0, r1, c0, c1, strip_lo, strip_hi in canonical(np.array(strips, dtype=np.int64)).tolist():
                rows, cols = slice(r0, r1), slice(c0, c1)
                q, k = _grouped(q_THD[rows, run.q], run), kv_T2HD[cols, 0, run.kv].double()
                score = torch.einsum("thgd,khd->hgtk", q, k).mul_(scale)
                offset = torch.arange(c0, c1, device=q.device) - torch.arange(r0, r1, device=q.device).unsqueeze(-1)
                hidden = (offset < strip_lo) | (offset > strip_hi)
                yield run, rows, cols, score.masked_fill_(hidden, -torch.inf)
