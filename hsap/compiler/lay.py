"""Lay: what travels in which round and message, where it lies, and what is one kernel: all but the instructions.

Whoever only wants to know how long a strategy takes (`hsap.tune.stages`) stops here; `lower` goes on from here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.compiler.fuse import Fused, fuse
from hsap.compiler.messages import Copies, Messages, copies, messages
from hsap.compiler.rounds import rounds_of
from hsap.compiler.trays import SpanTable, Trays, lay_out
from hsap.compiler.widen import Entries, Moves, Wide


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """One mask and direction in column terms, without buffers and instructions.

    rounds: int64 [num_moves], of each of `moves`, from 0 on. table: the span table with the rows of the trays.
    """

    direction: str
    entries: Entries
    moves: Moves
    rounds: np.ndarray
    table: SpanTable
    trays: Trays
    copies: Copies
    messages: Messages
    kernels: Fused

    @property
    def first_stage(self) -> int:
        """The first stage in which something leaves, 0 at most."""
        return int(self.moves.stage.min(initial=0))

    @property
    def last_stage(self) -> int:
        """The last stage in which something is computed or arrives."""
        return max(int(self.entries.stage.max(initial=0)), int(self.moves.until.max(initial=0)))


def lay(table: SpanTable, wide: Wide, direction: str, num_ranks: int) -> Laid:
    """Give every move its round, its places and its message, and every entry its kernel."""
    moves, shards = wide.moves, table.shards
    rounds = rounds_of(moves, num_ranks)
    trays, table = lay_out(table, num_ranks, wide.runs, direction, moves)
    here, there = (trays.find(shards, moves.role, rank, moves.shard, moves.run) for rank in (moves.src, moves.dst))
    # A home buffer has all heads of a row side by side: what leaves it without some of them is copied together before.
    parted = np.flatnonzero((here[0] < num_ranks) & ~wide.runs.is_whole[moves.run])
    made, copy = copies(shards, moves, parted)
    sent = messages(moves, rounds, copy, here, there)
    return Laid(direction, wide.entries, moves, rounds, table, trays, made, sent, fuse(shards, wide.entries, trays))
