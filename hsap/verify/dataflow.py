"""Dataflow: what is computed is what the problem asks for, and every value is whole where it is read.

Inputs are copied freely, but each buffer is written once and then only read. Partial results are never copied, only
passed on: an accumulator is taken out once, after the last addition; what was taken is written, sent, received and
folded into another accumulator once; outputs take the last of them. So whatever is added anywhere arrives once at the
output of its rows and heads, as moves keep both, and it suffices that every visible pair is added once, somewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hsap.ir.program import KV_ROLES, PARTIAL_ROLES, Access, Op, Role, Space
from hsap.ir.slice import area, cut
from hsap.verify.fingerprint import PairWeights, prefix, random_weights
from hsap.verify.stream import Found, Stream, at, at_buffers
from hsap.verify.structure import distinct_ranges, share_table


def pairs(s: Stream) -> Iterator[Found]:
    """The slice table has every visible pair of the problem's mask once and no other; see `fingerprint`."""
    if s.direction == 1:  # both directions attend one table
        return
    wanted, table = s.plan.problem.slices(s.mask), s.slices
    weights = PairWeights(s.plan.problem.layout.num_tokens, wanted)
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
    pairs_of = area(table)
    return (int((pairs_of >> 24).sum()) << 24) + int((pairs_of & ((1 << 24) - 1)).sum())


def _culprit(table, wanted, sums, weights: PairWeights) -> tuple[int | None, str]:
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
    ranges = s.programs.slices
    found = np.flatnonzero((ranges[:, 0] <= slice_index) & (slice_index < ranges[:, 1]))
    return int(found[0]) if len(found) else None


def blocks(s: Stream) -> Iterator[Found]:
    """Every slice is attended once for every query head, over all ranks together."""
    p, problem = s.programs, s.plan.problem
    index = s.where(Op.ATTEND, Op.ATTEND_GRAD)
    index = index[p.heads[index, 1] > 0]
    first, stop = p.slices.take(index, axis=0).astype(np.int64).T
    ranges, which = distinct_ranges(first, stop, len(s.slices))
    borders = np.concatenate([[0], ranges[:, 1]])
    gaps = np.flatnonzero(borders != np.append(ranges[:, 0], len(s.slices)))
    if len(gaps):
        missing = int(borders[gaps[0]])
        yield Found(f"slice {missing}, {_show(s.slices[missing])}, is attended by no rank")
        return
    low = p.heads[index, 0] + share_table(s)[s.rank[index] % s.plan.topology.intra_sp, 0]
    order = np.argsort(which * (problem.heads.num_q_heads + 1) + low, kind="stable")
    index, which, low = index[order], which[order], low[order]
    high = low + p.heads[index, 1]
    fresh = np.r_[True, which[1:] != which[:-1]][: len(which)]
    last = np.r_[fresh[1:], True][: len(which)]
    before = np.where(fresh, 0, np.r_[0, high[:-1]][: len(which)])
    say = "slices {} are attended for query heads {}..{}, but {} heads are covered before them"
    yield from at(
        index[low != before],
        lambda i: say.format(p.slices[i], *(_span(s, i)), "not all" if _span(s, i)[0] else "some"),
    )
    short = index[last & (high != problem.heads.num_q_heads)]
    yield from at(short, lambda i: f"slices {p.slices[i]} are attended for query heads up to {_span(s, i)[1]} only")


def _span(s: Stream, i: int) -> tuple[int, int]:
    first = int(s.programs.heads[i, 0] + share_table(s)[s.rank[i] % s.plan.topology.intra_sp, 0])
    return first, first + int(s.programs.heads[i, 1])


class _Cover:
    """Checks that rectangles of spans × heads fill each buffer once, by area and by a random sum as for pairs."""

    def __init__(self, s: Stream) -> None:
        self.s = s
        heads = s.plan.problem.heads
        self.spans = prefix(random_weights(len(s.plan.spans)))
        self.heads = prefix(random_weights(max(heads.num_q_heads, heads.num_kv_heads)))
        b = s.buffers
        self.whole = self._weigh(np.maximum(b.rows, 0), b.heads, b.role)

    def _weigh(self, rows, heads, role) -> tuple[np.ndarray, np.ndarray]:
        """Weight and area of rectangles, both modulo 2^64: uint64 [n] and int64 [n]."""
        is_kv = np.isin(role, KV_ROLES)
        first = np.where(is_kv, heads[:, 2], heads[:, 0]).astype(np.int64)
        count = np.where(is_kv, heads[:, 3], heads[:, 1]).astype(np.int64)
        weight = (self.spans[rows[:, 1]] - self.spans[rows[:, 0]]) * (self.heads[first + count] - self.heads[first])
        return weight, (rows[:, 1].astype(np.int64) - rows[:, 0]) * count

    def broken(self, chosen: np.ndarray, buffers: np.ndarray) -> np.ndarray:
        """Give those of `buffers` that the chosen touches don't fill exactly. chosen: indices of touches."""
        s, b = self.s, self.s.buffers
        at_, buffer = s.touched.at[chosen], s.touched.buffer[chosen]
        # An AllToAll takes or fills the whole buffer; its `rows` are the column's.
        whole = s.programs.op[at_] == Op.ALL_TO_ALL
        rows, heads = s.programs.rows.take(at_, axis=0), s.programs.heads.take(at_, axis=0)
        rows[whole], heads[whole] = b.rows[buffer[whole]], b.heads[buffer[whole]]
        wrong = np.zeros(len(buffers), bool)
        for whole_sum, part in zip(self.whole, self._weigh(rows, heads, b.role[buffer])):
            total = np.zeros_like(whole_sum)
            np.add.at(total, buffer, part)
            wrong |= total[buffers] != whole_sum[buffers]
        return buffers[wrong]


def moved_once(s: Stream) -> Iterator[Found]:
    """What is written is written once and wholly; partial results are taken out once and wholly."""
    b, t = s.buffers, s.touched
    touched = np.zeros(len(b), bool)
    touched[t.buffer] = True
    scratch, cover = b.role == Role.NONE, _Cover(s)
    writes = np.flatnonzero((t.access == Access.WRITE) & ~scratch[t.buffer])
    must = touched | (b.space == Space.KEPT) | (b.space == Space.OUTPUT)
    must &= (b.space != Space.INPUT) & ~b.acc & ~scratch
    bad = cover.broken(writes, np.flatnonzero(must))
    yield from at_buffers(s, bad, lambda i: f"{s.describe(i)} isn't written exactly once in all its rows and heads")
    partial = np.isin(b.role, PARTIAL_ROLES) & (b.space == Space.ARENA)
    reads = np.flatnonzero((t.access == Access.READ) & partial[t.buffer])
    bad = cover.broken(reads, np.flatnonzero(partial & touched))
    say = "{} holds a partial result that isn't passed on exactly once in all its rows and heads"
    yield from at_buffers(s, bad, lambda i: say.format(s.describe(i)))


def in_time(s: Stream) -> Iterator[Found]:
    """Nothing is read before it is complete, nor changed after it is read or while it is on its way."""
    b, t, n = s.buffers, s.touched, len(s.programs)
    is_read = t.access == Access.READ
    done, read = np.full(len(b), -1), np.full(len(b), n)
    np.maximum.at(done, t.buffer[~is_read], t.end[~is_read])
    np.minimum.at(read, t.buffer[is_read], t.begin[is_read])
    early = np.flatnonzero(is_read & (t.begin <= done[t.buffer]))
    # Shown at the read, or at the change if that comes later and is all there is to blame.
    for i in early[:1].tolist():
        say = f"{Op(s.programs.op[t.at[i]]).name} reads {s.describe(t.buffer[i])} before its last change is over"
        yield Found(f"{say} (instruction {_local(s, int(done[t.buffer[i]]))})", int(t.at[i]))


def _local(s: Stream, index: int) -> int:
    return index - int(s.programs.offsets[s.rank[index]])


RULES = (pairs, blocks, moved_once, in_time)
