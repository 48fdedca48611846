"""Levels: documents to nodes, then what each node got to its ranks; at last who computes and holds what, as a table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hsap.loops import inner, loop
from hsap.planners.nested.cost import BIN, END, HEADS, HOME, ORDER, OWN, WIDTH, Documents, Rules, column_range, tidy

PIECE_ROWS = 32
"""Rows of KV that a piece more is worth: a cut makes shards, transfers and kernel calls."""


class Table(NamedTuple):
    """Who holds and who computes, in token positions.

    homes: int64 [n, 3], first row, last row + 1, rank. cells: int64 [m, 7], first and last + 1 of query rows, then of
    keys, head group, rank, and 1 + the column where keys are cut into several, else 0.
    """

    homes: np.ndarray
    cells: np.ndarray


def whole_documents(length: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Make the template of a level that has everything to place: (pieces [n, 1, WIDTH], counts [n])."""
    pieces = np.zeros((len(length), 1, WIDTH), np.int64)
    pieces[:, 0, END] = length
    pieces[:, 0, [OWN, ORDER]] = 1
    pieces[:, 0, HEADS] = (1 << groups) - 1
    return pieces, np.ones(len(length), np.int64)


@loop
def inside(pieces: np.ndarray, counts: np.ndarray, x: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make the template of bin x of a placement: (pieces, counts, index of the documents that it has a part in).

    Rows of other bins stay in the lists as order 0, so that keys are counted rightly.
    """
    n, num_parts, places = 0, 0, 1
    for d in range(len(counts)):
        num_parts, mine = 0, False
        for i in range(counts[d]):
            num_parts += max(pieces[d, i, ORDER], 1)
            mine = mine or _has(pieces[d, i], x)
        if mine:
            n, places = n + 1, max(places, num_parts)
    out = np.zeros((n, places, pieces.shape[2]), np.int64)
    sizes, which = np.zeros(n, np.int64), np.zeros(n, np.int64)
    num = 0
    for d in range(len(counts)):
        mine = False
        for i in range(counts[d]):
            mine = mine or _has(pieces[d, i], x)
        if mine:
            sizes[num], which[num] = _inside(pieces[d], counts[d], x, groups, out[num]), d
            num += 1
    return out, sizes, which


@inner
def _has(piece: np.ndarray, x: int) -> bool:
    """Whether bin x owns or computes rows of a piece."""
    if piece[ORDER] == 1:
        return piece[BIN] == x or piece[HOME] == x
    return (piece[BIN : BIN + piece[ORDER]] == x).any()


@inner
def _inside(pieces: np.ndarray, count: int, x: int, groups: int, out: np.ndarray) -> int:
    """Write the template of bin x for one document: the number of its pieces."""
    begin, at = 0, 0
    for i in range(count):
        piece = pieces[i]
        parts = max(piece[ORDER], 1)
        for j in range(parts):
            part = out[at]
            part[END] = begin + (piece[END] - begin) * (j + 1) // parts
            if piece[ORDER] == 1:
                part[OWN] = piece[OWN] and piece[HOME] == x
                part[HEADS] = piece[HEADS] if piece[BIN] == x else 0
            elif piece[ORDER] > 1:
                part[OWN] = piece[BIN + j] == x
                per = groups // piece[ORDER]
                for k in range(piece[ORDER]):
                    if piece[BIN + k] == x:
                        part[HEADS] = ((1 << per) - 1) << (k * per)
            part[ORDER] = 1 if part[OWN] or part[HEADS] else 0
            at += 1
        begin = piece[END]
    return tidy(out, at)


def part_of_documents(documents: Documents, which: np.ndarray) -> Documents:
    """Pick documents by index."""
    return documents._replace(length=documents.length[which], table=documents.table[which])


@loop
def tabulate(
    pieces: np.ndarray, counts: np.ndarray, starts: np.ndarray, lengths: np.ndarray, groups: int, first_rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Write a placement on ranks as homes and cells, see `Table`. starts: first token of each document."""
    num_homes, num_cells = 0, 0
    for d in range(len(counts)):
        for i in range(counts[d]):
            num_homes += pieces[d, i, ORDER]
            num_cells += pieces[d, i, ORDER] * groups
    homes, cells = np.zeros((num_homes, 3), np.int64), np.zeros((num_cells, 7), np.int64)
    h, c = 0, 0
    for d in range(len(counts)):
        begin = 0
        for i in range(counts[d]):
            piece = pieces[d, i]
            end, order, at = piece[END], piece[ORDER], starts[d]
            parts = min(max(order, 1), groups)
            columns, per_part = max(order, 1) // parts, groups // parts
            for j in range(order):
                x = first_rank + piece[BIN + j]
                if piece[OWN]:
                    homes[h, 0] = at + begin + (end - begin) * j // order
                    homes[h, 1] = at + begin + (end - begin) * (j + 1) // order
                    homes[h, 2] = first_rank + piece[HOME] if order == 1 else x
                    h += 1
                lo, hi = 0, lengths[d]
                if columns > 1:
                    lo, hi = column_range(begin, end, j // parts, columns)
                    hi = lengths[d] if j // parts == columns - 1 else hi
                for g in range(j % parts * per_part, (j % parts + 1) * per_part):
                    if piece[HEADS] >> g & 1:
                        cells[c, 0], cells[c, 1], cells[c, 2], cells[c, 3] = at + begin, at + end, at + lo, at + hi
                        cells[c, 4], cells[c, 5], cells[c, 6] = g, x, 1 + j // parts if columns > 1 else 0
                        c += 1
            begin = end
    return homes[:h], cells[:c]


def rules_of(costs: tuple[float, float, float], groups: int, caps: np.ndarray, peak: float) -> Rules:
    """Judge by bytes. caps: [2, bins]. A bin's tokens as KV are the unit that excess is priced in."""
    kv, q, o = (float(c) for c in costs)
    return Rules(
        kv,
        q,
        o,
        groups,
        np.asarray(caps, np.float64),
        max(float(caps[1].mean()) * kv * groups, 1.0),
        peak,
        PIECE_ROWS * kv * groups,
    )
