"""Difference: how far a step is from the same step in one process, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

GRADIENT_BAR, ALL_GRADIENTS_BAR, LOSS_BAR, NORM_BAR = 5e-6, 1e-6, 1e-5, 1e-4
"""Of float32, relative: a parameter's gradient and all together (RMSE), loss, gradient norm."""
HALF_BARS = 0.1, 0.05, 1e-3, 2e-2
"""Of bf16, in which every sum is rounded and ranks make others."""
_SMALL = 1e-3
"""A gradient this much smaller than the model's others, element for element, is measured against those."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave: mean loss, norm of the gradient before clipping, and gradients by parameter."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a step is from another; all relative. parameter: the one with the largest `gradient`.

    bars: what may be, in the order of gradient, all_gradients, loss, norm.
    """

    gradient: float
    parameter: str
    all_gradients: float
    loss: float
    norm: float
    bars: tuple[float, float, float, float] = (GRADIENT_BAR, ALL_GRADIENTS_BAR, LOSS_BAR, NORM_BAR)

    @property
    def ok(self) -> bool:
        return all(a <= b for a, b in zip((self.gradient, self.all_gradients, self.loss, self.norm), self.bars))


def errors(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> tuple[dict[str, float], float]:
    """Give each gradient's relative RMSE, the largest first, and that of all together; infinite where one isn't finite.

    ValueError: not the same parameters.
    """
    if want.keys() != got.keys():
        odd = sorted(want.keys() ^ got.keys())[0]
        raise ValueError(f"parity: {odd} has a gradient in one of two runs only; compare runs of one model")
    sizes = {name: float(w.double().square().sum()) for name, w in want.items()}
    apart = {name: float((got[name].double() - w.double()).square().sum()) for name, w in want.items()}
    usual = sum(sizes.values()) / max(sum(w.numel() for w in want.values()), 1)
    by_name = {name: _ratio(apart[name], max(sizes[name], _SMALL**2 * usual * want[name].numel())) for name in want}
    worst_first = dict(sorted(by_name.items(), key=lambda item: -item[1]))
    return worst_first, _ratio(sum(apart.values()), sum(sizes.values()))


def _ratio(apart: float, size: float) -> float:
    """Root of a quotient of squares."""
    if not math.isfinite(apart) or not math.isfinite(size) or (size == 0 and apart > 0):
        return math.inf
    return math.sqrt(apart / size) if size else 0.0


def difference(want: Outcome, got: Outcome, dtype: torch.dtype = torch.float32) -> Difference:
    """Compare a step's outcome with that of one process."""
    by_name, together = errors(want.gradients, got.gradients)
    name = next(iter(by_name), "")
    loss, norm = (_off(getattr(want, what), getattr(got, what)) for what in ("loss", "norm"))
    bars = HALF_BARS if dtype == torch.bfloat16 else (GRADIENT_BAR, ALL_GRADIENTS_BAR, LOSS_BAR, NORM_BAR)
    return Difference(by_name.get(name, 0.0), name, together, loss, norm, bars)


def _off(want: float, got: float) -> float:
    return _ratio((got - want) ** 2, want**2)
