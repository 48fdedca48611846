"""Dataflow: what is computed is what the problem asks for, and every value is whole where it is read.

Inputs are copied freely, but each buffer is written once and then only read. Partial results are never copied, only
passed on: an accumulator is taken out once, after the last addition; what was taken is written, sent, received and
folded into another accumulator once; outputs take the last of them. So whatever is added anywhere arrives once at the
output of its rows and heads, as moves keep both, and it suffices that every visible pair is added once, somewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hsap.ir.effects import ACCESS, NUM_OPERANDS
from hsap.ir.program import KV_ROLES, PARTIAL_ROLES, Access, Op, Role, Space
from hsap.ir.slice import cut
from hsap.ir.span import ranges
from hsap.loops import loop
from hsap.verify.columns import ACC, BUF, HEADS, OP, RANK, ROLE, ROWS, SLICES, SPACE, slice_at
from hsap.verify.fingerprint import MEMORY, PairWeights, random_sums
from hsap.verify.stream import Found, Stream, at, at_buffers

_ROLES = np.arange(-1, len(Role) - 1)
_IS_KV, _IS_PARTIAL = np.isin(_ROLES, KV_ROLES), np.isin(_ROLES, PARTIAL_ROLES)
"""Tables over all roles, to be indexed by role + 1."""


def pairs(s: Stream) -> Iterator[Found]:
    """The slice table has every visible pair of the problem's mask once and no other; see `fingerprint`."""
    if s.direction == 1:  # both directions attend one table
        return
    wanted, table = s.plan.problem.slices(s.mask), s.slices
    weights = PairWeights(s.plan.problem.layout.num_tokens, wanted, MEMORY.take)
    sums, known = weights.over(table)
    if not known.all():
        bad = int(np.argmin(known))
        yield Found(f"slice {bad}, {_show(table[bad])}, is cut along a diagonal that the mask doesn't have there",
                    _attending(s, bad))  # fmt: skip
        return
    expected = weights.over(wanted)[0].sum(dtype=np.uint64)
    have, want = _total_area(table), _total_area(wanted)
    if sums.sum(dtype=np.uint64) != expected or have != want:
        bad, why = _culprit(table, wanted, sums, weights)
        where = "" if bad is None else f"; slice {bad}, {_show(table[bad])}, {why}"
        yield Found(f"the slices' {have} pairs aren't the mask's {want} visible pairs, each once{where}",
                    None if bad is None else _attending(s, bad))  # fmt: skip


def _show(row: np.ndarray) -> str:
    q0, q1, k0, k1, lo, hi = row.tolist()
    return f"q {q0}..{q1} k {k0}..{k1} lo {lo} hi {hi}"


def _total_area(table: np.ndarray) -> int:
    """Count pairs without overflow: halves of 24 bits are summed apart."""
    high, low = _area_halves(np.ascontiguousarray(table.T))
    return (int(high) << 24) + int(low)


@loop
def _area_halves(columns: np.ndarray) -> tuple[int, int]:
    """Sum the pairs of canonical slices, row by row of their bends as `hsap.ir.slice.area`, in halves of 24 bits."""
    high, low = 0, 0
    for i in range(columns.shape[1]):
        q0, q1, k0, k1, lo, hi = slice_at(columns, i)
        bend_hi, bend_lo = min(max(k1 - 1 - hi, q0), q1), min(max(k0 - lo, q0), q1)
        last = (q0 + bend_hi - 1) * (bend_hi - q0) // 2 + hi * (bend_hi - q0) + (k1 - 1) * (q1 - bend_hi)
        first = k0 * (bend_lo - q0) + (bend_lo + q1 - 1) * (q1 - bend_lo) // 2 + lo * (q1 - bend_lo)
        pairs_of = last - first + (q1 - q0)
        high += pairs_of >> 24
        low += pairs_of & ((1 << 24) - 1)
    return high, low


def _culprit(table: np.ndarray, wanted: np.ndarray, sums: np.ndarray, weights: PairWeights) -> tuple[int | None, str]:
    """Find a slice to blame, on the error path: one with pairs the mask lacks, or one that comes twice."""
    order = np.lexsort([table[:, 2], table[:, 0]])
    again = np.flatnonzero((np.diff(table[order], axis=0) == 0).all(axis=1))
    if len(again):
        return int(order[again[0] + 1]), "is there twice"
    # Only as many as a reader waits for: each is cut out of the whole mask.
    for i, row in enumerate(table[: min(1 << 10, (1 << 20) // (len(wanted) + 1))]):
        inside = wanted.copy()
        inside[:, 4] = np.maximum(inside[:, 4], row[4])
        inside[:, 5] = np.minimum(inside[:, 5], row[5])
        visible, known = weights.over(cut(inside, row[None, 0:2], row[None, 2:4])[0])
        if known.all() and visible.sum(dtype=np.uint64) != sums[i]:
            return i, "has pairs that the mask hides"
    return None, ""


def _attending(s: Stream, slice_index: int) -> int | None:
    first, stop = s.programs.slices.T
    entries = np.flatnonzero(s.index == slice_index)[:1]
    found = np.flatnonzero((first <= entries) & (entries < stop)) if len(entries) else entries
    return int(found[0]) if len(found) else None


def blocks(s: Stream) -> Iterator[Found]:
    """Every slice is attended once for every query head, over all ranks together."""
    heads = random_sums(s.plan.problem.heads.num_q_heads)
    if not _all_attended(s.code, s.index, s.shares, heads, len(s.slices)):
        yield from _unattended(s)


@loop
def _all_attended(code: np.ndarray, index: np.ndarray, shares: Any, heads: Any, num_slices: int) -> bool:
    """Whether every slice is attended for every query head once, by number and by random sum as for pairs.

    heads: sums of random weights before each query head. Needs `structure.attended`.
    """
    # First by range of the index, which the ranks of an intra group share.
    stop_at, of_range = np.zeros(len(index), np.int64), np.zeros(len(index), np.int64)
    weight_of_range = np.zeros(len(index), np.uint64)
    for i in range(code.shape[1]):
        if (code[OP, i] == Op.ATTEND or code[OP, i] == Op.ATTEND_GRAD) and code[HEADS + 1, i] > 0:
            first = code[SLICES, i]
            low = code[HEADS, i] + shares[code[RANK, i] % len(shares), 0]
            stop_at[first] = code[SLICES + 1, i]
            of_range[first] += code[HEADS + 1, i]
            weight_of_range[first] += heads[low + code[HEADS + 1, i]] - heads[low]
    count, weight = np.zeros(num_slices, np.int64), np.zeros(num_slices, np.uint64)
    for first in range(len(index)):
        for entry in range(first, stop_at[first]):
            count[index[entry]] += of_range[first]
            weight[index[entry]] += weight_of_range[first]
    wrong = 0
    for i in range(num_slices):
        wrong += count[i] != len(heads) - 1 or weight[i] != heads[-1]
    return wrong == 0


def _unattended(s: Stream) -> Iterator[Found]:
    """Say which slices aren't attended, or for which heads not once."""
    p, problem = s.programs, s.plan.problem
    index = s.where(Op.ATTEND, Op.ATTEND_GRAD)
    index = index[p.heads[index, 1] > 0]
    owner, entry = ranges(*p.slices.take(index, axis=0).astype(np.int64).T)
    index, which = index[owner], s.index[entry]
    missing = np.flatnonzero(np.bincount(which, minlength=len(s.slices)) == 0)
    if len(missing):
        yield Found(f"slice {missing[0]}, {_show(s.slices[missing[0]])}, is attended by no rank")
        return
    low = p.heads[index, 0] + s.shares[s.rank[index] % s.plan.topology.intra_sp, 0]
    order = np.argsort(which * (problem.heads.num_q_heads + 1) + low, kind="stable")
    index, which, low = index[order], which[order], low[order]
    high = low + p.heads[index, 1]
    fresh = np.r_[True, which[1:] != which[:-1]][: len(which)]
    last = np.r_[fresh[1:], True][: len(which)]
    before = np.where(fresh, 0, np.r_[0, high[:-1]][: len(which)])
    say = "a slice of {} is attended for query heads {}..{}, but {} heads are covered before them"
    yield from at(
        index[low != before],
        lambda i: say.format(p.slices[i], *(_span(s, i)), "not all" if _span(s, i)[0] else "some"),
    )
    short = index[last & (high != problem.heads.num_q_heads)]
    yield from at(short, lambda i: f"a slice of {p.slices[i]} is attended for query heads up to {_span(s, i)[1]} only")


def _span(s: Stream, i: int) -> tuple[int, int]:
    first = int(s.programs.heads[i, 0] + s.shares[s.rank[i] % s.plan.topology.intra_sp, 0])
    return first, first + int(s.programs.heads[i, 1])


def moved_once(s: Stream) -> Iterator[Found]:
    """What is written is written once and wholly; partial results are taken out once and wholly."""
    heads = s.plan.problem.heads
    spans = random_sums(len(s.plan.spans))
    why = _unfilled(s.code, s.held, spans, random_sums(max(heads.num_q_heads, heads.num_kv_heads)),
                    s.last, NUM_OPERANDS, ACCESS, _IS_KV, _IS_PARTIAL)  # fmt: skip
    if not why.any():
        return
    say = "{} isn't written exactly once in all its rows and heads"
    yield from at_buffers(s, np.flatnonzero(why & 1), lambda i: say.format(s.describe(i)))
    say = "{} holds a partial result that isn't passed on exactly once in all its rows and heads"
    yield from at_buffers(s, np.flatnonzero(why & 2), lambda i: say.format(s.describe(i)))


@loop
def _unfilled(
    code: np.ndarray,
    held: np.ndarray,
    spans: np.ndarray,
    heads: np.ndarray,
    last: np.ndarray,
    num_operands: np.ndarray,
    access: np.ndarray,
    is_kv: np.ndarray,
    is_partial: np.ndarray,
) -> np.ndarray:
    """Buffers that moves don't fill or empty exactly once: uint8 [n], 1 not written, 2 not passed on.

    Rectangles of spans × heads fill a buffer once if their areas and their random sums add up to its own, as for pairs.
    spans, heads: sums of random weights before each. Needs all of `structure`.
    """
    num_buffers = held.shape[1]
    weights, areas = np.zeros((2, num_buffers), np.uint64), np.zeros((2, num_buffers), np.int64)
    for i in range(code.shape[1]):
        op = code[OP, i]
        for k in range(num_operands[op]):
            buffer = code[BUF + k, i]
            role, passed_on = held[ROLE, buffer], access[op, k] == Access.READ
            if role == Role.NONE or access[op, k] == Access.ADD:
                continue
            if passed_on and not (is_partial[role + 1] and held[SPACE, buffer] == Space.ARENA):
                continue
            # An AllToAll takes or fills the whole buffer; its `rows` are the column's.
            whole = op == Op.ALL_TO_ALL
            weight, area = _rectangle(held if whole else code, buffer if whole else i, spans, heads, is_kv[role + 1])
            weights[int(passed_on), buffer] += weight
            areas[int(passed_on), buffer] += area
    why = np.zeros(num_buffers, np.uint8)
    for b in range(num_buffers):
        role, space = held[ROLE, b], held[SPACE, b]
        if role == Role.NONE:
            continue
        touched = last[b] >= 0
        weight, area = _rectangle(held, b, spans, heads, is_kv[role + 1])
        must = (touched or space == Space.KEPT or space == Space.OUTPUT) and space != Space.INPUT and not held[ACC, b]
        if must and (weights[0, b] != weight or areas[0, b] != area):
            why[b] |= 1
        must = touched and is_partial[role + 1] and space == Space.ARENA
        if must and (weights[1, b] != weight or areas[1, b] != area):
            why[b] |= 2
    return why


@loop
def _rectangle(table: np.ndarray, i: int, spans: np.ndarray, heads: np.ndarray, kv: Any) -> tuple[Any, int]:
    """Weight, modulo 2^64, and area of the rows and (query or KV) heads of an instruction or a buffer."""
    side = HEADS + 2 if kv else HEADS
    first, count = table[side, i], table[side + 1, i]
    start, stop = table[ROWS, i], table[ROWS + 1, i]
    return (spans[stop] - spans[start]) * (heads[first + count] - heads[first]), (stop - start) * count


def in_time(s: Stream) -> Iterator[Found]:
    """Nothing is read before it is complete, nor changed after it is read or while it is on its way."""
    i, operand, done = _early(s.code, s.held.shape[1], s.until, NUM_OPERANDS, ACCESS)
    # Shown at the read, or at the change if that comes later and is all there is to blame.
    if operand >= 0:
        say = f"{Op(s.programs.op[i]).name} reads {s.describe(s.code[BUF + operand, i])} before its last change is over"
        yield Found(f"{say} (instruction {_local(s, done)})", i)


@loop
def _early(
    code: np.ndarray, num_buffers: int, until: np.ndarray, num_operands: np.ndarray, access: np.ndarray
) -> tuple[int, int, int]:
    """First read (instruction, operand) that isn't after the last change, and when that is; operand -1: none is so."""
    done = np.full(num_buffers, -1)
    for i in range(code.shape[1]):
        for k in range(num_operands[code[OP, i]]):
            if access[code[OP, i], k] != Access.READ:
                done[code[BUF + k, i]] = max(done[code[BUF + k, i]], until[i])
    for i in range(code.shape[1]):
        for k in range(num_operands[code[OP, i]]):
            if access[code[OP, i], k] == Access.READ and i <= done[code[BUF + k, i]]:
                return i, k, done[code[BUF + k, i]]
    return 0, -1, -1


def _local(s: Stream, index: int) -> int:
    return index - int(s.programs.offsets[s.rank[index]])


RULES = (pairs, blocks, moved_once, in_time)
