"""The families of masks: what a document's tokens may see of their own document, each a few slices.

A family turns a document length and its parameters into disjoint slices whose coordinates start at the document's first
token; they need not be canonical. Every family but `full` and `prefix` is causal: no token sees what comes after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hsap.ir.slice import UNBOUNDED, slices


def _causal(n: int) -> np.ndarray:
    return slices([(0, n, 0, n, -UNBOUNDED, 0)])


def _full(n: int) -> np.ndarray:
    return slices([(0, n, 0, n, -UNBOUNDED, UNBOUNDED)])


def _window(n: int, w: int) -> np.ndarray:
    return slices([(0, n, 0, n, 1 - w, 0)])


def _lambda(n: int, sink: int, w: int) -> np.ndarray:
    # The sink's slice ends where the window begins, so that no pair is there twice.
    return slices([(0, n, 0, n, 1 - w, 0), (0, n, 0, sink, -UNBOUNDED, -w)])


def _blockwise(n: int, block: int, window: int, sink: int, test: int) -> np.ndarray:
    tests = min(n, max(0, -(-n // block) - test) * block)
    # Up to here the window reaches the sink, so that nothing is hidden between them.
    head = min(tests, (sink + window) * block)
    if head == tests:
        return _causal(n)
    starts = np.arange(head, tests, block)
    stops = np.minimum(starts + block, tests)
    return np.concatenate(
        [
            slices([(0, head, 0, head, -UNBOUNDED, 0), (head, tests, 0, sink * block, -UNBOUNDED, UNBOUNDED)]),
            _causal_slices(starts, stops, starts - (window - 1) * block),
            slices([(tests, n, 0, n, -UNBOUNDED, 0)]),
        ]
    )


def _shared_question(n: int, answers: int, share: int) -> np.ndarray:
    answer = n * share // 100
    question = n - answers * answer
    starts = np.arange(question, n, max(answer, 1))
    return np.concatenate(
        [slices([(0, n, 0, question, -UNBOUNDED, 0)]), _causal_slices(starts, starts + answer, starts)]
    )


def _prefix(n: int, p: int) -> np.ndarray:
    p = min(p, n)
    return slices([(0, n, 0, p, -UNBOUNDED, UNBOUNDED), (p, n, p, n, -UNBOUNDED, 0)])


def _chunked(n: int, c: int) -> np.ndarray:
    starts = np.arange(0, n, c)
    return _causal_slices(starts, np.minimum(starts + c, n), starts)


def _causal_slices(q0: np.ndarray, q1: np.ndarray, k0: np.ndarray) -> np.ndarray:
    """Let rows [q0, q1) see keys from k0 up to their own: a slice each."""
    return np.stack([q0, q1, k0, q1, np.full_like(q0, -UNBOUNDED), np.zeros_like(q0)], axis=1)


def _fits_shared_question(answers: int, share: int) -> str | None:
    if answers * share > 100:
        return f"{answers} answers of {share} % are more than the document; answers × share is at most 100"
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """A family of masks: its slices for (length, *parameters), and its parameters by name with their least values.

    most: how many slices documents have at most, for (their number, their tokens together, *parameters).
    fault: says what is wrong with parameters that are in range each but don't fit together, None if nothing is.
    """

    slices: Callable[..., np.ndarray]
    least: dict[str, int]
    meaning: str
    most: Callable[..., int] = lambda count, tokens, *_: 2 * count
    fault: Callable[..., str | None] = lambda *_: None

    def spelling(self, name: str) -> str:
        """Say how a mask of the family is written, as in lambda:sink,w."""
        return f"{name}:{','.join(self.least)}" if self.least else name


MASKS: dict[str, Family] = {
    "causal": Family(_causal, {}, "a token sees itself and what comes before it"),
    "full": Family(_full, {}, "every token sees every token"),
    "window": Family(_window, {"w": 1}, "causal, the last w keys only, the query's own included"),
    "lambda": Family(_lambda, {"sink": 0, "w": 1}, "a window of w keys and, causally, the first `sink` keys"),
    "blockwise": Family(
        _blockwise,
        {"block": 1, "window": 1, "sink": 0, "test": 0},
        "in blocks of `block` tokens from the document's start (the last may be short): causal over the token's own "
        "block, the window - 1 before it and the first `sink`; the last `test` blocks see all that comes before them "
        "(DCP, Figure 6)",
        lambda count, tokens, block, *_: 4 * count + tokens // block,
    ),
    "shared_question": Family(
        _shared_question,
        {"answers": 1, "share": 1},
        "one question, then answers of `share` percent of the document each, rounded down to whole tokens; the "
        "question has the rest. The question is causal; an answer sees the question and, causally, itself (DCP, "
        "Figure 6)",
        lambda count, tokens, answers, _: (1 + answers) * count,
        _fits_shared_question,
    ),
    "prefix": Family(_prefix, {"p": 1}, "the first p tokens see each other, the rest is causal"),
    "chunked": Family(
        _chunked,
        {"c": 1},
        "causal inside chunks of c tokens (the last may be short)",
        lambda count, tokens, c: count + tokens // c,
    ),
}
"""All families by name. Parameters are whole numbers up to 2^40; one larger than the document is as large as it is."""
