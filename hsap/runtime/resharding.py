"""Resharding: AllToAll between a rank's own tensor (its rows, all heads) and the column's (all rows, some heads)."""

from __future__ import annotations

import torch

from hsap.ir.heads import HeadRun
from hsap.ir.precision import Precision, aligned
from hsap.ir.program import KV_ROLES, Instruction, Role, Space
from hsap.ir.reshard import Piece, Reshard
from hsap.runtime.memory import TORCH_DTYPES, View, row_shapes, view_at
from hsap.runtime.transport import Transport


def all_to_all(
    shape: Reshard,
    instruction: Instruction,
    places: tuple[int, int, int],
    share: HeadRun,
    index: int,
    first_rank: int,
    precision: Precision,
):
    """Bind an AllToAll: a step that packs, exchanges in one batched round, and unpacks.

    places: source, target and scratch in the rank's memory. index: intra index; its neighbours start at first_rank.
    """
    role, round_ = instruction.role, instruction.round
    dtype = TORCH_DTYPES[precision.dtype_of(role, Space.ARENA, False)]
    stat = TORCH_DTYPES[precision.stat_dtype_of(False)]
    started = False

    def step(views: list[View], transport: Transport) -> bool:
        nonlocal started
        source, target, scratch = (views[p] for p in places)
        if not started:
            sends, receives = [], []
            for piece in shape.sends:
                if piece.peer != index and piece.num_bytes:
                    packed = _scratch(scratch, piece, role, source.rows.shape[-1], dtype, stat)
                    _copy(_select(source, piece, role, share, shape.to_column), packed)
                    sends += [(first_rank + piece.peer, t) for t in packed.tensors()]
            for piece in shape.receives:
                if piece.peer != index and piece.num_bytes:
                    into = (
                        target.part(piece.first_row, piece.num_rows)
                        if piece.offset is None
                        else _scratch(scratch, piece, role, target.rows.shape[-1], dtype, stat)
                    )
                    receives += [(first_rank + piece.peer, t) for t in into.tensors()]
            transport.launch(round_, sends, receives)
            started = True
        if not transport.wait(round_):
            return False
        started = False
        _unpack(shape, source, target, scratch, role, share, index, dtype, stat)
        return True

    return step


def _unpack(shape: Reshard, source: View, target: View, scratch: View, role, share, index, dtype, stat) -> None:
    """Put the part that stays, and what arrived in scratch, where it belongs."""
    stays = next(piece for piece in shape.sends if piece.peer == index)
    comes = next(piece for piece in shape.receives if piece.peer == index)
    own = _select(source, stays, role, share, shape.to_column)
    if shape.to_column:
        _copy(own, target.part(comes.first_row, comes.num_rows))
        return
    parts = [
        (piece, own if piece.peer == index else _scratch(scratch, piece, role, target.rows.shape[-1], dtype, stat))
        for piece in shape.receives
        if piece.num_bytes
    ]
    if role == Role.DKV:  # replicated KV heads: several ranks bring a part of one gradient, summed before rounding
        total = torch.zeros(target.rows.shape, dtype=source.rows.dtype, device=target.rows.device)
        for piece, part in parts:
            total[:, :, piece.heads.kv].add_(part.rows)
        target.rows.copy_(total)
        return
    for piece, part in parts:
        _copy(part, _heads(target, piece.heads, role))


def _select(view: View, piece: Piece, role: Role, share: HeadRun, to_column: bool) -> View:
    """Rows and heads of the source that a piece takes; the column's buffer numbers heads within the share."""
    part = view.part(piece.first_row, piece.num_rows)
    return _heads(part, piece.heads, role) if to_column else part


def _heads(view: View, heads: HeadRun, role: Role) -> View:
    if role in KV_ROLES:
        return View(view.rows[:, :, heads.kv])
    return View(view.rows[:, heads.q], None if view.stats is None else view.stats[..., heads.q])


def _scratch(scratch: View, piece: Piece, role: Role, head_dim: int, dtype, stat) -> View:
    rows_shape, stats_shape = row_shapes(role, piece.num_rows, piece.heads, head_dim)
    rows, end = view_at(scratch.rows, piece.offset, dtype, rows_shape)
    return View(rows, None if stats_shape is None else view_at(scratch.rows, aligned(end), stat, stats_shape)[0])


def _copy(source: View, target: View) -> None:
    target.rows.copy_(source.rows)
    if source.stats is not None:
        target.stats.copy_(source.stats)
