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
from hsap.models.tsp.shards import Shards
from hsap.planners import PLANNERS
from hsap.planning.compiling import PlanFigures, PlanningSetup
from hsap.planning.exchange import PlanExchange
from hsap.train.config import TrainConfig

PLACING_WITHOUT_HEADS = tuple(name for name, planner in PLANNERS.items() if not planner.places_by_heads)
"""Planners whose plans for unequal shares of the heads agree on every rank's rows."""


@dataclass(frozen=True, slots=True)
class Variants:
    """The distinct head shares of a model's weight shards. setups: how each is planned; of_shard: each shard's own."""

    setups: tuple[PlanningSetup, ...]
    of_shard: tuple[int, ...]

    @classmethod
    def of(cls, setup: PlanningSetup, model: ModelConfig, config: TrainConfig) -> Variants:
        """Make the setups from that of sequence parallelism, which has all heads.

        Without TSP that one is all. With it, a group's ranks all take part at Nx1: heads are the weight shards' to
        share out. ValueError: shares that can't be, or unequal ones with a planner that would place tokens otherwise
        for each.
        """
        if config.parallel == "sp":
            return cls((setup,), (0,))
        shares = [(run.q_count, run.kv_count) for run in Shards(model, config.tsp_degree).heads]
        distinct = tuple(dict.fromkeys(shares))
        if len(distinct) > 1 and setup.planner not in PLACING_WITHOUT_HEADS:
            raise ValueError(
                f"planner={setup.planner} places tokens by heads, and parallel=tsp shards {model.num_q_heads} "
                f"query and {model.num_kv_heads} KV heads unequally over {config.tsp_degree} ranks; its plans wouldn't "
                f"agree: set planner to one of {', '.join(PLACING_WITHOUT_HEADS)}, or tsp_axis or topology to "
                "a degree that divides the heads"
            )
        problem = replace(setup.problem, topology=Topology(setup.problem.num_ranks, 1))
        setups = (
            replace(setup, problem=replace(problem, heads=HeadShape(*share, model.head_dim, setup.problem.heads.dtype)))
            for share in distinct
        )
        return cls(tuple(setups), tuple(map(distinct.index, shares)))


@dataclass(frozen=True, slots=True, eq=False)
class ShardPlans:
    """A micro-batch's plans, one for each variant; they place tokens alike, so rows are the first one's."""

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
    """Publishes and fetches the plans of all variants, each through an exchange of its own, as `PlanExchange` does."""

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
