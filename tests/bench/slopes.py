"""Slopes: does something that is sampled again and again grow? Robust against outliers and against what jitters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_BLOCKS = 12
_NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True)
class Slope:
    """Theil and Sen's slope of the medians of consecutive blocks, and its interval of 95 % (Sen 1968).

    Per unit of x. late: the slope of the second half alone. first, last: levels at both ends, by medians. span: of x.
    """

    per_step: float
    low: float
    high: float
    late: float
    first: float
    last: float
    span: float

    @property
    def noise(self) -> float:
        """Half the interval."""
        return (self.high - self.low) / 2

    def grows(self, most: float) -> bool:
        """Tell whether it surely rises, and over the span by more than `most`, at the pace of its second half too.

        What only fills up, as caches do, gets slower; a leak doesn't.
        """
        return self.low > 0 and min(self.per_step, self.late) * self.span > most


def slope(x: Sequence[float], y: Sequence[float], blocks: int = _BLOCKS) -> Slope | None:
    """Give the slope of samples in order of x; None where there are fewer than two for each block.

    Blocks, because neighbouring samples aren't independent: what moves up and down within a block has no say.
    """
    if len(x) < 2 * blocks:
        return None
    places = [float(np.median(part)) for part in np.array_split(np.asarray(x, float), blocks)]
    levels = [float(np.median(part)) for part in np.array_split(np.asarray(y, float), blocks)]
    rises = _rises(places, levels)
    # The number of rising pairs less falling ones, if nothing grew, has this deviation (Kendall).
    deviation = math.sqrt(blocks * (blocks - 1) * (2 * blocks + 5) / 18)
    middle = (len(rises) - 1) / 2
    low, high = middle - _NORMAL_95 * deviation / 2, middle + _NORMAL_95 * deviation / 2
    bounds = rises[max(math.floor(low), 0)], rises[min(math.ceil(high), len(rises) - 1)]
    late = float(np.median(_rises(places[blocks // 2 :], levels[blocks // 2 :])))
    return Slope(float(np.median(rises)), *bounds, late, levels[0], levels[-1], places[-1] - places[0])


def _rises(places: Sequence[float], levels: Sequence[float]) -> list[float]:
    """Slopes between all pairs of blocks, in order."""
    pairs = itertools.combinations(zip(places, levels), 2)
    return sorted((after - before) / (right - left) for (left, before), (right, after) in pairs)
