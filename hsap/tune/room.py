"""Room: which settings of a shape a rank's memory holds, and what would hold a job that nothing does."""

from __future__ import annotations

import math

from hsap.ir.check import MAX_RANKS
from hsap.ir.heads import DTYPE_BYTES
from hsap.ir.problem import Topology
from hsap.tune.choices import CHECKPOINTING, ZERO_STAGES, Shape
from hsap.tune.job import Job
from hsap.tune.memory import kept_copies, rank_bytes
from hsap.tune.setting import Setting, reserve_bytes

ARENA_ROOM, LEAST_ARENA = 1.5, 12.0
"""Arena beyond what the priced micro-batches need, and its least multiple: others of the run may need far more."""


class Room:
    """Memory of a job's ranks. capacity: bytes of a rank, of which `reserve` are left alone."""

    def __init__(self, job: Job) -> None:
        self.job, self.capacity, self.reserve = job, job.cluster.capacity_bytes, reserve_bytes(job.cluster)

    def settings(self, shape: Shape, planner: str) -> list[Setting]:
        """Every ZeRO stage and checkpointing of a shape."""
        accumulation = self.job.packs_per_step // (shape.dp * shape.micro_packs)
        return [
            Setting(shape.dp, shape.topology, planner, zero, checkpointing, shape.micro_packs, accumulation,
                    self.job.dtype)
            for zero in (ZERO_STAGES if self.job.world > 1 else (0,))
            for checkpointing in CHECKPOINTING
        ]  # fmt: skip

    def at_best(self, shape: Shape) -> dict[Setting, dict[str, float]]:
        """Bytes by item of every setting, with everything even, as no planner can better it."""
        job = self.job
        most = -(-min(job.seq_len * shape.micro_packs, job.tokens) // shape.topology.num_ranks)
        arena = LEAST_ARENA * self._arena_unit(shape)
        return {setting: self._memory(setting, most, arena) for setting in self.settings(shape, "any")}

    def even(self, setting: Setting, pack_tokens: int) -> dict[str, float]:
        """Bytes by item of a setting with packs of so many tokens, everything even."""
        most = -(-pack_tokens * setting.micro_packs // setting.topology.num_ranks)
        return self._memory(setting, most, LEAST_ARENA * most * self.job.model.q_dim * setting.element_bytes)

    def holds(self, items: dict[str, float]) -> bool:
        """Whether it fits."""
        return sum(items.values()) <= self.capacity

    def planned(
        self, shape: Shape, planner: str, tokens: int, arena_bytes: int
    ) -> tuple[dict[Setting, dict[str, float]], float]:
        """Bytes by item of every setting, and the arena's multiple. tokens, arena_bytes: of the fullest rank, planned.

        There is room for other micro-batches, which may be packed full and need more of the arena.
        """
        most = max(tokens, -(-self.job.seq_len * shape.micro_packs // shape.topology.num_ranks))
        unit = self._arena_unit(shape)
        multiple = max(math.ceil(ARENA_ROOM * arena_bytes / unit * 2) / 2, LEAST_ARENA)
        return {s: self._memory(s, most, multiple * unit) for s in self.settings(shape, planner)}, multiple

    def holding(self, items: dict[Setting, dict[str, float]]) -> list[Setting]:
        """Those settings that fit."""
        return [setting for setting, each in items.items() if self.holds(each)]

    def would_hold(self) -> str:
        """Say at how many nodes, and at how long packs, SP groups as large as can be would fit; by doubling."""
        job = self.job

        def fits(nodes: int, tokens: int) -> bool:
            world = nodes * job.cluster.ranks_per_node
            ranks = min(world, MAX_RANKS)
            setting = Setting(world // ranks, Topology(ranks, 1), "any", 3 if world > 1 else 0, "full", 1, 1, job.dtype)
            return self.holds(self.even(setting, tokens))

        # As it was asked it does not fit, whatever this estimate says.
        nodes, tokens = 2 * job.num_nodes, max(job.seq_len // 2, 1)
        while not fits(nodes, job.seq_len) and 2 * nodes * job.cluster.ranks_per_node <= MAX_RANKS:
            nodes *= 2
        while not fits(job.num_nodes, tokens) and tokens > 1:
            tokens //= 2
        ways = [f"{nodes} nodes would do"] if fits(nodes, job.seq_len) else []
        ways += [f"packs of {tokens:,} tokens would do"] if fits(job.num_nodes, tokens) else []
        return ", or ".join(ways) or "neither more nodes nor shorter packs would do: it takes a cluster with more of it"

    def _memory(self, setting: Setting, tokens: int, arena: float) -> dict[str, float]:
        copies = kept_copies(self.job.model, setting)
        return rank_bytes(self.job.model, setting, tokens, arena, self.reserve, copies)

    def _arena_unit(self, shape: Shape) -> int:
        """Bytes of a rank's arena at a multiple of 1."""
        rows = -(-self.job.seq_len * shape.micro_packs // shape.topology.num_ranks)
        return rows * self.job.model.q_dim * DTYPE_BYTES[self.job.dtype]
