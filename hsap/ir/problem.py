"""Problem: everything a plan depends on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from hsap.ir.check import (
    MAX_ELEMENTS,
    MAX_LAYERS,
    MAX_RANKS,
    MAX_SLICES,
    Refused,
    instance,
    number,
    one_line,
    one_of,
    shown,
    whole,
)
from hsap.ir.cluster import Cluster as Cluster
from hsap.ir.heads import DTYPE_BYTES, HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, Masks, SliceMask, mask_from_json, mask_slices, mask_to_json, most_slices


@dataclass(frozen=True, slots=True)
class Topology:
    """Shape of a sequence-parallel group: inter_sp × intra_sp ranks, rank = inter_index · intra_sp + intra_index."""

    inter_sp: int
    intra_sp: int

    def __post_init__(self) -> None:
        for name in ("inter_sp", "intra_sp"):
            object.__setattr__(self, name, whole(f"topology: {name}", getattr(self, name), 1, MAX_RANKS))
        whole(f"topology: the number of ranks of {self}", self.num_ranks, 1, MAX_RANKS)

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read `4x2`: 4 InterSP by 2 IntraSP."""
        match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text) if isinstance(text, str) else None
        if not match:
            raise Refused(
                f"topology={one_line(text)}: expected NxM with whole numbers N, M of at least 1, N = inter_sp and M = "
                "intra_sp: topology=4x2 gives 8 ranks, 4 in the outer layer times 2 in the inner one."
            )
        return cls(int(match[1]), int(match[2]))

    @property
    def num_ranks(self) -> int:
        return self.inter_sp * self.intra_sp

    def __str__(self) -> str:
        return f"{self.inter_sp}x{self.intra_sp}"


@dataclass(frozen=True, slots=True)
class Problem:
    """Source program of the compiler: a packed batch, its masks, heads, and the ranks to run on.

    masks: the model's distinct masks as (mask, num_layers); a mask is one `Mask`, its text, or a list of these with one
    per document; see `Mask.of` for masks of a user's own. `parse_masks` reads them from one line.
    max_tokens_per_rank: capacity that no rank's shard may exceed (None: no limit but what the planner chooses).
    arena_multiple: communication buffer of a rank in units of its largest shard's q tensor (None: what the plan needs).
    wire_dtype: dtype of partial outputs and gradients on the network (None: the dtype of q).
    """

    layout: Layout
    heads: HeadShape
    topology: Topology
    masks: tuple[tuple[Masks, int], ...] = ((Mask(), 1),)
    cluster: Cluster = field(default_factory=Cluster)
    max_tokens_per_rank: int | None = None
    arena_multiple: float | None = None
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("layout", Layout), ("heads", HeadShape), ("topology", Topology), ("cluster", Cluster)):
            instance(f"problem: {name}", getattr(self, name), kind, f"a {kind.__name__}")
        object.__setattr__(self, "masks", _as_pairs(self.masks))
        for mask, _ in self.masks:
            _check_documents(mask, self.layout)
        _check_size(self)
        if self.max_tokens_per_rank is not None:
            limit = whole("problem: max_tokens_per_rank (None for no limit)", self.max_tokens_per_rank)
            object.__setattr__(self, "max_tokens_per_rank", limit)
        if self.arena_multiple is not None:
            multiple = number("problem: arena_multiple (None for what the plan needs)", self.arena_multiple)
            object.__setattr__(self, "arena_multiple", multiple)
        if self.wire_dtype is not None:
            one_of("problem: unknown wire_dtype", self.wire_dtype, DTYPE_BYTES)
        self.heads.shares(self.topology.intra_sp)
        nodes = (self.cluster.first_rank + self.num_ranks - 1) // self.cluster.ranks_per_node + 1
        if self.cluster.num_nodes is not None and nodes > self.cluster.num_nodes:
            raise Refused(
                f"problem: topology {self.topology} spreads over {nodes} nodes of {self.cluster.ranks_per_node} ranks, "
                f"cluster {one_line(self.cluster.name)} has {self.cluster.num_nodes}; use fewer ranks or more nodes"
            )

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def node_of(self) -> np.ndarray:
        """Node index of each rank: int64 [num_ranks]."""
        return self.cluster.node_of(self.num_ranks)

    def slices(self, mask: int) -> np.ndarray:
        """Slices of the mask with that index over the whole batch: int64 [n, 6], canonical."""
        return mask_slices(self.layout, self.masks[mask][0])


MAX_ARENA = 1 << 62
"""No buffer ends beyond so many bytes, so that a larger arena, or an infinite one, is the same."""


def arena_capacity(problem: Problem, tokens_per_rank: int) -> int:
    """Bytes of the arena (HSAP §3.4): arena_multiple × tokens × heads × dim of the largest shard's q."""
    tokens = problem.max_tokens_per_rank or tokens_per_rank
    q_bytes = tokens * problem.heads.num_q_heads * problem.heads.head_dim * DTYPE_BYTES[problem.heads.dtype]
    return MAX_ARENA if problem.arena_multiple is None else int(min(problem.arena_multiple * q_bytes, MAX_ARENA))


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """Give a problem as JSON values."""
    return {
        "lengths": list(problem.layout.lengths),
        "sequences": list(problem.layout.sequences),
        "masks": [[mask_to_json(mask), layers] for mask, layers in problem.masks],
        "heads": {f.name: getattr(problem.heads, f.name) for f in fields(HeadShape)},
        "topology": str(problem.topology),
        "cluster": problem.cluster.to_json(),
        "max_tokens_per_rank": problem.max_tokens_per_rank,
        "arena_multiple": problem.arena_multiple,
        "wire_dtype": problem.wire_dtype,
    }


def problem_from_json(data: dict[str, Any]) -> Problem:
    """Read what `problem_to_json` gives."""
    return Problem(
        Layout(data["lengths"], data["sequences"]),
        HeadShape(**data["heads"]),
        Topology.parse(data["topology"]),
        data["masks"],
        Cluster(**data["cluster"]),
        data["max_tokens_per_rank"],
        data["arena_multiple"],
        data["wire_dtype"],
    )


def _as_pairs(masks: object) -> tuple[tuple[Masks, int], ...]:
    """Read (mask, num_layers) pairs."""
    if not isinstance(masks, list | tuple) or not masks or not all(_is_pair(pair) for pair in masks):
        raise Refused(
            f"problem: masks is {shown(masks)}; give (mask, num_layers) pairs, at least one, as in "
            "(('causal', 24), ('window:4096', 8)); a mask is a Mask, its text, or a list of these, one per document"
        )
    return tuple(
        (mask_from_json(mask), whole("problem: num_layers of a mask", layers, 1, MAX_LAYERS)) for mask, layers in masks
    )


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], Mask | str | list | tuple)


def _check_size(problem: Problem) -> None:
    """Refuse what would need tables, or sums of bytes, beyond `MAX_SLICES` and `MAX_ELEMENTS`."""
    num_slices = sum(most_slices(problem.layout, mask) for mask, _ in problem.masks)
    if num_slices > MAX_SLICES:
        raise Refused(
            f"problem: the masks cut {problem.layout.num_documents} documents into as many as {num_slices} slices, "
            f"{MAX_SLICES} are the limit; give masks of larger blocks, or fewer documents"
        )
    heads = problem.heads
    elements = problem.layout.num_tokens * heads.num_q_heads * (heads.head_dim + 2) * problem.num_ranks
    if elements > MAX_ELEMENTS:
        raise Refused(
            f"problem: {problem.layout.num_tokens} tokens of {heads.num_q_heads} heads of {heads.head_dim} elements on "
            f"{problem.num_ranks} ranks are more than 2^{MAX_ELEMENTS.bit_length() - 1} elements where every rank has "
            "all of them; use fewer ranks, or a smaller batch"
        )


def _check_documents(masks: Masks, layout: Layout) -> None:
    """Refuse masks that aren't made for the layout's documents."""
    if isinstance(masks, Mask):
        return
    if len(masks) != layout.num_documents:
        raise Refused(
            f"problem: {len(masks)} masks for {layout.num_documents} documents; give one mask, or one per document"
        )
    for document, (mask, length) in enumerate(zip(masks, layout.lengths, strict=True)):
        if isinstance(mask, SliceMask) and mask.num_tokens != length:
            raise Refused(
                f"problem: document {document} has {length} tokens, its mask {mask.name} is for {mask.num_tokens}; "
                "make masks by Mask.of for the layout that they are used with"
            )
