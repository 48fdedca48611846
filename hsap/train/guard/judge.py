"""Judging a step by its loss and the norm of its gradient, which all ranks know alike.

A leap is measured as OLMo's SkipStepOptimizer does it, against the last 128 steps and not before half of them are
there, and more robustly: above the median, in deviations that are the distance from there to the ninth decile over
1.2816, which is the standard deviation of normal values. One leap in a window would spoil mean and standard deviation
for the next ones, and what scatters more upward than downward, as norms do, isn't taken for leaps. The norm's
logarithm is taken: norms scatter by factors. Deviations are taken for `LEAST` at least, or a run that hardly scatters
would leap all the time. What leapt and was left out doesn't enter the window; what was only warned of does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from hsap.train.groups import GuardConfig

LEAST = {"loss": 0.005, "gradient norm": 0.05}
"""The least that counts as a deviation: of a loss as a share of the median, of a norm's natural logarithm."""
LEAST_LOSS = 1e-4
"""And of a loss that is nothing, of what a model knows by heart."""
_MOST = 1e300
_DECILE, _NORMAL = 0.9, 1.2815515655446004


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with a step. kind: non_finite or spike; told: in words; action: what is to be done."""

    kind: str
    told: str
    action: str


class Judge:
    """Judges one step after the other; made and called alike on every rank, it says the same on every rank.

    past: figures of the steps before, as the metrics have them, for a run that goes on.
    """

    def __init__(self, config: GuardConfig, past: Iterable[Mapping[str, Any]] = ()) -> None:
        self.config = config
        self.skipped = self.in_a_row = 0
        self._seen: dict[str, deque[float]] = {name: deque(maxlen=config.spike_window) for name in LEAST}
        for figures in past:
            skipped = figures.get("skipped_steps")
            self.skipped = skipped if isinstance(skipped, int) else 0
            if figures.get("left_out"):
                self.in_a_row += 1
                continue
            self.in_a_row = 0
            self._note(figures.get("loss"), figures.get("grad_norm"))

    def judge(self, loss: float, norm: float) -> Trouble | None:
        """Judge a step's mean loss (NaN where it has no target) and its gradient's norm.

        A step without targets has no loss to be judged; pass 0.
        """
        trouble = self._non_finite(loss, norm) or self._leap(loss, norm)
        if trouble is None or trouble.action == "warn":
            self.in_a_row = 0
            self._note(loss, norm)
        elif trouble.action == "skip":
            self.skipped += 1
            self.in_a_row += 1
            if self.in_a_row > self.config.max_skips:
                before = self.in_a_row - 1
                steps = (
                    "was 1 step before it, whose update was"
                    if before == 1
                    else (f"were {before} steps before it, whose updates were")
                )
                told = f"{trouble.told}, and so {steps} left out"
                return Trouble(trouble.kind, f"{told} (guard.max_skips={self.config.max_skips})", "stop")
        return trouble

    def _non_finite(self, loss: float, norm: float) -> Trouble | None:
        wrong = [f"the {name} is {value}" for name, value in (("loss", loss), ("gradient's norm", norm))
                 if not math.isfinite(value)]  # fmt: skip
        return Trouble("non_finite", " and ".join(wrong), self.config.non_finite) if wrong else None

    def _leap(self, loss: float, norm: float) -> Trouble | None:
        if self.config.spike is None:
            return None
        told = []
        for name, value in _judged(loss, norm).items():
            seen = self._seen[name]
            if len(seen) < self.config.spike_window // 2:
                continue
            middle, high = np.quantile(seen, (0.5, _DECILE)).tolist()
            least = max(LEAST[name] * abs(middle), LEAST_LOSS) if name == "loss" else LEAST[name]
            deviation = max((high - middle) / _NORMAL, least)
            if value - middle > self.config.spike * deviation:
                shown, usual = (value, middle) if name == "loss" else (norm, math.exp(middle))
                told.append(
                    f"the {name} leaps to {shown:.5g}, {(value - middle) / deviation:.1f} deviations above "
                    f"{usual:.5g}, the median of the last {len(seen)} steps (guard.spike={self.config.spike:g})"
                )
        return Trouble("spike", " and ".join(told), self.config.on_spike) if told else None

    def _note(self, loss: object, norm: object) -> None:
        if not _is_figure(loss) or not _is_figure(norm):
            return
        for name, value in _judged(loss, norm).items():
            self._seen[name].append(value)


def _judged(loss: float, norm: float) -> dict[str, float]:
    """What is compared; a norm of 0 says nothing, nor does the loss beside it where it is 0, as without targets."""
    if norm > 0:
        return {"loss": loss, "gradient norm": math.log(norm)}
    return {"loss": loss} if loss else {}


def _is_figure(value: object) -> TypeGuard[float]:
    """Whether a run can have written that of a step; its metrics may have been edited since."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
