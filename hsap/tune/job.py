"""Job: what is to be trained on what, and the packs of its steps as training itself would make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hsap.data.packing import Pack, Packing, PackStream, deal_by_weight, pack_weight
from hsap.ir.check import MAX_TOKENS, Refused, whole
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, Masks, distinct_masks, mask_slices
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.slice import Q0, area
from hsap.models.config import ModelConfig

WIRE_DTYPE = "fp32"
"""Partial results on the network, as configs/config.yaml has it."""


MAX_WORLD, MAX_PACKS = 1 << 17, 1 << 20
"""Most ranks, and packs of a step, whose ways of running are listed."""


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Packs as columns: areas, float64 [n], visible pairs of attention, the mean over the model's layers; tokens and
    documents, int64 [n]."""

    areas: np.ndarray
    tokens: np.ndarray
    documents: np.ndarray


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
    seed: int = 0

    def __post_init__(self) -> None:
        whole("seq_len", self.seq_len)
        whole("packs_per_step", self.packs_per_step)
        whole("cluster.num_nodes", self.cluster.num_nodes)
        if self.world > MAX_WORLD:
            raise Refused(f"{self.world} ranks are more than the {MAX_WORLD} that are searched; use fewer nodes")

    @property
    def world(self) -> int:
        return self.num_nodes * self.cluster.ranks_per_node

    @property
    def num_nodes(self) -> int:
        assert self.cluster.num_nodes is not None, "checked when the job was made"
        return self.cluster.num_nodes

    @property
    def heads(self) -> HeadShape:
        return HeadShape(self.model.num_q_heads, self.model.num_kv_heads, self.model.head_dim, self.dtype)

    @cached_property
    def masks(self) -> tuple[tuple[Mask, int], ...]:
        """The model's masks as `Problem.masks`."""
        return distinct_masks(self.model.layer_masks)[0]

    @cached_property
    def packs(self) -> tuple[Pack, ...]:
        """The packs of the first step."""
        return next(PackStream(self.lengths, Packing(self.seq_len), self.packs_per_step, self.seed)).packs

    @cached_property
    def loads(self) -> Loads:
        """What each of `packs` is to attention and to the rest."""
        number = {pack: i for i, pack in enumerate(dict.fromkeys(self.packs))}
        documents = np.array([len(pack) for pack in number], np.int64)
        lengths = np.array([piece.num_tokens for pack in number for piece in pack], np.int64)
        tokens = np.add.reduceat(lengths, np.cumsum(documents) - documents)
        layers = [count for _, count in self.masks]
        areas = np.average([_areas(lengths, documents, mask) for mask, _ in self.masks], axis=0, weights=layers)
        which = np.array([number[pack] for pack in self.packs])
        return Loads(areas[which], tokens[which], documents[which])

    @cached_property
    def tokens(self) -> int:
        """Tokens of a step."""
        return int(self.loads.tokens.sum())

    @property
    def flops(self) -> float:
        """Model FLOPs of a step: 6 per weight and token, and attention's by the pairs that documents really show."""
        return self.model.train_flops(self.tokens, float(self.loads.areas.sum()))

    def layout(self, packs: Sequence[Pack]) -> Layout:
        """A micro-batch's documents."""
        return Layout.from_lengths([p.num_tokens for pack in packs for p in pack], [len(pack) for pack in packs])

    def dealt(self, dp: int, micro_packs: int) -> np.ndarray:
        """The micro-batches of every SP group: indices of `packs`, int64 [dp, num_micro_steps, micro_packs]."""
        return deal_by_weight(self._weights, dp, micro_packs)

    @cached_property
    def _weights(self) -> list[int]:
        """What packs are dealt by, which is training's own estimate of their attention."""
        return [pack_weight(pack) for pack in self.packs]

    def problem(self, packs: Sequence[Pack], topology: Topology, arena_multiple: float | None = None) -> Problem:
        """What a planner is asked for a micro-batch."""
        cluster = replace(self.cluster, first_rank=0)
        return Problem(self.layout(packs), self.heads, topology, self.masks, cluster, None, arena_multiple, WIRE_DTYPE)


def packs_per_step(global_batch_tokens: int, seq_len: int) -> int:
    """Packs that a step of so many tokens has; ValueError where not even one fits."""
    if global_batch_tokens < seq_len:
        raise Refused(
            f"global_batch_tokens={global_batch_tokens}: a step has less than one pack of seq_len={seq_len} tokens; "
            "raise the first or lower the second"
        )
    if global_batch_tokens // seq_len > MAX_PACKS:
        raise Refused(
            f"global_batch_tokens={global_batch_tokens}: more than {MAX_PACKS} packs of seq_len={seq_len} tokens in a "
            "step; lower the first or raise the second"
        )
    return global_batch_tokens // seq_len


def _areas(lengths: np.ndarray, documents: np.ndarray, mask: Masks) -> np.ndarray:
    """Visible pairs of packs, as many at once as a layout may hold: int64 [n]. documents: of each pack."""
    borders, ends = np.append(0, np.cumsum(documents)), np.append(0, np.cumsum(lengths))
    out, first = np.zeros(len(documents), np.int64), 0
    while first < len(documents):
        last = int(np.searchsorted(ends[borders], ends[borders[first]] + MAX_TOKENS, side="right")) - 1
        own = lengths[borders[first] : borders[last]]
        table = mask_slices(Layout.from_lengths(own.tolist()), mask)
        starts = ends[borders[first:last]] - ends[borders[first]]
        pack = np.searchsorted(starts, table[:, Q0], side="right") - 1
        np.add.at(out, first + pack, area(table))
        first = last
    return out
