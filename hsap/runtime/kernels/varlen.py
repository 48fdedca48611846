"""The shared part of kernels that do many sequences in one call: decomposing, packing rows, folding results.

A varlen call takes packed queries [T_q, H_q, D] and keys and values [T_k, H_kv, D] with cumulative sequence lengths,
and one window for all sequences: row i of L_q sees column j of L_k iff -left <= j - i - (L_k - L_q) <= right, where -1
stands for no bound. That is aligned to the bottom right, as flash-attention does it. Every canonical slice is such a
window; slices with equal windows share a call. Causal slices, and windows cut by no shard border, all have equal ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hsap.ir.heads import HeadRun
from hsap.ir.slice import HI, K0, K1, LO, Q0, Q1, Kind, kinds, shrink
from hsap.ir.span import coalesce, positions
from hsap.runtime.kernels.delta import cast_statistic, stand_in_output
from hsap.runtime.kernels.merge import add_rows, merge, reset
from hsap.runtime.kernels.work import Work
from hsap.runtime.upload import Upload

Rows = slice | Tensor
"""Rows of a tensor: a slice where they are contiguous, else an index tensor on the device."""

MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Sequences:
    """One side of a varlen call: which rows are packed, and where the sequences begin."""

    rows: Rows
    cu_seqlens: Tensor
    """int32 [n + 1] on the device."""
    max_seqlen: int
    layers: tuple[tuple[Rows, Rows], ...]
    """(packed rows, buffer rows) of parts in which no buffer row occurs twice, so that folding needs no atomics."""


@dataclass(frozen=True, slots=True)
class Call:
    """One varlen call: sequences that have the same window."""

    q: Sequences
    kv: Sequences
    window: tuple[int, int]
    """(left, right); -1 is unbounded."""


@dataclass(frozen=True, slots=True)
class VarlenPrepared:
    """The calls of one work, with their index tensors on the device."""

    calls: tuple[Call, ...]
    heads: tuple[HeadRun, ...]

    @property
    def stores(self) -> tuple[bool, bool]:
        """See `Kernel`: one window, and no row or head twice."""
        if len(self.calls) != 1:
            return False, False
        (call,) = self.calls
        kv_heads = [head for run in self.heads for head in range(run.kv.start, run.kv.stop)]
        return len(call.q.layers) == 1, len(call.kv.layers) == 1 and len(kv_heads) == len(set(kv_heads))


class VarlenKernel(ABC):
    """A kernel made of a varlen forward and a varlen backward; see `Kernel` for the interface."""

    name: str

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """Attend packed rows: q [T_q, H_q, D], k, v [T_k, H_kv, D] -> o [T_q, H_q, D], lse [H_q, T_q] natural log."""

    @abstractmethod
    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate packed rows; lse [H_q, T_q] may be that of more keys than these: returns dq, dk, dv."""

    def prepare(self, work: Work, device: torch.device | str, upload: Upload | None = None) -> VarlenPrepared:
        """Group the slices by window and put their index tensors on the device; see `Kernel`."""
        tables = upload or Upload(device)
        pieces, windows = split_windows(work.slices)
        windows = _join_windows(pieces, windows)
        calls = []
        for left, right in np.unique(windows, axis=0).tolist():
            table = pieces[(windows == (left, right)).all(axis=1)]
            # In the order of a side's layers, packed rows of one layer are contiguous.
            table = table[np.lexsort((table[:, Q0], _layers(table[:, [Q0, Q1]])))]
            q, kv = (_sequences(table[:, side], tables) for side in ([Q0, Q1], [K0, K1]))
            calls.append(Call(q, kv, (left, right)))
        if upload is None:
            tables.flush()
        return VarlenPrepared(tuple(calls), work.heads)

    def attend(
        self,
        prepared: VarlenPrepared,
        q_THD: Tensor,
        kv_T2HD: Tensor,
        o_THD: Tensor,
        lse_TH: Tensor,
        scale: float,
        fresh: bool = False,
    ) -> None:
        """Fold attention over the slices into o and lse; see `Kernel`."""
        _check_head_dim(self.name, q_THD.shape[-1])
        if fresh and not _makes_all(prepared.calls[0].q, [run.q for run in prepared.heads], o_THD):
            reset(o_THD, lse_TH)
        for call in prepared.calls:
            for run in prepared.heads:
                q, kv = q_THD[:, run.q][call.q.rows], kv_T2HD[:, :, run.kv][call.kv.rows]
                o, lse = self.forward(q, kv[:, 0], kv[:, 1], call, scale)
                if fresh:
                    _put(call.q, o_THD[:, run.q], o)
                    _put(call.q, lse_TH[:, run.q], lse.T)
                else:
                    _fold(call.q, o_THD[:, run.q], lse_TH[:, run.q], o, lse.T)

    def attend_grad(
        self,
        prepared: VarlenPrepared,
        q_THD: Tensor,
        kv_T2HD: Tensor,
        do_THD: Tensor,
        lse_TH: Tensor,
        delta_TH: Tensor,
        dq_THD: Tensor,
        dkv_T2HD: Tensor,
        scale: float,
        fresh_q: bool = False,
        fresh_kv: bool = False,
    ) -> None:
        """Add the gradients of the slices to dq and dkv; see `Kernel`."""
        _check_head_dim(self.name, q_THD.shape[-1])
        out_THD = stand_in_output(do_THD, delta_TH)
        lse_TH = cast_statistic(lse_TH, q_THD.dtype)
        if fresh_q and not _makes_all(prepared.calls[0].q, [run.q for run in prepared.heads], dq_THD):
            dq_THD.zero_()
        if fresh_kv and not _makes_all(prepared.calls[0].kv, [run.kv for run in prepared.heads], dkv_T2HD[:, 0]):
            dkv_T2HD.zero_()
        add_q, add_kv = (_put if stored else _add for stored in (fresh_q, fresh_kv))
        for call in prepared.calls:
            for run in prepared.heads:
                do, q, out, lse = (x[:, run.q][call.q.rows] for x in (do_THD, q_THD, out_THD, lse_TH))
                kv = kv_T2HD[:, :, run.kv][call.kv.rows]
                lse = lse.T.contiguous()
                dq, dk, dv = self.backward(do, q, kv[:, 0], kv[:, 1], out, lse, call, scale)
                add_q(call.q, dq_THD[:, run.q], dq)
                add_kv(call.kv, dkv_T2HD[:, 0, run.kv], dk)
                add_kv(call.kv, dkv_T2HD[:, 1, run.kv], dv)


def does_head_dim(dim: int) -> bool:
    """Say whether flash-attention's CUDA kernels do this head dimension without padding."""
    return 0 < dim <= MAX_HEAD_DIM and dim % 8 == 0


def _check_head_dim(name: str, dim: int) -> None:
    if not does_head_dim(dim):
        raise ValueError(
            f"kernel {name} does head dimensions that are multiples of 8 up to {MAX_HEAD_DIM}, not {dim}; "
            "use kernel=math, which does any"
        )


def split_windows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Turn canonical slices into windows: (pieces [m, 6] canonical, (left, right) of each [m, 2], -1 unbounded).

    Rows that see the rectangle's last column are cut off where hi binds, so that what is left ends on the diagonal and
    right is 0: causal slices, and windows of equal width, then share one call.
    """
    bends = table[:, K1] - table[:, HI]
    above, below = table.copy(), table.copy()
    cut_above = (kinds(table) & Kind.CAUSAL) != 0
    above[:, Q1] = np.where(cut_above, np.minimum(table[:, Q1], bends), table[:, Q1])
    below[:, Q0] = above[:, Q1]
    pieces, origin = shrink(np.concatenate([above, below]))
    pieces = pieces[np.argsort(origin % max(len(table), 1), kind="stable")]
    kind = kinds(pieces)
    corner = pieces[:, K1] - pieces[:, Q1]
    left = np.where(kind & Kind.INV_CAUSAL, corner - pieces[:, LO], -1)
    right = np.where(kind & Kind.CAUSAL, pieces[:, HI] - corner, -1)
    return pieces, np.stack([left, right], axis=1)


def _join_windows(pieces: np.ndarray, windows: np.ndarray) -> np.ndarray:
    """Save calls: give all pieces of an unbounded window a bounded one that hides nothing from any of them, if any is.

    One-token documents thereby join the causal ones, and documents shorter than a window join the longer ones.
    """
    windows = windows.copy()
    last_row, last_col = pieces[:, Q1] - pieces[:, Q0] - 1, pieces[:, K1] - pieces[:, K0] - 1
    for unbounded in ((-1, -1), (-1, 0)):
        members = (windows == unbounded).all(axis=1)
        for left, right in np.unique(windows, axis=0).tolist():
            hides_none = left == -1 or (last_col[members] <= left).all()
            # A single row sees its last column with and without the diagonal.
            same_above = right == unbounded[1] or (right == 0 and (last_row[members] == 0).all())
            if (left, right) != unbounded and hides_none and same_above:
                windows[members] = left, right
                break
    return windows


def _layers(spans: np.ndarray) -> np.ndarray:
    """Give each span the first layer in which it overlaps no span before it: int64 [n]."""
    layer = np.zeros(len(spans), dtype=np.int64)
    stops: list[int] = []
    for index in np.lexsort((spans[:, 1], spans[:, 0])).tolist():
        start, stop = spans[index].tolist()
        free = next((i for i, end in enumerate(stops) if end <= start), len(stops))
        stops[free : free + 1] = [stop]
        layer[index] = free
    return layer


def _rows(spans: np.ndarray, tables: Upload) -> Rows:
    """Index the rows of spans in their order: a slice if they are one range, else an index tensor."""
    joined = coalesce(spans)
    if len(joined) == 1:
        return slice(int(joined[0, 0]), int(joined[0, 1]))
    return tables.put(positions(joined))


def _sequences(spans: np.ndarray, tables: Upload) -> Sequences:
    lengths = spans[:, 1] - spans[:, 0]
    edges = np.concatenate([[0], np.cumsum(lengths)])
    packed = np.stack([edges[:-1], edges[1:]], axis=1)
    layer = _layers(spans)
    layers = tuple(
        (_rows(packed[layer == index], tables), _rows(spans[layer == index], tables))
        for index in range(layer.max() + 1)
    )
    cu_seqlens = tables.put(edges.astype(np.int32))
    return Sequences(_rows(spans, tables), cu_seqlens, int(lengths.max()), layers)


def _fold(side: Sequences, o_acc: Tensor, lse_acc: Tensor, o: Tensor, lse: Tensor) -> None:
    """Merge packed outputs into accumulator rows, layer by layer."""
    for packed, rows in side.layers:
        (o_acc_, lse_acc_), acc_rows = _ranged(rows, o_acc, lse_acc)
        (o_, lse_), part_rows = _ranged(packed, o, lse)
        merge(o_acc_, lse_acc_, o_, lse_, acc_rows, part_rows)


def _add(side: Sequences, total: Tensor, grad: Tensor) -> None:
    """Add packed gradients to buffer rows, layer by layer: the same order, hence the same bits, in every run."""
    for packed, rows in side.layers:
        (total_,), total_rows = _ranged(rows, total)
        (grad_,), grad_rows = _ranged(packed, grad)
        add_rows(total_, grad_, total_rows, grad_rows)


def _put(side: Sequences, target: Tensor, part: Tensor) -> None:
    """Write packed rows, each of which occurs once, to buffer rows."""
    ((packed, rows),) = side.layers
    if isinstance(rows, slice):
        target[rows].copy_(part[packed])
    else:
        target[rows] = part[packed].to(target.dtype)


def _makes_all(side: Sequences, heads: list[slice], target: Tensor) -> bool:
    """Whether a call makes every row and head of a tensor [T, H, D]; else some are to be emptied."""
    rows = side.layers[0][1]
    whole = isinstance(rows, slice) and (rows.start, rows.stop) == (0, len(target))
    return whole and sum(run.stop - run.start for run in heads) == target.shape[1]


def _ranged(rows: Rows, *tensors: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Cut tensors to a range of rows; rows that are no range are left to whoever takes them by index."""
    if isinstance(rows, slice):
        return tuple(tensor[rows] for tensor in tensors), None
    return tensors, rows
