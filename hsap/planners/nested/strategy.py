"""Strategy: the table of homes and cells as shards, and where and when every block is computed."""

from __future__ import annotations

import numpy as np

from hsap.ir.block import Blocks, Shards, cut_blocks
from hsap.ir.problem import Problem
from hsap.ir.schedule import AHEAD, Schedule, Strategy
from hsap.ir.slice import K0, K1, cut
from hsap.ir.sort import distinct
from hsap.ir.span import ranges
from hsap.planners.nested.levels import Table
from hsap.planners.parts import grouped, scramble

NUM_STAGES = 4
"""Stages that a rank's blocks with rows from elsewhere are spread over, evenly by area."""


def strategy_of(problem: Problem, table: Table, groups: int) -> Strategy:
    """Cut shards so that what travels is needed whole, and place every block."""
    one_rank = len(table.cells) == 0 or _same_for_all_groups(table, groups)
    cells = table.cells[table.cells[:, 4] == 0] if one_rank else table.cells
    groups = 1 if one_rank else groups
    homes = table.homes[np.argsort(table.homes[:, 0], kind="stable")]
    slices = [problem.slices(mask) for mask in range(len(problem.masks))]
    needs = [_needs(cells, part) for part in slices]
    shards = _shards(homes, cells, needs, groups, problem.topology.inter_sp)
    nodes = problem.node_of[:: problem.topology.intra_sp]
    made = tuple(_schedule(shards, cut_blocks(shards, part), cells, groups, nodes) for part in slices)
    return Strategy(shards, made, made, groups, relay=True, ahead=AHEAD)


def _same_for_all_groups(table: Table, groups: int) -> bool:
    """Whether every row's ranks are the same for all head groups."""
    first = table.cells[table.cells[:, 4] == 0][:, [0, 1, 2, 3, 5]]
    first = first[np.lexsort(first.T)]
    for g in range(1, groups):
        other = table.cells[table.cells[:, 4] == g][:, [0, 1, 2, 3, 5]]
        if not np.array_equal(other[np.lexsort(other.T)], first):
            return False
    return True


def _needs(cells: np.ndarray, slices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List the keys that each cell sees: (first, stop, cell)."""
    rows, row_of = distinct_rows(cells[:, :2])
    pieces, strip, _ = cut(slices, rows, np.array([[0, 1 << 40]]))
    by_strip = np.argsort(row_of, kind="stable")
    borders = np.searchsorted(row_of[by_strip], np.arange(len(rows) + 1))
    piece, at = ranges(borders[strip], borders[strip + 1])
    cell = by_strip[at]
    first = np.maximum(pieces[piece, K0], cells[cell, 2])
    stop = np.minimum(pieces[piece, K1], cells[cell, 3])
    kept = first < stop
    return first[kept], stop[kept], cell[kept]


def distinct_rows(spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort out equal spans: (spans [m, 2] by position, which of them each is [n])."""
    if not len(spans):
        return spans.reshape(0, 2), np.zeros(0, np.int64)
    order = np.lexsort([spans[:, 1], spans[:, 0]])
    spans = spans[order]
    fresh = np.r_[True, (spans[1:] != spans[:-1]).any(axis=1)]
    which = np.empty(len(order), np.int64)
    which[order] = np.cumsum(fresh) - 1
    return spans[fresh], which


def _shards(
    homes: np.ndarray,
    cells: np.ndarray,
    needs: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    groups: int,
    num_ranks: int,
) -> Shards:
    """Cut the tokens wherever home, rank of their queries or ranks that need their keys change; join what is alike.

    What a tile's columns or rows cut is not joined across the cut, so that a block lies in one cell.
    """
    first, stop, cell = (np.concatenate(parts) for parts in zip(*needs))
    away = _away(homes, first, stop, cells[cell, 5])
    borders = np.unique(np.concatenate([homes[:, :2].ravel(), cells[:, :2].ravel(), cells[cells[:, 6] > 0, 2:4].ravel(),
                                        first[away], stop[away]]))  # fmt: skip
    num_atoms = max(len(borders) - 1, 0)
    home = homes[np.searchsorted(homes[:, 0], borders[:num_atoms], side="right") - 1, 2]
    # A cell sees a few keys of an atom or all of them: what lies within one home and rank was not cut.
    need, atom = ranges(np.searchsorted(borders, first, side="right") - 1, np.searchsorted(borders, stop))
    who = cells[cell[need], 4] * num_ranks + cells[cell[need], 5]
    marks = [atom * 4 * (num_ranks * groups) + who]
    strip, atom = ranges(*(np.searchsorted(borders, cells[:, side]) for side in (0, 1)))
    marks.append((atom * 4 + 1) * (num_ranks * groups) + cells[strip, 4] * num_ranks + cells[strip, 5])
    key, _ = distinct(np.concatenate(marks))
    mark = np.zeros(num_atoms, np.uint64)
    atom, who = np.divmod(key, 4 * num_ranks * groups)
    np.add.at(mark, atom, scramble(who))
    tiled = np.flatnonzero(cells[:, 6] > 0)
    for side in (0, 2):
        strip, atom = ranges(*(np.searchsorted(borders, cells[tiled, side + end]) for end in (0, 1)))
        np.add.at(mark, atom, scramble((cells[tiled[strip], side] + 1) * 8 + side))
    return grouped(borders, home, mark)


def _away(homes: np.ndarray, first: np.ndarray, stop: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Tell which key ranges are not all at home on their rank, in one span of it."""
    at = np.searchsorted(homes[:, 0], first, side="right") - 1
    return (homes[at, 2] != rank) | (homes[at, 1] < stop)


def _schedule(shards: Shards, blocks: Blocks, cells: np.ndarray, groups: int, node_of: np.ndarray) -> Schedule:
    """Place every block (and head group) on the rank of its cell, and in a stage."""
    begin = shards.spans[shards.offsets[:-1], 0] if len(shards) else np.zeros(0, np.int64)
    block = np.repeat(np.arange(len(blocks)), groups)
    group = np.tile(np.arange(groups), len(blocks))
    q, kv = blocks.q[block], blocks.kv[block]
    cells = cells[np.lexsort([cells[:, 2], cells[:, 0], cells[:, 4]])]
    reach = int(cells[:, 1].max(initial=0)) + 1
    rows = cells[:, 4] * reach + cells[:, 0]
    last = np.searchsorted(rows, group * reach + begin[q], side="right") - 1
    strip_first = np.searchsorted(rows, rows[last])
    # Within a strip, the last cell whose keys begin at or before the block's.
    keys = rows * reach + cells[:, 2]
    at = np.searchsorted(keys, rows[last] * reach + begin[kv], side="right") - 1
    rank = cells[np.clip(at, strip_first, last), 5]
    stage = _stages(rank, shards.home[q], shards.home[kv], kv, block, blocks.area[block], node_of)
    return Schedule(blocks, block, group, rank, stage)


def _stages(
    rank: np.ndarray,
    q_home: np.ndarray,
    kv_home: np.ndarray,
    kv: np.ndarray,
    block: np.ndarray,
    area: np.ndarray,
    node_of: np.ndarray,
) -> np.ndarray:
    """Spread each rank's blocks over the stages: what is at home first, then what comes from the node, then the rest.

    Blocks with the same keys stay together, and a block's head groups are never parted, so that what they do alike can
    be done at once. Blocks with rows from other nodes wait for stage 2, as rows may come over a relay.
    """
    stage = np.zeros(len(rank), np.int64)
    far = (node_of[q_home] != node_of[rank]) | (node_of[kv_home] != node_of[rank])
    local = (q_home == rank) & (kv_home == rank)
    away = np.flatnonzero(~local)
    away = away[np.lexsort([key[away] for key in (kv, far, rank)])]
    if not len(away):
        return stage
    done = np.cumsum(area[away]) - area[away]
    first = np.searchsorted(rank[away], rank[away])
    stop = np.searchsorted(rank[away], rank[away], side="right") - 1
    total = done[stop] + area[away][stop] - done[first]
    fresh = np.append(True, (np.diff(block[away]) != 0) | (np.diff(rank[away]) != 0))
    begun = done[np.maximum.accumulate(np.where(fresh, np.arange(len(away)), 0))]
    stage[away] = 1 + (begun - done[first]) * NUM_STAGES // np.maximum(total, 1)
    stage[away] = np.maximum(stage[away], np.where(far[away], 2, 1))
    return stage
