"""Cluster: the machines under one SP group, as the figures that simulator and planners reckon with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from hsap.ir.check import Refused, number, one_line, shown, whole

_RATES = (
    "intra_bytes_per_s",
    "inter_bytes_per_s",
    "flops_per_s",
    "memory_bytes_per_s",
)
_TIMES = ("intra_latency_s", "inter_latency_s", "kernel_overhead_s", "slice_overhead_s", "message_overhead_s")
_OPTIONAL_COUNTS = ("num_nodes", "num_nics", "num_units", "diagonal_tokens", "narrow_tokens")
BOUNDLESS = 1 << 20
"""ranks_per_node of a host that runs as many ranks as one wants, and cores where each of them has its own.

The largest there is: its square is in int64."""
_LEAST, _MOST, _LONGEST_S = 1e-6, 1e30, 1e7
"""Rates and capacities lie between the first two, times up to the third: with others no sum of times is a number."""
_OPTIONAL = {
    "merge_bytes_per_s": (_LEAST, _MOST),
    "exchange_bytes_per_s": (_LEAST, _MOST),
    "attend_bytes_per_s": (_LEAST, _MOST),
    "attend_grad_bytes_per_s": (_LEAST, _MOST),
    "cores": (1e-3, _LONGEST_S),
    "grad_slice_overhead_s": (0.0, _LONGEST_S),
}
_PLAIN = 15
"""Fields that a stored plan always has; it has the later ones where they aren't the default."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines under one SP group. Rates in bytes/s one way, times in seconds, FLOP/s per rank.

    ranks_per_node: ranks that share a node's fast links. first_rank: place of the group's rank 0 inside its node (a
    group may start mid-node). num_nodes: how many there are (None: as many as needed). capacity_bytes: memory of a
    rank's device.

    Links. intra_bytes_per_s, intra_latency_s: of a rank inside its node. inter_bytes_per_s, inter_latency_s: of a
    network card. num_nics: cards of a node, each shared by as many neighbouring ranks (None: every rank has its own).
    duplex: rate of both directions together over that of one, from 1 (they share) to 2 (they don't meet).
    message_overhead_s: what either end of a message costs its compute stream.

    Kernels. attend_efficiency, attend_grad_efficiency: parts of flops_per_s that attention kernels reach on large dense
    slices. rows_efficiency: (query rows, part of that efficiency) points between which it falls for slices of few rows.
    tile_tokens: rows and columns of the tiles that are computed whole; diagonal_tokens: the same along a causal edge
    (None: tile_tokens). num_units: processors of a device that tiles of rows are dealt to (None: it is always full).
    narrow_tokens: kernels know rectangles and causal squares only; other slices are cut into these, and bands of fewer
    diagonals into strips with a mask (None: every slice is one piece). kernel_overhead_s: what each kernel costs
    however small; slice_overhead_s, grad_slice_overhead_s: and each piece in it, forward and backward (None: as
    forward). memory_bytes_per_s: of the device's own memory, reads and writes together; merge_bytes_per_s: the same
    where a partial output is merged; exchange_bytes_per_s: where an AllToAll reorders; attend_bytes_per_s,
    attend_grad_bytes_per_s: where a kernel's result is folded into accumulators (None: as memory).

    Sharing. comm_share: part of a device that communication takes from compute while a round is in progress on its
    rank, waiting included. cores: processor cores of a host that a node's ranks share (None: ranks compute on devices,
    each on its own); comm_cores: cores that either end of a message keeps busy while its bytes flow.
    """

    preset: ClassVar[Callable[..., Cluster]]
    """`hsap.clusters.read`, bound there: a value of ir knows no files."""

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
    capacity_bytes: float = 80e9
    num_nics: int | None = None
    duplex: float = 2.0
    message_overhead_s: float = 0.0
    rows_efficiency: tuple[tuple[int, float], ...] = ()
    diagonal_tokens: int | None = None
    num_units: int | None = None
    narrow_tokens: int | None = None
    grad_slice_overhead_s: float | None = None
    merge_bytes_per_s: float | None = None
    exchange_bytes_per_s: float | None = None
    attend_bytes_per_s: float | None = None
    attend_grad_bytes_per_s: float | None = None
    comm_share: float = 0.0
    cores: float | None = None
    comm_cores: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise Refused(f"cluster: name is {shown(self.name)}; give a word")
        where = f"cluster {one_line(self.name)}"
        checked: dict[str, Any] = {
            "ranks_per_node": whole(f"{where}: ranks_per_node", self.ranks_per_node, 1, BOUNDLESS)
        }
        checked["first_rank"] = whole(
            f"{where}: first_rank, a place inside a node,", self.first_rank, 0, checked["ranks_per_node"] - 1
        )
        checked["tile_tokens"] = whole(f"{where}: tile_tokens", self.tile_tokens)
        for name in (*_RATES, "capacity_bytes"):
            checked[name] = _between(f"{where}: {name}", getattr(self, name), _LEAST, _MOST)
        for name in ("attend_efficiency", "attend_grad_efficiency"):
            checked[name] = _between(f"{where}: {name}", getattr(self, name), 1e-6, 10.0)
        for name in (*_TIMES, "comm_cores"):
            checked[name] = _between(f"{where}: {name}", getattr(self, name), 0.0, _LONGEST_S)
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                checked[name] = whole(f"{where}: {name} (None for no such limit)", getattr(self, name))
        for name in _OPTIONAL:
            if getattr(self, name) is not None:
                least, most = _OPTIONAL[name]
                checked[name] = _between(f"{where}: {name} (None for no such limit)", getattr(self, name), least, most)
        for name, least, below in (("duplex", 1.0, 2.0), ("comm_share", 0.0, 0.95)):
            checked[name] = _between(f"{where}: {name}", getattr(self, name), least, below)
        checked["rows_efficiency"] = _points(f"{where}: rows_efficiency", self.rows_efficiency)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.num_nics is not None and self.num_nics > self.ranks_per_node:
            raise Refused(
                f"{where}: num_nics is {self.num_nics}, more than the {self.ranks_per_node} ranks of a node; a rank "
                "uses one card, so give at most ranks_per_node, or None"
            )

    @property
    def is_host(self) -> bool:
        """Whether ranks compute on a host's cores, with no device of their own."""
        return self.cores is not None

    def starting_at(self, rank: int, ranks_per_node: int | None = None) -> Cluster:
        """The same machines for an SP group whose rank 0 is the job's rank `rank`; optionally another node size."""
        per_node = self.ranks_per_node
        if ranks_per_node is not None:
            per_node = whole(f"cluster {one_line(self.name)}: ranks_per_node", ranks_per_node, 1, BOUNDLESS)
        nics = None if self.num_nics is None else min(self.num_nics, per_node)
        return replace(self, ranks_per_node=per_node, first_rank=rank % per_node, num_nics=nics)

    def link(self, crosses: np.ndarray | bool) -> tuple[np.ndarray, np.ndarray]:
        """Rate and latency of messages that leave their node or don't: (bytes/s, s), float64 of crosses' shape."""
        rate = np.where(crosses, self.inter_bytes_per_s, self.intra_bytes_per_s)
        return rate, np.where(crosses, self.inter_latency_s, self.intra_latency_s)

    def node_of(self, num_ranks: int) -> np.ndarray:
        """Node index of each rank: int64 [num_ranks]."""
        return (self.first_rank + np.arange(num_ranks)) // self.ranks_per_node

    def nic_of(self, num_ranks: int) -> np.ndarray:
        """Network card of each rank, numbered over all nodes; rises with the rank: int64 [num_ranks]."""
        node, place = np.divmod(self.first_rank + np.arange(num_ranks), self.ranks_per_node)
        cards = self.num_nics or self.ranks_per_node
        return node * cards + place * cards // self.ranks_per_node

    def to_json(self) -> dict[str, Any]:
        """Give the fields as JSON values: the first ones always, the others where they aren't the default."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        kept = {
            field.name: values[field.name]
            for place, field in enumerate(fields(self))
            if place < _PLAIN or values[field.name] != field.default
        }
        if "rows_efficiency" in kept:
            kept["rows_efficiency"] = [list(point) for point in self.rows_efficiency]
        return kept


def _between(name: str, value: object, low: float, high: float) -> float:
    given = number(name, value, zero=True)
    if not low <= given <= high:
        raise Refused(f"{name} is {shown(value)}; it must be from {low:g} to {high:g}")
    return given


def _points(name: str, points: object) -> tuple[tuple[int, float], ...]:
    """Read (rows, part) points: rows ascend, parts are above 0 and at most 1."""
    if not isinstance(points, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in points):
        raise Refused(f"{name} is {shown(points)}; give a list of [rows, part] pairs, as in [[16, 0.5], [1024, 1.0]]")
    out = tuple(
        (whole(f"{name}: rows", rows), _between(f"{name}: the part at {rows} rows", part, 1e-6, 1.0))
        for rows, part in points
    )
    if any(after[0] <= before[0] for before, after in itertools.pairwise(out)):
        raise Refused(f"{name} is {shown(points)}; list the points by rows, from few to many, each number once")
    return out
