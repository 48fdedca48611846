"""Pairwise cases: few rows in which every two choices of different factors meet."""

from __future__ import annotations

import itertools


def pairwise(*sizes: int) -> list[tuple[int, ...]]:
    """Rows of one choice a factor, so that any two choices of two factors share a row. Deterministic.

    Greedy: a pair that no row has yet begins one, and the other factors take what meets most that is new. The rows
    are about as many as the two largest factors have pairs; all choices of all factors together would be thousands.
    """
    factors = range(len(sizes))
    missing = {
        (a, i, b, j) for a, b in itertools.combinations(factors, 2) for i in range(sizes[a]) for j in range(sizes[b])
    }
    rows = []
    largest_first = sorted(missing, key=lambda pair: (-sizes[pair[0]] * sizes[pair[2]], pair))
    for pair in largest_first:
        if pair not in missing:
            continue
        a, i, b, j = pair
        row = {a: i, b: j}
        for factor in sorted(set(factors) - {a, b}, key=lambda f: -sizes[f]):
            turn = len(rows)  # ties go around, so that the choices are met about equally often
            row[factor] = max(
                range(sizes[factor]),
                key=lambda at: (sum(_pair(factor, at, *other) in missing for other in row.items()),
                                -((at - turn) % sizes[factor])),
            )  # fmt: skip
        missing.difference_update(_pair(*one, *two) for one, two in itertools.combinations(row.items(), 2))
        rows.append(tuple(row[factor] for factor in factors))
    return rows


def _pair(a: int, i: int, b: int, j: int) -> tuple[int, int, int, int]:
    return (a, i, b, j) if a < b else (b, j, a, i)
