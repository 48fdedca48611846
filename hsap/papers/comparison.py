"""Comparison: ratios of simulated times over packs, beside a published one, and in words how far they agree."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

TIE = 1.03
"""Ratios within so much of 1 name no winner."""
NEAR = 1.15
"""Ratios within so much of each other are called near."""
WIDTH = 118


@dataclass(frozen=True, slots=True)
class Spread:
    """A ratio over several packs or settings: values ascend, at least one; middle is the one that stands for all."""

    values: tuple[float, ...]
    middle: float

    @classmethod
    def of(cls, values: Sequence[float], middle: float | None = None) -> Spread:
        """Sort them. middle: None for the median."""
        return cls(tuple(sorted(values)), median(values) if middle is None else middle)

    @property
    def low(self) -> float:
        """The least of the values."""
        return self.values[0]

    @property
    def high(self) -> float:
        """The largest of the values."""
        return self.values[-1]

    def __str__(self) -> str:
        low, high = f"{self.low:.2f}", f"{self.high:.2f}"
        return f"{self.middle:.2f}" if low == high else f"{self.middle:.2f} ({low} to {high})"

    def to_json(self) -> dict[str, Any]:
        return {"middle": self.middle, "low": self.low, "high": self.high, "values": len(self.values)}


def is_tie(ratio: float) -> bool:
    """Whether a ratio names no winner."""
    return abs(math.log(ratio)) <= math.log(TIE)


def is_near(ratio: float, other: float) -> bool:
    """Whether two ratios are about the same."""
    return abs(math.log(ratio / other)) <= math.log(NEAR)


def agreement(known: float | None, ours: Spread) -> str:
    """Say in words how a simulated ratio stands to a published one; both are ratios around 1, where nobody wins."""
    if known is None:
        return "not published"
    if ours.low <= known <= ours.high:
        return "inside our range"
    if is_near(known, ours.middle):
        return "near"
    sides = [0 if is_tie(ratio) else math.copysign(1, ratio - 1) for ratio in (known, ours.middle)]
    if sides[0] * sides[1] < 0:
        return "other winner"
    if sides[1] == 0:
        return "ours is a tie"
    if sides[0] == 0:
        return "the paper's is a tie"
    less = abs(math.log(ours.middle)) < abs(math.log(known))
    return f"same winner by {'less' if less else 'more'}"


@dataclass(frozen=True, slots=True)
class Table:
    """A published table or figure with ours beside it.

    rows: texts, one for each of `columns`. figures: the same as values, those of JSON or `Spread`. assumptions: what
    the papers don't say and we chose. findings: what disagrees, and why we think so, as far as the figures say so.
    """

    name: str
    title: str
    source: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    figures: tuple[dict[str, Any], ...]
    assumptions: tuple[str, ...]
    findings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "source": self.source,
            "figures": _as_json(self.figures),
            "assumptions": list(self.assumptions),
            "findings": list(self.findings),
        }

    def __str__(self) -> str:
        grid = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in grid) for i in range(len(self.columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in grid]
        lines.insert(1, "-" * len(max(lines, key=len)))
        told = [_wrapped(f"{head}: ", text) for head, text in self._notes()]
        return "\n".join([self.title, _wrapped("Published: ", self.source), "", *lines, "", *told])

    def _notes(self) -> list[tuple[str, str]]:
        return [("Assumed", text) for text in self.assumptions] + [("Found", text) for text in self.findings]


def counted(parts: Sequence[dict[str, Any]]) -> str:
    """Count the agreements of parts: `5 inside our range, 3 near`, the most frequent first."""
    verdicts = [part["agreement"] for part in parts]
    order = sorted(set(verdicts), key=lambda verdict: (-verdicts.count(verdict), verdict))
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in order)


def milliseconds(seconds: float) -> str:
    """Print a time in ms, three digits or so."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _as_json(value: object) -> object:
    if isinstance(value, dict):
        return {key: _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    return value.to_json() if isinstance(value, Spread) else value


def _wrapped(head: str, text: str) -> str:
    return textwrap.fill(head + text, WIDTH, subsequent_indent="  ")
