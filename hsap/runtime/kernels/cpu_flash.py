"""torch's flash attention for CPUs, piece by piece: full rectangles, causal squares, and masked strips for the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsap.ir.heads import HeadRun
from hsap.ir.slice import HI, K0, K1, LO, Q0, Q1, Kind, cut, kinds, square
from hsap.runtime.kernels.delta import cast_statistic, stand_in_output
from hsap.runtime.kernels.merge import merge
from hsap.runtime.kernels.work import Work

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

STRIP_ROWS = 1024
STRIP_COLS = 4096
"""A mask is made for at most STRIP_ROWS x STRIP_COLS pairs at a time."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rectangle that one call does, and how: without a mask, top-left causal, or with a band's mask."""

    rows: slice
    cols: slice
    causal: bool
    band: tuple[int, int] | None
    """Bounds (lo, hi) on column - row inside the rectangle, where a mask is needed."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    pieces: tuple[_Piece, ...]
    heads: tuple[HeadRun, ...]


class CpuFlashKernel:
    """torch's CPU flash attention with log-sum-exp; float64, float32, bfloat16, float16; every kind of slice.

    float32_output: compute half-precision inputs in float32 in forward too, so that partial outputs aren't rounded to
    half precision before they are merged; costs a float32 copy of the inputs.
    """

    name = "cpu_flash"

    def __init__(self, float32_output: bool = False) -> None:
        self.float32_output = float32_output

    def prepare(self, work: Work, device: torch.device | str) -> _Prepared:
        """Decompose the slices into calls; see `Kernel`."""
        return _Prepared(tuple(_piece(row, kind) for row, kind in _decompose(work.slices)), work.heads)

    def attend(
        self, prepared: _Prepared, q_THD: Tensor, kv_T2HD: Tensor, o_THD: Tensor, lse_TH: Tensor, scale: float
    ) -> None:
        """Fold attention over the slices into o and lse; see `Kernel`."""
        if self.float32_output:
            q_THD, kv_T2HD = _widened(q_THD), _widened(kv_T2HD)
        masks = _Masks(q_THD.dtype)
        for piece in prepared.pieces:
            mask = masks.of(piece)
            for run in prepared.heads:
                q = _heads_first(q_THD[piece.rows, run.q])
                k, v = (_heads_first(kv_T2HD[piece.cols, side, run.kv]) for side in (0, 1))
                o, lse = _forward(q, k, v, 0.0, piece.causal, attn_mask=mask, scale=scale)
                o_acc, lse_acc = o_THD[piece.rows, run.q], lse_TH[piece.rows, run.q]
                merge(o_acc, lse_acc, o[0].transpose(0, 1), lse[0].transpose(0, 1))

    def attend_grad(
        self,
        prepared: _Prepared,
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
        # Always in float32 or wider: given half precision, torch's kernel also *sums* dk and dv over blocks of rows and
        # over the heads of a group in half precision, an error that grows with the length (8e-3 at 3,072 rows).
        q_THD, kv_T2HD, do_THD = _widened(q_THD), _widened(kv_T2HD), _widened(do_THD)
        out_THD = stand_in_output(do_THD, delta_TH)
        lse_TH = cast_statistic(lse_TH, q_THD.dtype)
        masks = _Masks(q_THD.dtype)
        for piece in prepared.pieces:
            mask = masks.of(piece)
            for run in prepared.heads:
                do, q, out = (_heads_first(x[piece.rows, run.q]) for x in (do_THD, q_THD, out_THD))
                k, v = (_heads_first(kv_T2HD[piece.cols, side, run.kv]) for side in (0, 1))
                lse = lse_TH[piece.rows, run.q].transpose(0, 1)[None]
                grads = _backward(do, q, k, v, out, lse, 0.0, piece.causal, attn_mask=mask, scale=scale)
                dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
                dq_THD[piece.rows, run.q] += dq
                dkv_T2HD[piece.cols, 0, run.kv] += dk
                dkv_T2HD[piece.cols, 1, run.kv] += dv


class _Masks:
    """Additive masks, made when a piece needs one; the last is kept, since neighbouring strips of a band are alike."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._key: tuple[int, int, tuple[int, int]] | None = None
        self._mask: Tensor | None = None

    def of(self, piece: _Piece) -> Tensor | None:
        """Make the mask of a piece, [rows, cols] of the queries' dtype; None where it needs none."""
        if piece.band is None:
            return None
        num_rows, num_cols = piece.rows.stop - piece.rows.start, piece.cols.stop - piece.cols.start
        key = (num_rows, num_cols, piece.band)
        if key != self._key:
            offset = torch.arange(num_cols, dtype=torch.int32) - torch.arange(num_rows, dtype=torch.int32)[:, None]
            hidden = (offset < piece.band[0]) | (offset > piece.band[1])
            self._key = key
            self._mask = torch.zeros(num_rows, num_cols, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return self._mask


def _widened(x: Tensor) -> Tensor:
    """Bring half precision to float32; leave the rest as it is."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _heads_first(x_THD: Tensor) -> Tensor:
    """View [T, H, D] as the [1, H, T, D] that torch's kernel wants; it takes any strides but the last."""
    return x_THD.transpose(0, 1)[None]


def _decompose(table: np.ndarray) -> list[tuple[list[int], int]]:
    """Cut canonical slices into pieces that one call can do: [(canonical slice, kind)]; causal ones are square."""
    pieces = square(table)[0]
    kind = kinds(pieces)
    masked = (kind == Kind.INV_CAUSAL) | (kind == Kind.BAND)
    strips = [strip for row in pieces[masked] for strip in _strips(row)]
    pieces = np.concatenate([pieces[~masked], *strips])
    return list(zip(pieces.tolist(), kinds(pieces).tolist()))


def _strips(row: np.ndarray) -> list[np.ndarray]:
    """Cut one slice that is cut below its diagonal into strips small enough for a mask, as tables."""
    # As tall as the band is wide: then at least about half of a strip's pairs are visible.
    height = int(np.clip(row[HI] - row[LO] + 1, 128, STRIP_ROWS))
    grid = cut(row[None], _grid(row[Q0], row[Q1], height), _grid(row[K0], row[K1], STRIP_COLS))[0]
    return [square(grid)[0]]


def _grid(start: int, stop: int, step: int) -> np.ndarray:
    """Cut [start, stop) into spans of `step`: int64 [n, 2]."""
    edges = np.arange(start, stop, step)
    return np.stack([edges, np.minimum(edges + step, stop)], axis=1)


def _piece(row: list[int], kind: int) -> _Piece:
    q0, q1, k0, k1, lo, hi = row
    shift = k0 - q0
    band = (lo - shift, hi - shift) if kind in (Kind.INV_CAUSAL, Kind.BAND) else None
    return _Piece(slice(q0, q1), slice(k0, k1), kind == Kind.CAUSAL, band)
