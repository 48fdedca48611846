"""Attention of weight shards: for each shard's heads a plan, all of them with the same rows on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hsap.ir.plan import Plan
from hsap.runtime.executor import Executor, Session
from hsap.runtime.machine import Kept


class ShardedAttention:
    """Runs a micro-batch's plans, one for each distinct share of the heads; collective over the SP group.

    variant_of: index of each shard's plan. layer_masks: of each layer in the plans' masks; None: all use the first.
    """

    def __init__(self, session: Session, variant_of: Sequence[int], layer_masks: Sequence[int] | None = None) -> None:
        self.session, self.variant_of, self.layer_masks = session, tuple(variant_of), layer_masks
        self.executors: tuple[Executor, ...] = ()

    def load(self, plans: Sequence[Plan]) -> None:
        """Use these plans from now on; they place tokens alike."""
        first = plans[0]
        for plan in plans[1:]:
            # Planners that wouldn't are refused before anything is planned (`hsap.train.tsp.planning`).
            alike = all(np.array_equal(plan.rank_spans(r), first.rank_spans(r)) for r in range(first.num_ranks))
            assert alike, "weight shards of unequal heads need one placement"
        self.executors = tuple(map(self.session.load, plans))

    def forward(self, shard: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer: int) -> tuple[Tensor, ...]:
        """Attend this rank's rows with a shard's heads: what backward needs, (q, kv, o, lse)."""
        kept = self._executor(shard).forward(q_THD, k_THD, v_THD, self._mask(layer), layer)
        return kept.q, kept.kv, kept.o, kept.lse

    def keep(self, shard: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The first two of what `forward` gives, from the same inputs and without attending."""
        return self._executor(shard).keep(q_THD, k_THD, v_THD, self._mask(layer), layer)

    def backward(
        self, shard: int, do_THD: Tensor, kept: tuple[Tensor, ...], layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (dq, dk, dv) of this rank's rows."""
        return self._executor(shard).backward(do_THD, Kept(*kept), self._mask(layer), layer)

    def _executor(self, shard: int) -> Executor:
        if not self.executors:
            raise ValueError("attention: no plans are loaded; call load(plans) before the forward pass")
        return self.executors[self.variant_of[shard]]

    def _mask(self, layer: int) -> int:
        return 0 if self.layer_masks is None else self.layer_masks[layer]
