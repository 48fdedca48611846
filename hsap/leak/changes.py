"""Changes: what is changed of a batch to see who notices; the same on every rank, as it depends on the batch alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hsap.ir.layout import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A packed batch. tokens: int [T]; lengths: of its documents; names: theirs, for people.

    masks: the layers' distinct ones, as slices of the whole batch; layers: index of each layer's in them. answers: of
    each document the rows at which a shared question's answers begin; () where there are none.
    """

    tokens: np.ndarray
    lengths: tuple[int, ...]
    names: tuple[str, ...]
    masks: tuple[np.ndarray, ...]
    layers: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...] = ()

    @property
    def borders(self) -> np.ndarray:
        """Of the documents: int64 [documents + 1]."""
        return Layout.from_lengths(self.lengths).cu_seqlens


@dataclass(frozen=True, slots=True)
class Change:
    """Tokens that are changed: spans [start, stop) of the packed batch. told: what they are, in words."""

    spans: tuple[tuple[int, int], ...]
    told: str

    def mark(self, num_tokens: int) -> np.ndarray:
        """Which tokens these are: bool [T]."""
        marked = np.zeros(num_tokens, dtype=bool)
        for start, stop in self.spans:
            marked[start:stop] = True
        return marked


def choose(batch: Batch) -> tuple[Change, ...]:
    """Choose four changes: the longest document, a shortest one beside it, every second one, and a part of one.

    Of any two neighbours one is among every second, so that no border is passed by. The part is the last answer to the
    first shared question, or else the second half of the longest document, whose first half mustn't see it where the
    mask is causal. Always four, so that all SP groups of a job run alike; a small batch has some of them twice, and an
    empty one none.
    """
    lengths = np.array(batch.lengths)
    if len(lengths) == 0:
        return (Change((), "nothing"),) * 4
    longest = int(lengths.argmax())
    others = [i for i in range(len(lengths)) if i != longest] or [longest]
    shortest = min(others, key=lambda i: (lengths[i], abs(i - longest)))
    spans = [*zip(batch.borders[:-1].tolist(), batch.borders[1:].tolist(), strict=True)]
    whole = [Change((spans[i],), f"document {batch.names[i]}") for i in (longest, shortest)]
    second = Change(tuple(spans[::2]), "every second document") if len(spans) > 2 else whole[-1]
    return (*whole, second, _part(batch, longest))


def _part(batch: Batch, longest: int) -> Change:
    borders = batch.borders.tolist()
    for document, rows in enumerate(batch.answers):
        if len(rows) > 1:
            told = f"answer {len(rows)} of document {batch.names[document]}"
            return Change(((borders[document] + rows[-1], borders[document + 1]),), told)
    start, stop = borders[longest : longest + 2]
    return Change((((start + stop) // 2, stop),), f"the second half of document {batch.names[longest]}")


def changed(batch: Batch, change: Change) -> np.ndarray:
    """Give the tokens with every one of the change replaced by another that is in the batch, or by one of id 0 or 1."""
    known = np.unique(batch.tokens)
    if len(known) < 2:
        known = np.unique([*known, 0, 1])
    tokens = batch.tokens.copy()
    for start, stop in change.spans:
        step = 1 + np.arange(stop - start) % (len(known) - 1)
        tokens[start:stop] = known[(np.searchsorted(known, tokens[start:stop]) + step) % len(known)]
    return tokens


def order_rows(lengths: Sequence[int], order: Iterable[int]) -> np.ndarray:
    """Where tokens come from when documents, or some, are laid in another order: int64 [T], positions in the given."""
    borders = Layout.from_lengths(lengths).cu_seqlens.tolist()
    parts = [np.arange(*borders[i : i + 2]) for i in order]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])
