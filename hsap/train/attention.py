"""Attention: one rank's part of it in a run: who makes micro-batches' plans, and what the model calls with them.

How a model's heads are planned is one of two values with the same methods: `WholeHeads`, and `ShardedHeads` of
`hsap.train.tsp.planning`. Nothing else in the loop knows which of them a run has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import distinct_masks
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology, arena_capacity
from hsap.models import ModelConfig
from hsap.planning.compiling import PlanningSetup
from hsap.planning.exchange import PlanExchange
from hsap.planning.planned import Exchange, Planned
from hsap.planning.pool import PlanPool
from hsap.position import Position
from hsap.runtime.attention import PlannedAttention
from hsap.runtime.executor import Session
from hsap.runtime.groups import Mesh, job_store
from hsap.runtime.kernels import partial_output
from hsap.runtime.memory import TORCH_DTYPES
from hsap.runtime.ranges import Nvtx
from hsap.train.config import TrainConfig
from hsap.train.tsp.planning import ShardedHeads


@dataclass(frozen=True, slots=True)
class WholeHeads:
    """Sequence parallelism: all heads together, a micro-batch has one plan. setups: how it is planned."""

    setups: tuple[PlanningSetup]

    def attention(self, session: Session, layer_masks: Sequence[int]) -> PlannedAttention:
        """Make what the model calls."""
        return PlannedAttention(layer_masks)

    def joined(self, exchanges: Sequence[PlanExchange]) -> PlanExchange:
        """Give what a micro-batch's plan travels through; exchanges: of each setup."""
        return exchanges[0]

    def load(self, attention: PlannedAttention, session: Session, plan: Plan, num_rows: int) -> None:
        """Use a micro-batch's plan from now on, for tensors of so many rows."""
        attention.load(session.load(plan), num_rows)


def planned_heads(config: TrainConfig, model: ModelConfig, dp_rank: int) -> WholeHeads | ShardedHeads:
    """Choose how a run's heads are planned; ValueError where its planner can't."""
    setup = planning_setup(config, model, dp_rank)
    return WholeHeads((setup,)) if config.parallel == "sp" else ShardedHeads.of(setup, model, config.tsp_degree)


def planning_setup(config: TrainConfig, model: ModelConfig, dp_rank: int) -> PlanningSetup:
    """Everything of a micro-batch's problem but its layout."""
    heads = HeadShape(model.num_q_heads, model.num_kv_heads, model.head_dim, config.engine.dtype)
    topology = Topology(config.inter_sp, config.intra_sp)
    problem = Problem(
        Layout.from_lengths([]),
        heads,
        topology,
        distinct_masks(model.layer_masks)[0],
        config.cluster.starting_at(dp_rank * topology.num_ranks),
        None,
        config.arena_multiple,
        config.wire_dtype,
    )
    return PlanningSetup(problem, config.planner.name, dict(config.planner.options), config.verify)


def kernel_options(config: TrainConfig) -> dict:
    """What the attention kernel is asked for beside device, dtype and head dimension."""
    return {"output": partial_output(config.engine.device or "cpu"), "deterministic": config.deterministic_backward}


class Attention:
    """One rank's attention. Made collectively over the job.

    module: what the model calls. session: what runs plans, noting in position which instruction it is at.
    even_tokens: a rank's rows of the largest micro-batch there can be, dealt evenly; the arena is
    allocated for it, once (HSAP §3.4): memory then doesn't jitter with the packs.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: ModelConfig,
        mesh: Mesh,
        device: torch.device,
        even_tokens: int,
        position: Position,
    ) -> None:
        self.mesh = mesh
        self.heads: Any = planned_heads(config, model, mesh.dp_rank)
        dtype = TORCH_DTYPES[config.engine.dtype]
        self.session = Session(mesh.sp, config.kernel, device, dtype, **kernel_options(config))
        self.session.position = position
        self.session.ranges = Nvtx() if config.profile.nvtx else None
        self.session.arena.reserve(max(arena_capacity(setup.problem, even_tokens) for setup in self.heads.setups))
        self.module = self.heads.attention(self.session, distinct_masks(model.layer_masks)[1])
        # Before anything is trained: the processes load their code meanwhile.
        workers = config.data.workers
        self._pools = [PlanPool(setup, workers) if workers else None for setup in self.heads.setups]

    def exchange(self, use: str) -> Exchange:
        """Make what plans travel through, for a use of them with that name."""
        mesh, num_ranks = self.mesh, self.mesh.topology.num_ranks
        store, position = job_store() if num_ranks > 1 else None, self.session.position
        exchanges = [
            PlanExchange(store, f"{use}/{mesh.dp_rank}/{variant}", mesh.sp_rank, num_ranks, setup, pool, position)
            for variant, (setup, pool) in enumerate(zip(self.heads.setups, self._pools))
        ]
        return self.heads.joined(exchanges)

    def load(self, plan: Planned, num_rows: int) -> None:
        """Use what an exchange gave for a micro-batch from now on, for tensors of so many rows."""
        self.heads.load(self.module, self.session, plan, num_rows)

    def close(self) -> None:
        """End the processes that plan."""
        for pool in filter(None, self._pools):
            pool.close()
