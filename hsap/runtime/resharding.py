"""Resharding: AllToAll between a rank's own tensor (its rows, all heads) and the column's (all rows, some heads).

Every view of memory that stays where it is, is made once; a call makes those of the caller's tensors, a few at a time,
copies and exchanges. `unsafe_split…` is `split` without autograd's record of views, which nobody reads here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hsap.ir.precision import aligned
from hsap.ir.program import KV_ROLES, Instruction, Role, Space
from hsap.ir.reshard import Piece, Reshard
from hsap.runtime.memory import TORCH_DTYPES, Memory, View, row_shapes, view_at
from hsap.runtime.transport import Message, Transport

Step = Callable[[list[View], Transport], bool]


def all_to_all(
    memory: Memory, shape: Reshard, instruction: Instruction, places: tuple[int, int, int], index: int, first_rank: int
) -> Step:
    """Bind an AllToAll: a step that packs, exchanges in one batched round, and unpacks.

    places: source, target and scratch in the rank's memory. index: intra index; its neighbours start at first_rank.
    """
    bind = _to_column if shape.to_column else _to_home
    return bind(memory, shape, instruction, places, index, first_rank)


def _to_column(
    memory: Memory, shape: Reshard, instruction: Instruction, places: tuple[int, int, int], index: int, first_rank: int
) -> Step:
    """Own rows with a neighbour's heads go to it; rows of the column's buffer arrive where they belong."""
    role, round_ = instruction.role, instruction.round
    peers = [first_rank + piece.peer for piece in shape.sends if piece.peer != index]
    packed = _scratch(memory, places[2], role, shape.sends)
    sends, into = _messages(packed, peers), _flat(packed)
    heads, num_rows = _head_runs(shape.sends, role), [piece.num_rows for piece in shape.receives]
    senders = peers * (1 if packed and packed[0].stats is None else 2)
    ranks, some_empty = len(num_rows), 0 in num_rows

    def by_head(source: View) -> tuple[list[Tensor], list[Tensor]]:
        """What goes to others, in the order of scratch, and what stays."""
        parts = _by_head(source, heads)
        stay = parts[index::ranks]
        del parts[index::ranks]
        return parts, stay

    def by_row(target: View) -> tuple[list[Message], list[Tensor]]:
        """Where the others' rows arrive, and where its own go."""
        parts = [part for t in target if t is not None for part in t.unsafe_split_with_sizes(num_rows)]
        own = parts[index::ranks]
        del parts[index::ranks]
        arrive = list(zip(senders, parts))
        return [message for message in arrive if message[1].numel()] if some_empty else arrive, own

    taken, put = memory.bind(places[0], by_head), memory.bind(places[1], by_row)
    started = False

    def step(views: list[View], transport: Transport) -> bool:
        nonlocal started
        if not started:
            leave, stay = taken(views)
            arrive, own = put(views)
            _copy(leave, into)
            transport.launch(round_, sends, arrive)
            _copy(stay, own)  # while the others' are on their way
        started = not transport.wait(round_)
        return not started

    return step


def _to_home(
    memory: Memory, shape: Reshard, instruction: Instruction, places: tuple[int, int, int], index: int, first_rank: int
) -> Step:
    """A neighbour's rows with own heads go to it; its heads of own rows arrive, in scratch."""
    role, round_ = instruction.role, instruction.round
    others = [piece for piece in shape.sends if piece.peer != index]
    peers = [first_rank + piece.peer for piece in others]
    packed, arrived = (_scratch(memory, places[2], role, pieces) for pieces in (shape.sends, shape.receives))
    into, sends, receives = _flat(packed), _messages(packed, peers), _messages(arrived, peers)
    taken = memory.bind(places[0], lambda view: _flat([view.part(p.first_row, p.num_rows) for p in others]))
    stays, heads = shape.sends[index], _head_runs(shape.receives, role)

    def in_order(source: View) -> list[View]:
        """What arrived, with what stayed in its place."""
        own = source.part(stays.first_row, stays.num_rows)
        return [*arrived[:index], own, *arrived[index:]]

    parts = memory.bind(places[0], in_order)
    flat = memory.bind(places[0], lambda view: _flat(in_order(view)))
    put = memory.bind(places[1], lambda view: _by_head(view, heads))
    shared = role == Role.DKV and not _tile(heads)
    started = False

    def step(views: list[View], transport: Transport) -> bool:
        nonlocal started
        if not started:
            _copy(taken(views), into)
            transport.launch(round_, sends, receives)
        started = not transport.wait(round_)
        if started:
            return False
        if shared:
            _sum(views[places[1]].rows, parts(views), heads)
        else:
            _copy(flat(views), put(views))
        return True

    return step


def _sum(target: Tensor, parts: Sequence[View], heads: Sequence[tuple[int, int]]) -> None:
    """Put KV heads' gradients home: several ranks bring a part of one, summed before rounding."""
    widest = max((part.rows.dtype for part in parts), key=lambda dtype: dtype.itemsize)
    total = torch.zeros(target.shape, dtype=widest, device=target.device)
    for part, (first, count) in zip(parts, heads):
        total.narrow(-2, first, count).add_(part.rows)
    target.copy_(total)


def _flat(views: Sequence[View]) -> list[Tensor]:
    """Rows of all views, then the statistics of those that have some."""
    return [tensor for column in zip(*views) for tensor in column if tensor is not None]


def _messages(views: Sequence[View], peers: Sequence[int]) -> list[Message]:
    return [(peer, tensor) for view, peer in zip(views, peers) for tensor in view.tensors()]


def _head_runs(pieces: Sequence[Piece], role: Role) -> list[tuple[int, int]]:
    """Heads of each piece, (first, count) over all heads."""
    runs = (piece.heads for piece in pieces)
    return [(r.kv_first, r.kv_count) if role in KV_ROLES else (r.q_first, r.q_count) for r in runs]


def _tile(heads: Sequence[tuple[int, int]]) -> bool:
    """Whether every head is in one run only, in order."""
    return all(first + count == after for (first, count), (after, _) in itertools.pairwise(heads))


def _by_head(view: View, heads: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Cut a buffer's heads into runs: rows of each, then statistics of each, where there are some."""
    if not _tile(heads):
        return _flat([view.heads(*run) for run in heads])
    counts = [count for _, count in heads]
    parts = list(view.rows.unsafe_split_with_sizes(counts, -2))
    return parts if view.stats is None else [*parts, *view.stats.unsafe_split_with_sizes(counts, -1)]


def _scratch(memory: Memory, place: int, role: Role, pieces: Sequence[Piece]) -> list[View]:
    """Places in the scratch buffer of those pieces that have one."""
    raw = memory.views[place].rows
    dtype = TORCH_DTYPES[memory.precision.dtype_of(role, Space.ARENA, False)]
    stat = TORCH_DTYPES[memory.precision.stat_dtype_of(False)]
    views = []
    for piece in pieces:
        if piece.offset is not None:
            rows_shape, stats_shape = row_shapes(role, piece.num_rows, piece.heads, memory.head_dim)
            rows, end = view_at(raw, piece.offset, dtype, rows_shape)
            stats = None if stats_shape is None else view_at(raw, aligned(end), stat, stats_shape)[0]
            views.append(View(rows, stats))
    return views


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
