"""Plans of weight shards: the problem with the heads of one shard, once for each distinct share."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hsap.data.batch import MicroBatch
from hsap.ir.heads import HeadShape
from hsap.ir.plan import Plan
from hsap.ir.problem import Topology
from hsap.models import ModelConfig
from hsap.models.tsp.shards import WeightShards
from hsap.planners import PLANNERS
from hsap.planning.compiling import PlanFigures, PlanningSetup
from hsap.planning.exchange import PlanExchange
from hsap.runtime.executor import Session
from hsap.runtime.sharded import ShardedAttention

PLACING_WITHOUT_HEADS = tuple(name for name, planner in PLANNERS.items() if not planner.places_by_heads)
"""Planners whose plans for unequal shares of the heads agree on every rank's rows."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlans:
    """A micro-batch's plans, one for each distinct share of the heads; they place tokens alike."""

    plans: tuple[Plan, ...]

    def rank_spans(self, rank: int) -> np.ndarray:
        """Spans of token positions on a rank."""
        return self.plans[0].rank_spans(rank)

    @property
    def hash(self) -> str:
        """Of all plans."""
        return hashlib.sha256("".join(plan.hash for plan in self.plans).encode()).hexdigest()

    @property
    def planner(self) -> str:
        """Of the first plan: the largest share's."""
        return self.plans[0].planner

    @property
    def choice(self) -> dict | None:
        """Of the first plan."""
        return self.plans[0].choice


class ShardExchange:
    """Publishes and fetches all shares' plans, each through an exchange of its own, as `PlanExchange` does."""

    def __init__(self, exchanges: Sequence[PlanExchange], of_shard: Sequence[int]) -> None:
        self.exchanges, self.rank = tuple(exchanges), exchanges[0].rank
        self.uses = [list(of_shard).count(variant) for variant in range(len(exchanges))]
        self.closed = threading.Event()
        for exchange in exchanges:
            exchange.closed = self.closed

    def publish(self, batch: MicroBatch, number: int) -> None:
        """Have a micro-batch's plans made, where it's this rank's turn."""
        for exchange in self.exchanges:
            exchange.publish(batch, number)

    def get(self, number: int) -> ShardPlans:
        """Plans of a micro-batch that went through `publish`."""
        return self.get_both(number)[0]

    def get_both(self, number: int) -> tuple[ShardPlans, PlanFigures]:
        """Plans of a micro-batch, and their figures: bytes over all shards, areas and tokens the pack's own."""
        plans, figures = zip(*(exchange.get_both(number) for exchange in self.exchanges), strict=True)
        sums = {
            name: sum(uses * getattr(one, name) for uses, one in zip(self.uses, figures, strict=True))
            for name in ("intra_node_bytes", "inter_node_bytes")
        }
        return ShardPlans(plans), replace(figures[0], **sums)

    def forget(self, number: int) -> None:
        """Drop what was published for a micro-batch whose step every rank has begun."""
        for exchange in self.exchanges:
            exchange.forget(number)


@dataclass(frozen=True, slots=True)
class ShardedHeads:
    """Heads shared out over a model's weight shards: each distinct share has a plan of its own.

    setups: how each is planned; of_shard: which of them is each shard's.
    """

    setups: tuple[PlanningSetup, ...]
    of_shard: tuple[int, ...]

    @classmethod
    def of(cls, setup: PlanningSetup, model: ModelConfig, degree: int) -> ShardedHeads:
        """Make the setups from that of sequence parallelism, which has all heads. degree: of the weight shards.

        A group's ranks all take part at Nx1: heads are the weight shards' to share out. ValueError: shares that can't
        be, or unequal ones with a planner that would place tokens otherwise for each.
        """
        shares = [(run.q_count, run.kv_count) for run in WeightShards(model, degree).heads]
        distinct = tuple(dict.fromkeys(shares))
        if len(distinct) > 1 and setup.planner not in PLACING_WITHOUT_HEADS:
            raise ValueError(
                f"planner={setup.planner} places tokens by heads, and parallel=tsp shards {model.num_q_heads} "
                f"query and {model.num_kv_heads} KV heads unequally over {degree} ranks; its plans wouldn't "
                f"agree: set planner to one of {', '.join(PLACING_WITHOUT_HEADS)}, or tsp_axis or topology to "
                "a degree that divides the heads"
            )
        problem = replace(setup.problem, topology=Topology(setup.problem.num_ranks, 1))
        setups = (
            replace(setup, problem=replace(problem, heads=HeadShape(*share, model.head_dim, setup.problem.heads.dtype)))
            for share in distinct
        )
        return cls(tuple(setups), tuple(map(distinct.index, shares)))

    def attention(self, session: Session, layer_masks: Sequence[int]) -> ShardedAttention:
        """Make what the model calls."""
        return ShardedAttention(session, self.of_shard, layer_masks)

    def joined(self, exchanges: Sequence[PlanExchange]) -> ShardExchange:
        """Give what a micro-batch's plans travel through; exchanges: of each setup."""
        return ShardExchange(exchanges, self.of_shard)

    def load(self, attention: ShardedAttention, session: Session, plans: ShardPlans, num_rows: int) -> None:
        """Use a micro-batch's plans from now on; rows are never padded."""
        attention.load(plans.plans)
