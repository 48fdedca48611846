"""torch's flash attention for CPUs, piece by piece.

It knows full rectangles and causal squares. An inverse causal square is a causal one whose rows and columns are turned
round, and wide bands are cut into these; only narrow bands need a mask, for a strip of rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsap.ir.heads import HeadRun
from hsap.ir.slice import Kind, kinds, squares, strips
from hsap.runtime.kernels.delta import cast_statistic, stand_in_output
from hsap.runtime.kernels.merge import merge
from hsap.runtime.kernels.work import Work
from hsap.runtime.upload import Upload

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

NARROW = 256
STRIP_ROWS = 128
"""Bands of fewer than NARROW diagonals are done STRIP_ROWS at a time by a mask of less than 128 KiB in float32."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A rectangle that one call does, and how: all of it, top-left causal, that turned round, or with a band's mask."""

    rows: slice
    cols: slice
    causal: bool
    turned: bool
    band: tuple[int, int] | None
    """Bounds (lo, hi) on column - row inside the rectangle, where a mask is needed."""

    def take(self, x: Tensor, rows: slice, heads: slice) -> Tensor:
        """Give rows and heads of [T, H, …] as the [1, H, T, …] that torch wants; it takes any strides there."""
        return self.give(x[rows, heads]).transpose(0, 1)[None]

    def give(self, x: Tensor) -> Tensor:
        """Put rows into the other order, there or back, where the piece is turned round."""
        return x.flip(0) if self.turned else x


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

    def prepare(self, work: Work, device: torch.device | str, upload: Upload | None = None) -> _Prepared:
        """Decompose the slices into calls; see `Kernel`."""
        return _Prepared(tuple(_decompose(work.slices)), work.heads)

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
                q = piece.take(q_THD, piece.rows, run.q)
                k, v = (piece.take(kv_T2HD[:, side], piece.cols, run.kv) for side in (0, 1))
                o, lse = _forward(q, k, v, 0.0, piece.causal, attn_mask=mask, scale=scale)
                o_acc, lse_acc = o_THD[piece.rows, run.q], lse_TH[piece.rows, run.q]
                merge(o_acc, lse_acc, piece.give(o[0].transpose(0, 1)), piece.give(lse[0].transpose(0, 1)))

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
                do, q, out, lse = (piece.take(x, piece.rows, run.q) for x in (do_THD, q_THD, out_THD, lse_TH))
                k, v = (piece.take(kv_T2HD[:, side], piece.cols, run.kv) for side in (0, 1))
                grads = _backward(do, q, k, v, out, lse, 0.0, piece.causal, attn_mask=mask, scale=scale)
                dq, dk, dv = (piece.give(grad[0].transpose(0, 1)) for grad in grads)
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


def _decompose(table: np.ndarray) -> list[_Piece]:
    """Cut canonical slices into pieces that one call can do."""
    pieces = squares(table, NARROW)[0]
    banded = kinds(pieces) == Kind.BAND
    plain, bands = pieces[~banded], pieces[banded]
    bands = strips(bands, np.full(len(bands), STRIP_ROWS))[0]
    calls = [_piece(row, kind) for row, kind in zip(plain.tolist(), kinds(plain).tolist())]
    return calls + [_piece(row, Kind.BAND) for row in bands.tolist()]


def _piece(row: list[int], kind: int) -> _Piece:
    q0, q1, k0, k1, lo, hi = row
    shift = k0 - q0
    turned = kind == Kind.INV_CAUSAL
    band = (lo - shift, hi - shift) if kind == Kind.BAND else None
    return _Piece(slice(q0, q1), slice(k0, k1), turned or kind == Kind.CAUSAL, turned, band)
