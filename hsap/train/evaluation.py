"""Evaluation: the token loss of held-out data, whose plans are made once a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.data.batch import MicroBatch
from hsap.data.loader import eval_batches
from hsap.data.store import DocumentStore
from hsap.planning.planned import Exchange, Planned
from hsap.train.agreement import check_held_out
from hsap.train.config import TrainConfig
from hsap.train.engine import Engine
from hsap.train.metrics import ratio


class Evaluation:
    """One rank's part of it.

    exchange: makes what plans travel through, called once. loss_sum: of the token losses of this rank's rows of a
    micro-batch, by its plan.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: DocumentStore,
        engine: Engine,
        exchange: Callable[[], Exchange],
        loss_sum: Callable[[MicroBatch, Planned], Tensor],
    ) -> None:
        self.config, self.data, self.engine = config, data, engine
        self.exchange, self.loss_sum = exchange, loss_sum
        self._plans: list[Planned] | None = None

    @torch.no_grad()
    def loss(self) -> float | None:
        """Mean token loss; None if the data has no target. Collective over the job."""
        batches = eval_batches(
            self.data,
            self.config.packing,
            micro_packs=self.config.train.micro_packs,
            dp_rank=self.engine.mesh.dp_rank,
            dp_size=self.engine.mesh.dp_size,
            max_packs=self.config.train.eval_packs,
        )
        if self._plans is None:
            self._plans = self._planned(batches.micro_batches)
        check_held_out(batches.micro_batches, self._plans, self.engine.mesh, self.engine.device)
        self.engine.deepspeed.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.engine.device)
        for micro, plan in zip(batches.micro_batches, self._plans, strict=True):
            total += self.loss_sum(micro, plan)
        self.engine.deepspeed.train()
        dist.all_reduce(total)
        return ratio(float(total), batches.global_num_targets)

    def _planned(self, micro_batches: tuple[MicroBatch, ...]) -> list[Planned]:
        exchange, numbers = self.exchange(), range(len(micro_batches))
        for number, micro in zip(numbers, micro_batches):
            exchange.publish(micro, number)
        plans = [exchange.get(number) for number in numbers]
        dist.barrier(self.engine.mesh.sp)  # behind it nobody waits for one any more
        for number in numbers:
            exchange.forget(number)
        return plans
