"""Grid: the attention matrix cut by shards, drawn as HSAP's Figure 3 does: patterns, compute ranks, stages.

A cell is a query shard (row) against a KV shard (column). With causal documents and contiguous shards there are five
patterns: A1 the causal diagonal; A2 cross, one document covers both shards; A3 cross-up, the document ends inside the
query shard; A4 cross-right, it begins inside the KV shard; A5 cross-corner, both. Cells of any other shape are B,
cells without a visible pair `·`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from hsap.ir.block import Shards, cut_blocks
from hsap.ir.pattern import Pattern, patterns
from hsap.ir.plan import Plan
from hsap.ir.schedule import Chart

NOTHING = "·"
NAMES = np.array(["B" if pattern == Pattern.OTHER else pattern.name for pattern in Pattern])
MAX_DRAWN = 32
"""Shards up to which a grid is drawn cell by cell."""
RUNS_SHOWN = 12
COLOURS = (31, 32, 33, 34, 35, 36, 91, 92, 93, 94, 95, 96)
"""ANSI foreground colours that cell texts are dealt to."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Texts of the cells that have visible pairs, as columns: q, kv: int64 [n], rising; text: str [n]."""

    num_shards: int
    q: np.ndarray
    kv: np.ndarray
    text: np.ndarray

    def rows(self) -> list[list[str]]:
        """All cells, row by row, the empty ones as `·`."""
        table = np.full((self.num_shards, self.num_shards), NOTHING, dtype=object)
        table[self.q, self.kv] = self.text
        return table.tolist()

    def draw(self, colour: bool = False) -> str:
        """Draw the grid; beyond `MAX_DRAWN` shards every row is a list of runs of equal cells."""
        if self.num_shards > MAX_DRAWN:
            return self._runs()
        rows = self.rows()
        width = max([len(str(self.num_shards - 1)), *(len(text) for text in self.text.tolist())])
        paint = self._paint if colour else lambda text, padded: padded
        label = len(str(max(self.num_shards - 1, 0)))
        lines = [" " * (label + 5) + " ".join(f"{kv:>{width}}" for kv in range(self.num_shards))]
        for q, row in enumerate(rows):
            lines.append(f"q {q:>{label}} | " + " ".join(paint(text, f"{text:>{width}}") for text in row))
        return "\n".join(lines)

    def _paint(self, text: str, padded: str) -> str:
        if text == NOTHING:
            return f"\x1b[90m{padded}\x1b[0m"
        number = int(text.lstrip("AB").partition("+")[0] or len(COLOURS) - 1)
        return f"\x1b[{COLOURS[number % len(COLOURS)]}m{padded}\x1b[0m"

    def _runs(self) -> str:
        lines = ["row: columns text, …; empty cells are left out"]
        borders = np.searchsorted(self.q, np.arange(self.num_shards + 1))
        for q in range(self.num_shards):
            kv, text = self.kv[borders[q] : borders[q + 1]], self.text[borders[q] : borders[q + 1]]
            first = np.flatnonzero(np.r_[True, (kv[1:] != kv[:-1] + 1) | (text[1:] != text[:-1])]) if len(kv) else []
            last = np.append(first[1:], len(kv)) - 1 if len(kv) else []
            runs = [f"{kv[a]} {text[a]}" if a == b else f"{kv[a]}-{kv[b]} {text[a]}" for a, b in zip(first, last)]
            if len(runs) > RUNS_SHOWN:
                runs = [*runs[:RUNS_SHOWN], f"… {len(runs) - RUNS_SHOWN} more"]
            lines.append(f"q {q}: {', '.join(runs) or NOTHING}")
        return "\n".join(lines)


def pattern_grid(shards: Shards, slices: np.ndarray) -> Grid:
    """Name the pattern of every cell. slices: int64 [n, 6], the mask's, canonical."""
    blocks = cut_blocks(shards, slices)
    return Grid(len(shards), blocks.q, blocks.kv, NAMES[patterns(shards, blocks)])


def chart_grids(plan: Plan, mask: int = 0, direction: int = 0) -> tuple[Grid, Grid]:
    """Say which InterSP rank computes every cell, and in which stage; several head groups are joined by `+`."""
    chart = plan.chart[mask][direction]
    num_shards = len(plan.shards)
    key = chart[:, Chart.Q_SHARD] * num_shards + chart[:, Chart.KV_SHARD]
    order = np.lexsort([chart[:, Chart.GROUP], key])
    cells, first = np.unique(key[order], return_index=True)
    bounds = np.append(first, len(key))
    grids = []
    for column in (Chart.RANK, Chart.STAGE):
        values = chart[order, column]
        if len(cells) == len(key):
            text = values.astype(str)
        else:
            text = np.array(["+".join(dict.fromkeys(map(str, values[a:b]))) for a, b in itertools.pairwise(bounds)])
        grids.append(Grid(num_shards, cells // num_shards, cells % num_shards, text))
    return grids[0], grids[1]
