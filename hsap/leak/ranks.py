"""Ranks: one run as a rank saw it, and what all ranks together have seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from hsap.leak.sketch import Sketch

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One run: sketches by direction and module, of this rank's rows in their order, and where these rows lie.

    drew: whether random numbers were drawn in it.
    """

    sketches: dict[str, dict[str, Sketch]]
    rows: np.ndarray
    drew: bool


class Everywhere:
    """All ranks that hold rows of the batch. group: theirs; None: this process has all rows."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone = group is None or dist.get_world_size(group) == 1

    def all(self, value: Any) -> list[Any]:
        """What every rank has."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def names(self, seen: Seen) -> dict[str, list[str]]:
        """Modules in the order in which they ran, of all ranks."""
        own = {way: list(of_way) for way, of_way in seen.sketches.items()}
        ranks = self.all(own)
        found = {way: list(dict.fromkeys(name for rank in ranks for name in rank[way])) for way in own}
        place = {name: i for i, name in enumerate(found[FORWARD])}
        found[BACKWARD].sort(key=lambda name: place.get(name, 0))
        return found

    def largest(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """By key, the largest value of all ranks."""
        out: dict[Any, Any] = {}
        for of_rank in self.all(own):
            for key, value in of_rank.items():
                out[key] = max(out.get(key, 0.0), value)
        return out

    def any(self, own: bool) -> bool:
        """Whether it is so on any rank."""
        return any(self.all(own))

    def sums(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """By key, the sum of all ranks' arrays, in the order of ranks."""
        out: dict[Any, Any] = {}
        for of_rank in self.all(own):
            for key, value in of_rank.items():
                out[key] = out[key] + value if key in out else value
        return out
