"""The document store: every document's tokens in one column, in memory or (`prepared`) on the disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hsap.data.column import Column
from hsap.data.document import Sample


@dataclass(frozen=True, slots=True, eq=False)
class DocumentStore:
    """Tokenised documents.

    tokens: int32 [num_tokens], the documents one after the other; read by slices, as trained is, because both may be
    on the disk. starts: int64 [num_documents + 1]; document i is
    tokens[starts[i]:starts[i + 1]]. ids: one a document, as its source names it. trained: bool [num_tokens], as in
    `Sample`; None: every token is. answers: `Sample.answers` of all documents, None where no document has any:
    (first int64 [num_documents + 1], rows int64 [num_answers]), document i's are rows[first[i]:first[i + 1]].
    """

    tokens: np.ndarray | Column
    starts: np.ndarray
    ids: Sequence[str]
    trained: np.ndarray | Column | None = None
    answers: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document: int64 [num_documents]."""
        return np.diff(self.starts)

    @property
    def uncut(self) -> np.ndarray | None:
        """Which documents a pack may hold whole only, those with answers: bool [num_documents]; None: no document."""
        return None if self.answers is None else np.diff(self.answers[0]) > 0

    def answers_of(self, document: int) -> tuple[int, ...]:
        """Give the rows at which the answers of a document begin; empty for one that is no shared question."""
        if self.answers is None:
            return ()
        first, rows = self.answers
        return tuple(rows[first[document] : first[document + 1]].tolist())

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> DocumentStore:
        """Make a store from samples; a column that no sample has a use for is None."""
        ids, parts, marks, answers = [], [np.zeros(0, dtype=np.int32)], [], []
        for sample in samples:
            ids.append(sample.id)
            parts.append(sample.tokens)
            marks.append(sample.trained)
            answers.append(sample.answers)
        starts = np.cumsum([len(part) for part in parts], dtype=np.int64)
        trained = None
        if any(mark is not None for mark in marks):
            whole = (np.ones(len(part), bool) if mark is None else mark for part, mark in zip(parts[1:], marks))
            trained = np.concatenate([*whole])
        rows = None
        if any(answers):
            first = np.cumsum([0, *map(len, answers)], dtype=np.int64)
            rows = (first, np.array([row for one in answers for row in one], dtype=np.int64))
        return cls(np.concatenate(parts), starts, tuple(ids), trained, rows)

    @classmethod
    def joined(cls, parts: Sequence[DocumentStore]) -> DocumentStore:
        """Put stores that are in memory behind each other."""
        tokens = np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)])
        starts = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(part.lengths for part in parts)]))
        ids = tuple(name for part in parts for name in part.ids)
        trained = answers = None
        if any(part.trained is not None for part in parts):
            marks = (np.ones(len(part.tokens), bool) if part.trained is None else part.trained for part in parts)
            trained = np.concatenate([*marks])
        if any(part.answers is not None for part in parts):
            given = [part.answers or (np.zeros(len(part.ids) + 1, np.int64), np.zeros(0, np.int64)) for part in parts]
            counts = np.concatenate([np.zeros(1, np.int64), *(np.diff(first) for first, _ in given)])
            answers = (np.cumsum(counts), np.concatenate([rows for _, rows in given]))
        return cls(tokens, starts, ids, trained, answers)
