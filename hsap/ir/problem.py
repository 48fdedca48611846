"""Problem: everything a plan depends on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace

import numpy as np

from hsap.ir.check import MAX_RANKS, Refused, instance, number, one_of, shown, whole
from hsap.ir.heads import DTYPE_BYTES, HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, Masks, SliceMask, mask_from_json, mask_slices, mask_to_json


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
                f"topology={text}: expected NxM with whole numbers N, M of at least 1, N = inter_sp and M = intra_sp: "
                "topology=4x2 gives 8 ranks, 4 in the outer layer times 2 in the inner one."
            )
        return cls(int(match[1]), int(match[2]))

    @property
    def num_ranks(self) -> int:
        return self.inter_sp * self.intra_sp

    def __str__(self) -> str:
        return f"{self.inter_sp}x{self.intra_sp}"


_RATES = (
    "intra_bytes_per_s",
    "inter_bytes_per_s",
    "flops_per_s",
    "memory_bytes_per_s",
    "attend_efficiency",
    "attend_grad_efficiency",
)
_TIMES = ("intra_latency_s", "inter_latency_s", "kernel_overhead_s", "slice_overhead_s")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines under one SP group. Rates in bytes/s one way per rank, times in seconds, FLOP/s per rank.

    num_nodes: how many there are (None: as many as needed). first_rank: place of the group's rank 0 inside its node (a
    group may start mid-node). memory_bytes_per_s: of the device's own memory, reads and writes together.
    kernel_overhead_s, slice_overhead_s: what each kernel costs however small, and each slice in it. attend_efficiency,
    attend_grad_efficiency: parts of flops_per_s that attention kernels reach on large dense slices. tile_tokens: rows
    and columns of the tiles they compute, whole ones even where a slice fills them in part.
    """

    name: str = "nodes-of-8"
    ranks_per_node: int = 8
    first_rank: int = 0
    intra_bytes_per_s: float = 250e9
    inter_bytes_per_s: float = 25e9
    intra_latency_s: float = 5e-6
    inter_latency_s: float = 10e-6
    flops_per_s: float = 200e12
    num_nodes: int | None = None
    memory_bytes_per_s: float = 1.5e12
    kernel_overhead_s: float = 5e-6
    slice_overhead_s: float = 0.1e-6
    attend_efficiency: float = 0.6
    attend_grad_efficiency: float = 0.5
    tile_tokens: int = 128

    def __post_init__(self) -> None:
        instance("cluster: name", self.name, str, "a word")
        where = f"cluster {self.name}"
        checked = {"ranks_per_node": whole(f"{where}: ranks_per_node", self.ranks_per_node)}
        checked["first_rank"] = whole(
            f"{where}: first_rank, a place inside a node,", self.first_rank, 0, checked["ranks_per_node"] - 1
        )
        checked["tile_tokens"] = whole(f"{where}: tile_tokens", self.tile_tokens)
        for name in _RATES:
            checked[name] = number(f"{where}: {name}", getattr(self, name))
        for name in _TIMES:
            checked[name] = number(f"{where}: {name}", getattr(self, name), zero=True)
        if self.num_nodes is not None:
            checked["num_nodes"] = whole(f"{where}: num_nodes (None for no limit)", self.num_nodes)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def preset(cls, name: str, nodes: int | None = None) -> Cluster:
        """Give a cluster by name, of `nodes` nodes (None: as many as needed)."""
        return replace(PRESETS[one_of("cluster: unknown preset", name, PRESETS)], num_nodes=nodes)

    def starting_at(self, rank: int, ranks_per_node: int | None = None) -> Cluster:
        """The same machines for an SP group whose rank 0 is the job's rank `rank`; optionally another node size."""
        per_node = ranks_per_node or self.ranks_per_node
        return replace(self, ranks_per_node=per_node, first_rank=rank % per_node)

    def node_of(self, num_ranks: int) -> np.ndarray:
        """Node index of each rank: int64 [num_ranks]."""
        return (self.first_rank + np.arange(num_ranks)) // self.ranks_per_node


PRESETS = {
    "dgx-a100": Cluster("dgx-a100", 8, 0, 300e9, 25e9, 5e-6, 10e-6, 312e12, None, 2.0e12, 5e-6, 0.1e-6, 0.65, 0.55),
    "hgx-h100": Cluster("hgx-h100", 8, 0, 450e9, 50e9, 5e-6, 10e-6, 989e12, None, 3.35e12, 5e-6, 0.1e-6, 0.6, 0.5),
    "cpu-gloo": Cluster(
        "cpu-gloo", 1 << 20, 0, 2.5e9, 2.5e9, 40e-6, 40e-6, 30e9, None, 10e9, 50e-6, 2e-6, 0.8, 0.6, 64
    ),
}
"""Data-sheet figures (NVLink and network one way per GPU, dense bf16, memory); `cpu-gloo` is one host, loopback.

Overheads, efficiencies and tiles are assumptions: round figures near what is published for FlashAttention on these
devices, not measured by us.
"""


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
                f"cluster {self.cluster.name} has {self.cluster.num_nodes}; use fewer ranks or more nodes"
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


def arena_capacity(problem: Problem, tokens_per_rank: int) -> int:
    """Bytes of the arena (HSAP §3.4): arena_multiple × tokens × heads × dim of the largest shard's q."""
    tokens = problem.max_tokens_per_rank or tokens_per_rank
    q_bytes = tokens * problem.heads.num_q_heads * problem.heads.head_dim * DTYPE_BYTES[problem.heads.dtype]
    return int(problem.arena_multiple * q_bytes)


def problem_to_json(problem: Problem) -> dict:
    """Give a problem as JSON values."""
    return {
        "lengths": list(problem.layout.lengths),
        "sequences": list(problem.layout.sequences),
        "masks": [[mask_to_json(mask), layers] for mask, layers in problem.masks],
        "heads": {f.name: getattr(problem.heads, f.name) for f in fields(HeadShape)},
        "topology": str(problem.topology),
        "cluster": {f.name: getattr(problem.cluster, f.name) for f in fields(Cluster)},
        "max_tokens_per_rank": problem.max_tokens_per_rank,
        "arena_multiple": problem.arena_multiple,
        "wire_dtype": problem.wire_dtype,
    }


def problem_from_json(data: dict) -> Problem:
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
    return tuple((mask_from_json(mask), whole("problem: num_layers of a mask", layers)) for mask, layers in masks)


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], Mask | str | list | tuple)


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
