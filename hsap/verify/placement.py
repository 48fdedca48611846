"""Placement: rules on what all streams of a plan share, before any instruction is looked at.

A plan may come from a file that somebody edited, so nothing here trusts a shape, a dtype or a number; and nothing is
allocated that isn't in proportion to the columns that are already there or to the limits that the problem's classes
keep (`hsap.ir.check`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology
from hsap.ir.program import COLUMN_DTYPES, COLUMN_WIDTHS, Buffers, Programs
from hsap.ir.schedule import DIRECTIONS
from hsap.verify.report import Fault

MAX_STAGES = 1 << 16
"""What draws a plan may count its stages."""


def check_plan(plan: Plan) -> list[Fault]:
    """Check problem, columns and placement; each kind only where the kinds before are sound."""
    for check in (problem, columns, streams, placement, capacity, charts):
        faults = [Fault(f"structure.{check.__name__}", None, None, None, None, text) for text in check(plan)]
        if faults:
            return faults
    return []


def problem(plan: Plan) -> Iterator[str]:
    """The problem is one; its own classes keep every number of it within the limits. All its ranks have a column."""
    if not isinstance(plan.problem, Problem):
        yield f"the problem is {plan.problem!r:.60}; it must be a Problem"
        return
    own, heads = plan.own_topology, plan.problem.heads
    if own is not None and not isinstance(own, Topology):
        yield f"own_topology is {own!r:.60}; it must be a Topology or None"
    elif own is not None and (own.num_ranks != plan.num_ranks or own.intra_sp > heads.num_q_heads):
        yield f"own_topology {own} doesn't fit {plan.num_ranks} ranks and {heads.num_q_heads} query heads"


def columns(plan: Plan) -> Iterator[str]:
    """Every column has its dtype and shape; columns of one table are equally long."""
    p = plan.problem
    num_masks = len(p.masks)
    pairs = (*plan.programs, *plan.chart)
    if not len(plan.slices) == len(plan.programs) == len(plan.chart) == num_masks or any(len(p) != 2 for p in pairs):
        yield f"the problem has {num_masks} masks; the plan must have slices, two programs, two charts for each"
        return
    expected = [
        ("spans", plan.spans, np.int64, (None, 2)),
        ("column_rows", plan.column_rows, np.int64, (plan.topology.inter_sp, 2)),
        ("rank_rows", plan.rank_rows, np.int64, (p.num_ranks, 2)),
        ("shards.spans", plan.shards.spans, np.int64, (None, 2)),
        ("shards.home", plan.shards.home, np.int64, (None,)),
        ("shards.offsets", plan.shards.offsets, np.int64, (_length(plan.shards.home) + 1,)),
    ]
    expected += [(f"slices[{m}]", table, np.int64, (None, 6)) for m, table in enumerate(plan.slices)]
    expected += [(f"chart[{m}]", table, np.int64, (None, 6)) for m, pair in enumerate(plan.chart) for table in pair]
    for m, pair in enumerate(plan.programs):
        for direction, programs in zip(DIRECTIONS, pair):
            for table in (programs, programs.buffers):
                expected += list(_table(f"{m}.{direction}", table, p.num_ranks))
    for name, column, dtype, shape in expected:
        if not isinstance(column, np.ndarray) or column.dtype != dtype or len(column.shape) != len(shape):
            yield f"column {name} isn't an array of {np.dtype(dtype)} with {len(shape)} dimensions"
        elif any(want is not None and got != want for got, want in zip(column.shape, shape)):
            yield f"column {name} has shape {column.shape}; expected {shape}"


def _length(column: Any) -> int:
    return len(column) if isinstance(column, np.ndarray) and column.ndim else -1


def _table(prefix: str, table: Programs | Buffers, num_ranks: int) -> Iterator[tuple[Any, ...]]:
    names = [f.name for f in fields(table) if f.name != "buffers"]
    kind = "buffers." if isinstance(table, Buffers) else ""
    length = _length(table.role)
    for name in names:
        first = {"offsets": num_ranks + 1, "index": None}.get(name, length)
        shape = (first, COLUMN_WIDTHS[name]) if name in COLUMN_WIDTHS else (first,)
        yield f"{prefix}.{kind}{name}", getattr(table, name), COLUMN_DTYPES[name], shape


def streams(plan: Plan) -> Iterator[str]:
    """Rank borders of instructions and buffers rise from 0 and cover them all."""
    for m, pair in enumerate(plan.programs):
        for direction, programs in zip(DIRECTIONS, pair):
            for name, table in (("instruction", programs), ("buffer", programs.buffers)):
                if not offsets_sound(table.offsets, len(table)):
                    yield f"mask {m} {direction}: {name} offsets must rise from 0 to the number of {name}s"


def placement(plan: Plan) -> Iterator[str]:
    """Shards, column rows and rank rows place every token position once, in one row order."""
    p, shards = plan.problem, plan.shards
    inter, intra, total = plan.topology.inter_sp, plan.topology.intra_sp, p.layout.num_tokens
    spans = plan.spans
    if (spans[:, 0] < 0).any() or (spans[:, 1] > total).any() or (spans[:, 0] >= spans[:, 1]).any():
        yield f"spans must be non-empty ranges of the {total} token positions"
        return
    if not offsets_sound(shards.offsets, len(shards.spans)) or (np.diff(shards.offsets) < 1).any():
        yield "shards.offsets must rise from 0 to the number of shards' spans"
        return
    if (np.diff(shards.home) < 0).any() or (len(shards) and (shards.home[0] < 0 or shards.home[-1] >= inter)):
        yield f"shards must be ordered by home rank, and homes must be below inter_sp={inter}"
        return
    if not np.array_equal(spans[: len(shards.spans)], shards.spans):
        yield "the span table must begin with the shards' spans"
        return
    by_position = spans[: len(shards.spans)]
    by_position = by_position[np.argsort(by_position[:, 0], kind="stable")]
    borders = np.concatenate([[0], by_position[:, 1]])
    if not np.array_equal(borders[:-1], by_position[:, 0]) or borders[-1] != total:
        wrong = np.flatnonzero(borders[:-1] != by_position[:, 0])
        where = int(borders[wrong[0]]) if len(wrong) else int(borders[-1])
        yield f"shards must hold every token position once; position {where} is missing or held twice"
        return
    of_rank = shards.offsets[np.searchsorted(shards.home, np.arange(inter + 1))]
    if not np.array_equal(plan.column_rows, np.stack([of_rank[:-1], of_rank[1:]], axis=1)):
        yield "column_rows must be the spans of each InterSP rank's shards"
        return
    yield from _rank_rows(plan, intra)


def _rank_rows(plan: Plan, intra: int) -> Iterator[str]:
    rows = plan.rank_rows
    if (rows[:, 0] < 0).any() or (rows[:, 1] > len(plan.spans)).any() or (rows[:, 0] > rows[:, 1]).any():
        yield "rank_rows must be ranges of the span table"
        return
    behind = len(plan.shards.spans) if intra == 1 else int(rows[-1, 1])
    if (origins(plan)[behind:] < 0).any():
        yield "the span table's spans behind those of shards and ranks must each be a span of a shard"
        return
    if intra == 1:
        if not np.array_equal(rows, plan.column_rows):
            yield "with intra_sp=1, rank_rows must equal column_rows"
        return
    if rows[0, 0] != len(plan.shards.spans) or not np.array_equal(rows[1:, 0], rows[:-1, 1]):
        yield "rank_rows must follow one another behind the shards' spans"
        return
    mine = _runs(plan.spans[rows[0, 0] : rows[-1, 1]], rows[::intra, 0] - rows[0, 0])
    columns = _runs(plan.shards.spans, plan.column_rows[:, 0])
    if not np.array_equal(mine, columns):
        same = (mine[: len(columns)] == columns[: len(mine)]).all(axis=1)
        first = int(np.argmin(np.append(same, False)))
        i = min(int(table[first, 0]) for table in (mine, columns) if first < len(table))
        yield f"the rows of InterSP rank {i}'s intra ranks aren't its column's rows cut in row order"


def _runs(spans: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Runs of token positions in each column's rows: int64 [n, 3], column, start and stop. begins: first spans."""
    column = np.searchsorted(begins, np.arange(len(spans)), side="right") - 1
    fresh = np.ones(len(spans) + 1, bool)
    fresh[1:-1] = (spans[1:, 0] != spans[:-1, 1]) | (column[1:] != column[:-1])
    return np.stack([column[fresh[:-1]], spans[fresh[:-1], 0], spans[fresh[1:], 1]], axis=1)


def capacity(plan: Plan) -> Iterator[str]:
    """No rank holds more tokens than the problem allows."""
    limit, tokens = plan.problem.max_tokens_per_rank, plan.tokens_per_rank
    if limit is not None and tokens.max(initial=0) > limit:
        yield f"rank {int(tokens.argmax())} holds {int(tokens.max())} tokens, max_tokens_per_rank={limit}"


def charts(plan: Plan) -> Iterator[str]:
    """What people are shown of a plan are shards, ranks and stages that there can be; machines read none of it."""
    heads, tokens, num_shards = plan.problem.heads.num_q_heads, plan.problem.layout.num_tokens, len(plan.shards)
    stop = np.array([num_shards, num_shards, heads, plan.topology.inter_sp, MAX_STAGES, tokens**2 + 1])
    for m, (pair, tables) in enumerate(zip(plan.programs, plan.chart)):
        for direction, programs, table in zip(DIRECTIONS, pair, tables):
            if (table < 0).any() or (table >= stop).any():
                yield f"mask {m} {direction}: the chart has a shard, group, rank, stage or area that can't be"
            if ((programs.stage <= -MAX_STAGES) | (programs.stage >= MAX_STAGES)).any():
                yield f"mask {m} {direction}: stages of instructions must be within {MAX_STAGES} of 0"


def offsets_sound(offsets: np.ndarray, total: int) -> bool:
    """Whether offsets rise from 0 to `total`."""
    return bool(len(offsets) and offsets[0] == 0 and offsets[-1] == total and (offsets[1:] >= offsets[:-1]).all())


def origins(plan: Plan) -> np.ndarray:
    """Which shards' span each span of the table is, -1 where it is none of them: int64 [n].

    Rows that are gathered on a rank are a copy of the shards' spans in another order; by this they are known again.
    """
    spans = plan.shards.spans
    order = np.argsort(spans[:, 0], kind="stable")
    place = np.minimum(np.searchsorted(spans[order, 0], plan.spans[:, 0]), max(len(spans) - 1, 0))
    if not len(spans):
        return np.full(len(plan.spans), -1)
    found = order[place]
    return np.where((spans[found] == plan.spans).all(axis=1), found, -1)
