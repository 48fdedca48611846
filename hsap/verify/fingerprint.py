"""Fingerprints: is every visible pair there once? By one sum of random numbers instead of a look at every pair.

Draw weights a(q) and b(k) at random from Z/2^64 and compare the sum of a(q) b(k) over the pairs of two slice tables.
Let m(q, k) be how often the one table has the pair more than the other. If m isn't zero but the sum is, luck has hit a
bilinear form in independent uniform weights: with 2^t the power of two that divides all m, and 2^s what the inner sums
have more, the chance is at most the sum over s of 2^-s 2^-(64 - t - s), below 2^-(57 - t). Where the second table has
no pair twice and both have equally many pairs in all, some m is -1, so t = 0: a wrong table passes with a chance below
2^-57. The generator is seeded by the operating system at each verification, so no file can be made to fit the weights.

The sum over a slice is closed form in prefix sums A and B of the weights: a row that sees keys [u, v) adds
a(q) (B(v) - B(u)), and u and v are constant or run along a diagonal; sums along the diagonals are prefix sums too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hsap.ir.slice import HI, K0, K1, LO, Q0, Q1
from hsap.loops import inner, loop
from hsap.verify.columns import slice_at

GAP = 16
"""Rows between two runs of one diagonal that are walked too: cheaper than a run of its own for each document."""


class _Memory(threading.local):
    """Tables of one number a token that a thread uses again: fresh pages cost several times what is done in them."""

    def __init__(self) -> None:
        self.tables: dict[str, np.ndarray] = {}

    def take(self, name: str, count: int) -> np.ndarray:
        """Give the table of that name, of any content: uint64 [count]. It is the caller's until the next call."""
        table = self.tables.get(name)
        if table is None or len(table) < count:
            table = np.empty(count, np.uint64)
            if count <= MOST_KEPT:
                self.tables[name] = table
        return table[:count]


MEMORY = _Memory()
MOST_KEPT = 1 << 21
"""Longest table that is kept for the next verification: 16 MiB."""


def fresh(name: str, count: int) -> np.ndarray:
    """Give a new table, of any content: uint64 [count]."""
    return np.empty(count, np.uint64)


def random_sums(count: int, out: np.ndarray | None = None) -> np.ndarray:
    """Sums of the first i of `count` uniform weights in Z/2^64, modulo 2^64: uint64 [count + 1].

    The generator is seeded afresh by the operating system. out: where to put them.
    """
    out = np.empty(count + 1, np.uint64) if out is None else out
    _random_sums(np.frombuffer(bytearray(os.urandom(32)), np.uint64), out)
    return out


@loop
def _random_sums(state: np.ndarray, sums: np.ndarray) -> None:
    """Draw by xoshiro256++ (Blackman, Vigna 2019) and add up. state: uint64 [4], not all zero. Fills `sums`."""
    total = np.uint64(0)
    s0, s1, s2, s3 = state[0], state[1], state[2], state[3]
    for i in range(len(sums)):
        sums[i] = total
        total += _rotate(s0 + s3, np.uint64(23)) + s0
        carried = s1 << np.uint64(17)
        s2 ^= s0
        s3 ^= s1
        s1 ^= s2
        s0 ^= s3
        s2 ^= carried
        s3 = _rotate(s3, np.uint64(45))


@inner
def _rotate(x: np.uint64, by: np.uint64) -> np.uint64:
    return (x << by) | (x >> (np.uint64(64) - by))


class PairWeights:
    """Weights of all (q, k) pairs, able to sum over slices that cut along the diagonals of a mask's own slices.

    take: where the tables come from; with `MEMORY.take` the thread's next ones overwrite them.
    """

    def __init__(self, num_tokens: int, mask: np.ndarray, take: Callable[[str, int], np.ndarray] = fresh) -> None:
        self.sum_a, self.sum_b = (random_sums(num_tokens, take(name, num_tokens + 1)) for name in ("a", "b"))
        self.num_tokens, self.take = num_tokens, take
        self._walk(np.concatenate(diagonals(mask)))

    def _walk(self, runs: np.ndarray) -> None:
        """Sum a(q) B(q + e) along the rows [first, stop) of every run (e, first, stop); near runs of one e are joined.

        Joining across a gap is safe, as q + e is in range at both its sides, and leaves few runs for all documents.
        """
        runs = runs[runs[:, 1] < runs[:, 2]]
        runs = runs[np.lexsort([runs[:, 1], runs[:, 0]])]
        if len(runs):
            # Running maximum within one diagonal: shifted apart, rows of different diagonals never meet.
            number = np.cumsum(np.r_[0, runs[1:, 0] != runs[:-1, 0]]) * (self.num_tokens + 1 + GAP)
            reach = np.maximum.accumulate(runs[:, 2] + number)
            fresh = np.r_[True, runs[1:, 1] + number[1:] > reach[:-1] + GAP]
            stop = (reach - number)[np.r_[fresh[1:], True]]
            runs = np.stack([runs[fresh, 0], runs[fresh, 1], stop], axis=1)
        self.runs = runs
        self.starts = np.cumsum(np.r_[0, runs[:, 2] - runs[:, 1]])
        self.sums = self.take("runs", int(self.starts[-1]) + 1)
        _run_sums(runs, self.sum_a, self.sum_b, self.sums)

    def over(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum the weights of canonical slices' pairs: (sums uint64 [n], False where a cut isn't the mask's own [n])."""
        columns = np.ascontiguousarray(table.T)
        keys = self.runs[:, 0] * (self.num_tokens + 1) + self.runs[:, 1]
        out, known = np.empty(len(table), np.uint64), np.empty(len(table), bool)
        _weigh(columns, self.runs, keys, self.starts, self.sums, self.sum_a, self.sum_b, out, known)
        return out, known


@loop
def _weigh(
    columns: np.ndarray,
    runs: np.ndarray,
    keys: Any,
    starts: np.ndarray,
    sums: np.ndarray,
    sum_a: np.ndarray,
    sum_b: np.ndarray,
    out: np.ndarray,
    known: np.ndarray,
) -> None:
    """Fill what `PairWeights.over` gives. columns: of canonical slices within the tokens; keys: (e, first) of runs."""
    for i in range(len(out)):
        q0, q1, k0, k1, lo, hi = slice_at(columns, i)
        bend_hi, bend_lo = min(max(k1 - 1 - hi, q0), q1), min(max(k0 - lo + 1, q0), q1)
        upper, known_upper = _along(hi + 1, q0, bend_hi, runs, keys, starts, sums, len(sum_a))
        lower, known_lower = _along(lo, bend_lo, q1, runs, keys, starts, sums, len(sum_a))
        upper += sum_b[k1] * (sum_a[q1] - sum_a[bend_hi])
        lower += sum_b[k0] * (sum_a[bend_lo] - sum_a[q0])
        out[i], known[i] = upper - lower, known_upper and known_lower


@inner
def _along(
    e: int, first: int, stop: int, runs: np.ndarray, keys: Any, starts: np.ndarray, sums: np.ndarray, width: int
) -> tuple[np.uint64, bool]:
    """Sum a(q) B(q + e) over rows [first, stop): (sum, whether the mask has that diagonal).

    width: tokens + 1; e is in [-tokens, tokens + 1], so keys are unique and rise.
    """
    if first >= stop:
        return np.uint64(0), True  # most slices of a cut mask are full
    place, stop_place = 0, len(keys)
    while place < stop_place:
        middle = (place + stop_place) // 2
        if keys[middle] <= e * width + first:
            place = middle + 1
        else:
            stop_place = middle
    place -= 1
    if place < 0 or runs[place, 0] != e or runs[place, 1] > first or stop > runs[place, 2]:
        return np.uint64(0), False
    begin = starts[place] - runs[place, 1] + first
    return sums[begin + stop - first] - sums[begin], True


@loop
def _run_sums(runs: np.ndarray, sum_a: np.ndarray, sum_b: np.ndarray, sums: np.ndarray) -> None:
    """Fill `sums` with those of the first i terms a(q) B(q + e) of all runs one after another.

    Every q and q + e must be in range. runs: int64 [n, 3], rows (e, first, stop).
    """
    total, term = np.uint64(0), 0
    for run in range(len(runs)):
        e, first, stop = runs[run, 0], runs[run, 1], runs[run, 2]
        a, b, out = sum_a[first : stop + 1], sum_b[first + e : stop + e], sums[term : term + stop - first]
        for i in range(len(out)):
            out[i] = total
            total += (a[i + 1] - a[i]) * b[i]
        term += len(out)
    sums[term] = total


def bends(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows where the last key stops following hi, and where the first key begins to follow lo: int64 [n] each."""
    upper = np.clip(table[:, K1] - 1 - table[:, HI], table[:, Q0], table[:, Q1])
    lower = np.clip(table[:, K0] - table[:, LO] + 1, table[:, Q0], table[:, Q1])
    return upper, lower


def diagonals(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs (e, first row, stop row) in which key borders follow q + e, above and below: int64 [n, 3] each."""
    bend_hi, bend_lo = bends(table)
    upper = np.stack([table[:, HI] + 1, table[:, Q0], bend_hi], axis=1)
    return upper, np.stack([table[:, LO], bend_lo, table[:, Q1]], axis=1)
