"""Travel: what a column's ranks send each other, with the round in which it goes and its place at both ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.compiler.rounds import rounds_of
from hsap.compiler.trays import SpanTable, Trays, lay_out
from hsap.ir.schedule import Transfers


@dataclass(frozen=True, slots=True, eq=False)
class Travel:
    """Transfers as columns: int64 [n] each.

    moved: inputs and results. rounds: of each, from `first_round` on. trays: of all that need one; table: the span
    table with their rows. here, there: where rows are before and after, see `Trays.find`; rows, to_rows: first and stop
    span of each transfer's shard in them.
    """

    moved: Transfers
    rounds: np.ndarray
    trays: Trays
    table: SpanTable
    here: np.ndarray
    there: np.ndarray
    rows: tuple[np.ndarray, np.ndarray]
    to_rows: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(
        cls,
        table: SpanTable,
        transfers: tuple[Transfers, Transfers],
        direction: str,
        num_ranks: int,
        num_groups: int,
        first_round: int = 0,
    ) -> Travel:
        """Give every transfer of a direction its round and its places. transfers: as `pipeline.routes` gives them."""
        moved = Transfers.join(*transfers)
        rounds = rounds_of(moved, num_ranks, first_round)
        trays, table = lay_out(table, num_ranks, num_groups, direction, moved)
        here, *rows = trays.find(table.shards, moved.role, moved.src, moved.shard, moved.group)
        there, *to_rows = trays.find(table.shards, moved.role, moved.dst, moved.shard, moved.group)
        return cls(moved, rounds, trays, table, here, there, tuple(rows), tuple(to_rows))
