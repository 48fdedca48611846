"""Grid: the attention matrix cut by shards, drawn as HSAP's Figure 3 does: patterns, compute ranks, stages.

A cell is a query shard (row) against a KV shard (column). With causal documents and contiguous shards there are five
patterns: A1 the causal diagonal; A2 cross, one document covers both shards; A3 cross-up, the document ends inside the
query shard; A4 cross-right, it begins inside the KV shard; A5 cross-corner, both. Cells of any other shape are B,
cells without a visible pair `·`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

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
RANK_COLOURS = ((167, 16), (61, 231), (186, 16), (29, 231), (117, 16), (89, 231), (73, 16), (100, 231), (133, 231))
"""Background and text, of the terminal's 256 colours, that ranks are dealt to: near those of the viewer."""
STAGE_COLOURS = ((17, 231), (60, 231), (66, 231), (102, 16), (144, 16), (186, 16), (227, 16))
"""The same for stages, dark to light; the last one serves all that follow."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Texts of the cells that have visible pairs, as columns: q, kv: int64 [n], rising; text: str [n].

    tint: int64 [n], the number that a cell's colour stands for, a rank or (ramp) a stage; None: no colours.
    """

    num_shards: int
    q: np.ndarray
    kv: np.ndarray
    text: np.ndarray
    tint: np.ndarray | None = None
    ramp: bool = False

    def rows(self) -> list[list[str]]:
        """All cells, row by row, the empty ones as `·`."""
        table = np.full((self.num_shards, self.num_shards), NOTHING, dtype=object)
        table[self.q, self.kv] = self.text
        return table.tolist()

    def draw(self, colour: bool = False) -> str:
        """Draw the grid; beyond `MAX_DRAWN` shards every row is a list of runs of equal cells."""
        if self.num_shards > MAX_DRAWN:
            return self._runs()
        cells = self._cells(colour)
        label = len(str(max(self.num_shards - 1, 0)))
        width = self._width()
        lines = [" " * (label + 5) + " ".join(f"{kv:>{width}}" for kv in range(self.num_shards))]
        return "\n".join([*lines, *(f"q {q:>{label}} | " + " ".join(row) for q, row in enumerate(cells))])

    def _width(self) -> int:
        return max([len(str(self.num_shards - 1)), *(len(text) for text in self.text.tolist())])

    def _cells(self, colour: bool) -> list[list[str]]:
        """Cells as they are drawn, all of one width."""
        width = self._width()
        nothing = f"{NOTHING:>{width}}"
        table = np.full((self.num_shards, self.num_shards), f"\x1b[90m{nothing}\x1b[0m" if colour else nothing, object)
        tint = [-1] * len(self.q) if self.tint is None or not colour else self.tint.tolist()
        for q, kv, text, number in zip(self.q.tolist(), self.kv.tolist(), self.text.tolist(), tint):
            table[q, kv] = f"{text:>{width}}" if number < 0 else self._paint(f"{text:>{width}}", number)
        return table.tolist()

    def _paint(self, padded: str, number: int) -> str:
        colours = STAGE_COLOURS if self.ramp else RANK_COLOURS
        ground, ink = colours[min(number, len(colours) - 1) if self.ramp else number % len(colours)]
        return f"\x1b[48;5;{ground};38;5;{ink}m{padded}\x1b[0m"

    def _runs(self) -> str:
        lines = ["row: columns text, …; empty cells are left out"]
        borders = np.searchsorted(self.q, np.arange(self.num_shards + 1))
        for q in range(self.num_shards):
            kv, text = self.kv[borders[q] : borders[q + 1]], self.text[borders[q] : borders[q + 1]]
            starts = np.r_[True, (kv[1:] != kv[:-1] + 1) | (text[1:] != text[:-1])] if len(kv) else np.zeros(0, bool)
            first = np.flatnonzero(starts)
            last = np.append(first[1:], len(kv)) - 1 if len(kv) else first
            runs = [f"{kv[a]} {text[a]}" if a == b else f"{kv[a]}-{kv[b]} {text[a]}" for a, b in zip(first, last)]
            if len(runs) > RUNS_SHOWN:
                runs = [*runs[:RUNS_SHOWN], f"… {len(runs) - RUNS_SHOWN} more"]
            lines.append(f"q {q}: {', '.join(runs) or NOTHING}")
        return "\n".join(lines)


def pattern_grid(shards: Shards, slices: np.ndarray) -> Grid:
    """Name the pattern of every cell. slices: int64 [n, 6], the mask's, canonical."""
    blocks = cut_blocks(shards, slices)
    return Grid(len(shards), blocks.q, blocks.kv, NAMES[patterns(shards, blocks)])


def tinted(grid: Grid, like: Grid) -> Grid:
    """Give the cells of a grid the colours that another has there."""
    tint = like.tint if like.tint is not None else np.full(len(like.q), -1)
    place = dict(zip(zip(like.q.tolist(), like.kv.tolist()), tint.tolist()))
    return replace(grid, tint=np.array([place.get(cell, -1) for cell in zip(grid.q.tolist(), grid.kv.tolist())]))


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
        where = (cells // num_shards, cells % num_shards)
        # A cell that head groups share has the colour of the first.
        grids.append(Grid(num_shards, *where, text, values[first], column == Chart.STAGE))
    return grids[0], grids[1]
