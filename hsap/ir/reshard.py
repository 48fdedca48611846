"""Reshard: what every rank sends and receives in an AllToAll between sequence-sharded and head-sharded tensors.

Towards the column, a rank sends each intra neighbour its own rows with the neighbour's heads; what arrives is a row
range of the column's buffer. Back home, it sends each neighbour that neighbour's rows with its own heads; what arrives
are heads of its own rows, and KV heads that several ranks hold are summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hsap.ir.heads import HeadRun, HeadShape
from hsap.ir.precision import Precision, aligned, unit_bytes
from hsap.ir.program import KV_ROLES, Role, Space


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of an AllToAll, or the part that stays (peer = own intra index).

    first_row, num_rows: rows of the sequence-sharded or of the column's buffer. heads: numbered over all heads.
    offset: place in the scratch buffer [bytes], rows then aligned statistics; None: straight from or to the buffer.
    num_bytes: what travels, rows and statistics, without alignment.
    """

    peer: int
    first_row: int
    num_rows: int
    heads: HeadRun
    offset: int | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reshard:
    """All pieces of one rank's AllToAll; scratch_bytes is the size of its scratch buffer."""

    to_column: bool
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    scratch_bytes: int


def reshard(
    role: Role, to_column: bool, heads: HeadShape, precision: Precision, tokens: Sequence[int], index: int
) -> Reshard:
    """Lay out an AllToAll of `role` for intra rank `index` of a group whose ranks hold `tokens` tokens each."""
    shares = heads.shares(len(tokens))
    starts = [0, *itertools.accumulate(tokens)]
    row, stat = (column.tolist() for column in _share_bytes(role, heads, precision, len(tokens)))
    used = 0

    def piece(peer: int, first_row: int, num_rows: int, share: int, scratch: bool) -> Piece:
        nonlocal used
        offset = None
        if scratch and peer != index:
            offset = used
            used += aligned(num_rows * row[share]) + aligned(num_rows * stat[share])
        return Piece(peer, first_row, num_rows, shares[share], offset, num_rows * (row[share] + stat[share]))

    ranks = range(len(tokens))
    if to_column:
        sends = tuple(piece(j, 0, tokens[index], j, True) for j in ranks)
        receives = tuple(piece(j, starts[j], tokens[j], index, False) for j in ranks)
    else:
        sends = tuple(piece(j, starts[j], tokens[j], index, True) for j in ranks)
        receives = tuple(piece(j, 0, tokens[index], j, True) for j in ranks)
    return Reshard(to_column, sends, receives, used)


def scratch_bytes(
    role: Role, to_column: bool, heads: HeadShape, precision: Precision, tokens: np.ndarray
) -> np.ndarray:
    """Size the scratch buffers of many ranks at once, as `reshard` lays them out: int64, shaped as `tokens`.

    tokens: int64 [num_groups, intra_sp], rows of each rank.
    """
    row, stat = _share_bytes(role, heads, precision, tokens.shape[1])
    own_rows = _piece_bytes(tokens[:, :, None], row, stat).sum(axis=2)
    stays = _piece_bytes(tokens, row, stat)
    if to_column:
        return own_rows - stays
    own_heads = _piece_bytes(tokens[:, None, :], row[:, None], stat[:, None]).sum(axis=2)
    return own_rows + own_heads - 2 * stays


def exchanged_bytes(
    role: Role, to_column: bool, heads: HeadShape, precision: Precision, tokens: np.ndarray
) -> np.ndarray:
    """Size what ranks send each other, as `reshard` lays it out: int64 [num_groups, intra_sp, intra_sp], 0 to itself.

    tokens: int64 [num_groups, intra_sp], rows of each rank. Indices: group, who sends, who receives.
    """
    elements, statistics = _share_bytes(role, heads, precision, tokens.shape[1])
    row = elements + statistics
    out = tokens[:, :, None] * row if to_column else tokens[:, None, :] * row[:, None]
    ranks = np.arange(tokens.shape[1])
    out[:, ranks, ranks] = 0
    return out


def _share_bytes(role: Role, heads: HeadShape, precision: Precision, intra_sp: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a row's elements and of its statistics, for the heads of each intra rank: int64 [intra_sp] each."""
    row, stat = unit_bytes(precision, heads.head_dim)[:, role + 1, Space.ARENA, 0]
    _, q, _, kv = np.array(heads.shares(intra_sp)).T
    return row * (kv if role in KV_ROLES else q), stat * q


def _piece_bytes(num_rows: np.ndarray, row: np.ndarray, stat: np.ndarray) -> np.ndarray:
    return aligned(num_rows * row) + aligned(num_rows * stat)
