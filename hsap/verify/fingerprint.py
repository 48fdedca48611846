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

import numpy as np
from numba import njit

from hsap.ir.slice import HI, K0, K1, LO, Q0, Q1

GAP = 16
"""Rows between two runs of one diagonal that are walked too: cheaper than a run of its own for each document."""


def random_sums(count: int) -> np.ndarray:
    """Sums of the first i of `count` uniform weights in Z/2^64, modulo 2^64: uint64 [count + 1].

    The generator is seeded afresh by the operating system.
    """
    return _random_sums(np.random.SeedSequence().generate_state(4, np.uint64), count)


@njit(cache=True)
def _random_sums(state, count):
    """Draw by xoshiro256++ (Blackman, Vigna 2019) and add up. state: uint64 [4], not all zero."""
    sums = np.empty(count + 1, np.uint64)
    sums[0] = 0
    s0, s1, s2, s3 = state
    for i in range(count):
        sums[i + 1] = sums[i] + _rotate(s0 + s3, np.uint64(23)) + s0
        carried = s1 << np.uint64(17)
        s2 ^= s0
        s3 ^= s1
        s1 ^= s2
        s0 ^= s3
        s2 ^= carried
        s3 = _rotate(s3, np.uint64(45))
    return sums


@njit(cache=True)
def _rotate(x, by):
    return (x << by) | (x >> (np.uint64(64) - by))


class PairWeights:
    """Weights of all (q, k) pairs, able to sum over slices that cut along the diagonals of a mask's own slices."""

    def __init__(self, num_tokens: int, mask: np.ndarray) -> None:
        self.sum_a, self.sum_b = random_sums(num_tokens), random_sums(num_tokens)
        self.num_tokens = num_tokens
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
        self.sums = _run_sums(runs, int(self.starts[-1]), self.sum_a, self.sum_b)

    def along(self, e, first, stop) -> tuple[np.ndarray, np.ndarray]:
        """Sum a(q) B(q + e) over rows [first, stop): (sums uint64 [n], whether the mask has that diagonal [n])."""
        sums, known = np.zeros(len(e), np.uint64), first >= stop
        some = np.flatnonzero(~known)  # few: most slices of a cut mask are full
        if len(self.runs) and len(some):
            sums[some], known[some] = self._along(e[some], first[some], stop[some])
        return sums, known

    def _along(self, e, first, stop) -> tuple[np.ndarray, np.ndarray]:
        width = self.num_tokens + 1  # e is in [-num_tokens, num_tokens + 1], so keys are unique and rise
        keys = self.runs[:, 0] * width + self.runs[:, 1]
        place = np.maximum(np.searchsorted(keys, e * width + first, side="right") - 1, 0)
        run = self.runs[place]
        there = (run[:, 0] == e) & (run[:, 1] <= first) & (stop <= run[:, 2])
        begin = np.where(there, self.starts[place] - run[:, 1] + first, 0)
        return self.sums[np.where(there, begin + stop - first, 0)] - self.sums[begin], there

    def over(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sum the weights of canonical slices' pairs: (sums uint64 [n], False where a cut isn't the mask's own [n])."""
        q0, q1, k0, k1, lo, hi = np.ascontiguousarray(table.T)
        bend_hi, bend_lo = bends(table)
        upper, known_upper = self.along(hi + 1, q0, bend_hi)
        lower, known_lower = self.along(lo, bend_lo, q1)
        upper += self.sum_b[k1] * (self.sum_a[q1] - self.sum_a[bend_hi])
        lower += self.sum_b[k0] * (self.sum_a[bend_lo] - self.sum_a[q0])
        return upper - lower, known_upper & known_lower


@njit(cache=True)
def _run_sums(runs, num_terms, sum_a, sum_b):
    """Sums of the first i terms a(q) B(q + e) of all runs one after another: uint64 [num_terms + 1].

    Every q and q + e must be in range. runs: int64 [n, 3], rows (e, first, stop).
    """
    sums = np.empty(num_terms + 1, np.uint64)
    sums[0] = 0
    term = 0
    for e, first, stop in runs:
        for q in range(first, stop):
            sums[term + 1] = sums[term] + (sum_a[q + 1] - sum_a[q]) * sum_b[q + e]
            term += 1
    return sums


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
