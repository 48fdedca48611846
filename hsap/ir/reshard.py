"""Reshard: what every rank sends and receives in an AllToAll between sequence-sharded and head-sharded tensors.

Towards the column, a rank sends each intra neighbour its own rows with the neighbour's heads; what arrives is a row
range of the column's buffer. Back home, it sends each neighbour that neighbour's rows with its own heads; what arrives
are heads of its own rows, and KV heads that several ranks hold are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hsap.ir.heads import HeadRun, HeadShape
from hsap.ir.precision import Precision, aligned, row_bytes
from hsap.ir.program import Role, Space


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
    starts = [sum(tokens[:j]) for j in range(len(tokens))]
    used = 0

    def piece(peer: int, first_row: int, num_rows: int, run: HeadRun, scratch: bool) -> Piece:
        nonlocal used
        columns = np.array([run.q_first, run.q_count, run.kv_first, run.kv_count])
        row, stat = (int(b) for b in row_bytes(precision, role, Space.ARENA, False, columns, heads.head_dim))
        offset = None
        if scratch and peer != index:
            offset = used
            used += aligned(num_rows * row) + aligned(num_rows * stat)
        return Piece(peer, first_row, num_rows, run, offset, num_rows * (row + stat))

    if to_column:
        sends = tuple(piece(j, 0, tokens[index], share, True) for j, share in enumerate(shares))
        receives = tuple(piece(j, starts[j], tokens[j], shares[index], False) for j in range(len(tokens)))
    else:
        sends = tuple(piece(j, starts[j], tokens[j], shares[index], True) for j in range(len(tokens)))
        receives = tuple(piece(j, 0, tokens[index], share, True) for j, share in enumerate(shares))
    return Reshard(to_column, sends, receives, used)
