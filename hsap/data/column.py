"""Column: one value a token, of which only what is asked for is in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np


class Column:
    """A column that lies in one file a shard, given as arrays by slices; nothing else of it is in memory.

    borders: the first row of each shard, and the end. read: gives rows [start, stop) of a shard.
    """

    def __init__(self, borders: Sequence[int], dtype: type, read: Callable[[int, int, int], np.ndarray]) -> None:
        self._borders, self._read = borders, read
        self._nothing: np.ndarray = np.zeros(0, dtype)

    def __len__(self) -> int:
        return self._borders[-1]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        parts = []
        # Of shards without rows, which share a border, the last one is found.
        shard = bisect_right(self._borders, start) - 1
        while start < stop:
            first, end = self._borders[shard], min(stop, self._borders[shard + 1])
            if start < end:
                parts.append(self._read(shard, start - first, end - first))
            start, shard = end, shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate([self._nothing, *parts])
