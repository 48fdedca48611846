"""Readings: what microbenchmarks said, on one rank or as a mean over ranks; JSON values go between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

Timed = tuple[tuple[int, float], ...]
"""(How much, seconds) of each size: bytes of a message, or messages that one launch starts."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel. kind: of shape; direction: 0 forward, 1 backward; slices: of six numbers, in rows."""

    kind: str
    direction: int
    slices: tuple[tuple[int, ...], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Something done to rows of q. what: copy, sum, merge or exchange."""

    what: str
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Link:
    """Messages between two ranks.

    hops: bytes of one that goes one way, on the first rank only; exchanges: of one each way. launches: messages, and
    seconds of the launching thread. message_cores: what one end of a flowing message keeps busy.
    """

    hops: Timed
    exchanges: Timed
    launches: Timed
    message_cores: float


@dataclass(frozen=True, slots=True)
class Network:
    """All links. intra, inter: inside a node and between two, None on ranks that have none or take no part.

    everybody: bytes of a message from each rank to each. counterparts: seconds of large messages each way between the
    first ranks of two nodes, and between all their ranks at once; None where that is the same.
    """

    intra: Link | None
    inter: Link | None
    everybody: Timed
    counterparts: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything. flops_per_s: of a matrix product; network: None for one rank."""

    flops_per_s: float
    kernels: tuple[Kernel, ...]
    memory: tuple[Memory, ...]
    network: Network | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Readings:
        """Read what `to_json` gave."""
        network = data["network"]
        if network is not None:
            links = {kind: network[kind] and _of(Link, network[kind]) for kind in ("intra", "inter")}
            network = _of(Network, network | links)
        kernels = tuple(_of(Kernel, one) for one in data["kernels"])
        memory = tuple(_of(Memory, one) for one in data["memory"])
        return cls(data["flops_per_s"], kernels, memory, network)


def _of(kind: type, data: dict[str, Any]) -> Any:
    """Build from JSON values, whose lists were tuples."""
    return kind(**{name: _tuples(value) for name, value in data.items()})


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def together(by_rank: Sequence[Readings]) -> Readings:
    """Means over the ranks that measured something, of what each did; of what all do at once, of the slowest."""
    first = by_rank[0]
    kernels, memory = (
        tuple(
            replace(of_ranks[0], seconds=float(np.mean([one.seconds for one in of_ranks])))
            for of_ranks in zip(*(getattr(own, name) for own in by_rank))
        )
        for name in ("kernels", "memory")
    )
    flops_per_s = float(np.mean([own.flops_per_s for own in by_rank]))
    network = None if first.network is None else _network([own.network for own in by_rank if own.network is not None])
    return Readings(flops_per_s, kernels, memory, network)


def _network(by_rank: Sequence[Network]) -> Network:
    intra, inter = (
        _link([link for link in links if link is not None])
        for links in ([own.intra for own in by_rank], [own.inter for own in by_rank])
    )
    counterparts = [own.counterparts for own in by_rank if own.counterparts is not None]
    slowest = tuple(np.max(counterparts, axis=0).tolist()) if counterparts else None
    return Network(intra, inter, _mean([own.everybody for own in by_rank]), slowest)


def _link(ends: Sequence[Link]) -> Link | None:
    if not ends:
        return None
    hops, exchanges, launches = (
        _mean([timed for timed in part if len(timed)])
        for part in ([end.hops for end in ends], [end.exchanges for end in ends], [end.launches for end in ends])
    )
    return Link(hops, exchanges, launches, float(np.mean([end.message_cores for end in ends])))


def _mean(timed: Sequence[Timed]) -> Timed:
    return tuple(map(tuple, np.mean(timed, axis=0).tolist()))
