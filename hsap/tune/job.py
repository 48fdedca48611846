"""Job: what is to be trained on what, and the packs of its steps as training itself would make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hsap.data.packing import Pack, Packing, PackStream, deal_all
from hsap.ir.check import Refused, whole
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import distinct_masks, mask_slices
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.slice import area
from hsap.models.config import ModelConfig

WIRE_DTYPE = "fp32"
"""Partial results on the network, as configs/config.yaml has it."""


MAX_WORLD, MAX_PACKS = 1 << 17, 1 << 20
"""Most ranks, and packs of a step, whose ways of running are listed."""


@dataclass(frozen=True)
class Job:
    """A model, a corpus and a number of machines.

    cluster: with num_nodes. lengths: tokens of each document of the corpus. seq_len: tokens of a pack. packs_per_step:
    packs of one optimizer step. ValueError: settings that can't work, and a corpus without a token.
    """

    name: str
    model: ModelConfig
    cluster: Cluster
    lengths: tuple[int, ...]
    seq_len: int
    packs_per_step: int
    dtype: str = "bf16"
    seed: int = 1234

    def __post_init__(self) -> None:
        whole("--seq-len", self.seq_len)
        whole("the packs of a step", self.packs_per_step)
        whole("the cluster's number of nodes", self.cluster.num_nodes)
        if self.world > MAX_WORLD:
            raise Refused(f"{self.world} ranks are more than the {MAX_WORLD} that are searched; use fewer nodes")

    @property
    def world(self) -> int:
        return self.cluster.num_nodes * self.cluster.ranks_per_node

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.model.num_q_heads, self.model.num_kv_heads, self.model.head_dim, self.dtype)

    @cached_property
    def masks(self):
        """The model's masks as `Problem.masks`."""
        return distinct_masks(self.model.layer_masks)[0]

    @cached_property
    def packs(self) -> tuple[Pack, ...]:
        """The packs of the first step."""
        return next(PackStream(self.lengths, Packing(self.seq_len), self.packs_per_step, self.seed)).packs

    @cached_property
    def areas(self) -> dict[Pack, float]:
        """Visible pairs of each pack's attention, the mean over the model's layers."""
        return {pack: self.area(self.layout([pack])) for pack in set(self.packs)}

    def area(self, layout: Layout) -> float:
        """Visible pairs of a batch, the mean over the model's layers."""
        layers = [count for _, count in self.masks]
        return float(np.average([area(mask_slices(layout, mask)).sum() for mask, _ in self.masks], weights=layers))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return sum(piece.num_tokens for pack in self.packs for piece in pack)

    @property
    def flops(self) -> float:
        """Model FLOPs of a step: 6 per weight and token, and attention's by the pairs that documents really show."""
        return self.model.train_flops(self.tokens, sum(self.areas[pack] for pack in self.packs))

    def layout(self, packs: Sequence[Pack]) -> Layout:
        """A micro-batch's documents."""
        return Layout.from_lengths([p.num_tokens for pack in packs for p in pack], [len(pack) for pack in packs])

    def dealt(self, dp: int, micro_packs: int) -> list[list[tuple[Pack, ...]]]:
        """The micro-batches of every SP group."""
        return [[tuple(micro) for micro in group] for group in deal_all(self.packs, dp, micro_packs)]

    def problem(self, packs: Sequence[Pack], topology: Topology, arena_multiple: float | None = None) -> Problem:
        """What a planner is asked for a micro-batch."""
        cluster = replace(self.cluster, first_rank=0)
        return Problem(self.layout(packs), self.heads, topology, self.masks, cluster, None, arena_multiple, WIRE_DTYPE)


def packs_per_step(global_batch_tokens: int, seq_len: int) -> int:
    """Packs that a step of so many tokens has; ValueError where not even one fits."""
    if global_batch_tokens < seq_len:
        raise Refused(
            f"--global-batch-tokens {global_batch_tokens}: a step has less than one pack of --seq-len {seq_len} "
            "tokens; raise the first or lower the second"
        )
    if global_batch_tokens // seq_len > MAX_PACKS:
        raise Refused(
            f"--global-batch-tokens {global_batch_tokens}: more than {MAX_PACKS} packs of --seq-len {seq_len} tokens "
            "in a step; lower the first or raise the second"
        )
    return global_batch_tokens // seq_len
