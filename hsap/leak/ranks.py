"""Ranks: one run as a rank saw it, and what all ranks together have seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hsap.gathering import gather_tensors, gather_texts
from hsap.ir.check import fields, instance, texts
from hsap.leak.sketch import Sketch

FORWARD, BACKWARD = "forward", "backward"
Key = tuple[str, ...]
"""Of what is put together from all ranks: a direction, and a module where it is one's."""


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

    def names(self, seen: Seen) -> dict[str, list[str]]:
        """Modules in the order in which they ran, of all ranks."""
        own = {way: list(of_way) for way, of_way in seen.sketches.items()}
        ranks = [own]
        if not self.alone:
            ranks = [_names(json.loads(text)) for text in gather_texts(json.dumps(own), self.group)]
        found = {way: list(dict.fromkeys(name for rank in ranks for name in rank[way])) for way in own}
        place = {name: i for i, name in enumerate(found[FORWARD])}
        found[BACKWARD].sort(key=lambda name: place.get(name, 0))
        return found

    def largest(self, own: Mapping[Key, np.ndarray], *shape: int) -> dict[Key, np.ndarray]:
        """By key, the largest values of all ranks' arrays. shape: of every array, here and in `sums`."""
        return self._merged(own, shape, np.maximum)

    def sums(self, own: Mapping[Key, np.ndarray], *shape: int) -> dict[Key, np.ndarray]:
        """By key, the sum of all ranks' arrays, in the order of ranks."""
        return self._merged(own, shape, np.add)

    def _merged(self, own: Mapping[Key, np.ndarray], shape: tuple[int, ...], merge: np.ufunc) -> dict[Key, np.ndarray]:
        if self.alone:
            return dict(own)
        numbers = torch.from_numpy(np.concatenate([np.zeros(0), *(array.ravel() for array in own.values())]))
        texts = gather_texts(json.dumps(list(own)), self.group)
        out: dict[Key, np.ndarray] = {}
        for text, flat in zip(texts, gather_tensors(numbers, self.group), strict=True):
            keys = _keys(json.loads(text))
            for key, array in zip(keys, flat.numpy().reshape(len(keys), *shape), strict=True):
                out[key] = merge(out[key], array) if key in out else array
        return out

    def any(self, own: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.largest({(): np.array(float(own))})[()])


def _names(value: Any) -> dict[str, list[str]]:
    """Read what a rank has said of its modules; ValueError."""
    of_ways = fields("a rank's modules", value, (FORWARD, BACKWARD))
    return {way: texts(f"a rank's modules, {way}", names) for way, names in of_ways.items()}


def _keys(value: Any) -> list[Key]:
    """Read which arrays a rank has; ValueError."""
    return [tuple(texts("a rank's array", key)) for key in instance("a rank's arrays", value, list, "a list")]
