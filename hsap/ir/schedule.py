"""Schedules: what a planner decides, before it becomes instructions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike

from hsap.ir.block import Blocks, Shards
from hsap.ir.problem import Topology
from hsap.ir.program import KV_ROLES, Role


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Rows that travel between ranks, as columns: a shard's `role` goes from src to dst during [stage, until].

    It is sent as stage begins, and waited for as until ends: what arrives in stage s is there for the blocks of stage
    s + 1. Ranks are InterSP ranks.
    """

    role: np.ndarray
    shard: np.ndarray
    group: np.ndarray
    src: np.ndarray
    dst: np.ndarray
    stage: np.ndarray
    until: np.ndarray

    @classmethod
    def of(
        cls,
        role: ArrayLike,
        shard: ArrayLike,
        src: ArrayLike,
        dst: ArrayLike,
        stage: ArrayLike,
        group: ArrayLike = 0,
    ) -> Transfers:
        """Build from arrays or scalars that broadcast against each other; all within their stage."""
        columns = [np.asarray(column, dtype=np.int64) for column in (role, shard, group, src, dst, stage, stage)]
        shape = np.broadcast_shapes(*(column.shape for column in columns)) or (1,)
        return cls(*(column if column.shape == shape else np.broadcast_to(column, shape) for column in columns))

    @classmethod
    def join(cls, *parts: Transfers) -> Transfers:
        """Put several tables one after another."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.__slots__))

    def take(self, index: np.ndarray) -> Transfers:
        """Pick rows by index or boolean mask."""
        return Transfers(*(getattr(self, name)[index] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.role)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Where and when the blocks of one mask and direction are computed, one entry per block and head group.

    blocks: the mask's blocks. block, group, rank, stage: int64 [num_entries]; rank is an InterSP rank, stage >= 0.
    transfers: what the planner routes itself, all rows of a role or none. Of an input (a ring forwards KV): where each
    rank gets it, once. Of an output: where each rank's partial result leaves it, once, after the stages that add to it;
    on the way home it is folded into the partial result of the rank it goes to, which that rank sends on in a later
    stage. Every other need is met by a direct transfer from the home rank in the stage before first use, and other
    partial results go home in the stage after the last.
    """

    blocks: Blocks
    block: np.ndarray
    group: np.ndarray
    rank: np.ndarray
    stage: np.ndarray
    transfers: Transfers | None = None

    @classmethod
    def of(cls, blocks: Blocks, rank: np.ndarray, stage: np.ndarray, transfers: Transfers | None = None) -> Schedule:
        """Build for blocks that are computed for all heads at once: rank and stage of each block."""
        index = np.arange(len(blocks))
        return cls(blocks, index, np.zeros_like(index), np.asarray(rank), np.asarray(stage), transfers)

    def shard_of(self, role: Role) -> np.ndarray:
        """Shard whose `role` each entry reads or writes: int64 [num_entries]."""
        return (self.blocks.kv if role in KV_ROLES else self.blocks.q)[self.block]


@dataclass(frozen=True, slots=True, eq=False)
class Strategy:
    """A planner's whole choice: homes of all tokens, and a schedule per mask for each direction.

    num_groups: head groups that a column's KV heads are cut into. relay: let the compiler send what it routes itself
    across each node border once (`hsap.compiler.relay`). ahead: by how many stages the compiler may send inputs earlier
    and fold results in later than the schedule says (`hsap.compiler.prefetch`); 0 keeps stages as they are. topology:
    the shape that a whole-group planner chose for all ranks of the problem; its ranks and shares of heads are then this
    shape's (None: the problem's).
    """

    shards: Shards
    forward: tuple[Schedule, ...]
    backward: tuple[Schedule, ...]
    num_groups: int = 1
    relay: bool = False
    ahead: int = 0
    topology: Topology | None = None


AHEAD = 2
"""A good `Strategy.ahead` where ranks have unequal blocks in a stage.

`python -m tests.bench.planning`, dgx-a100: sap's predicted time on ldc@131072 × 8 falls by a third and dcp's by a sixth
against 0, for a tenth more buffer at most but where a rank gathers a whole document (a third); 4 gives no more.
"""


class Chart(IntEnum):
    """Columns of a plan's chart: a row per block of one mask and direction."""

    Q_SHARD = 0
    KV_SHARD = 1
    GROUP = 2
    RANK = 3
    STAGE = 4
    AREA = 5


INPUTS = {"forward": (Role.Q, Role.KV), "backward": (Role.Q, Role.KV, Role.DO)}
OUTPUTS = {"forward": (Role.O,), "backward": (Role.DQ, Role.DKV)}
DIRECTIONS = ("forward", "backward")
