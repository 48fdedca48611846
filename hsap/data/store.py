"""The document store: every document's tokens in one column, in memory or (`prepared`) on the disk."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hsap.data.chat.template import Template
from hsap.data.document import Document, Rejected, Sample
from hsap.data.tokenise import Tokenizer, check_token_ids, tokenise

if TYPE_CHECKING:
    from hsap.data.prepared.reader import Column


@dataclass(frozen=True, slots=True, eq=False)
class DocumentStore:
    """Tokenised documents.

    tokens: int32 [num_tokens], the documents one after the other; read by slices, as trained is, because both may be
    on the disk. starts: int64 [num_documents + 1]; document i is
    tokens[starts[i]:starts[i + 1]]. ids: one a document, as its source names it. trained: bool [num_tokens], as in
    `Sample`; None: every token is. answers: `Sample.answers` of all documents, None where no document has any:
    (first int64 [num_documents + 1], rows int64 [num_answers]), document i's are rows[first[i]:first[i + 1]].
    content: in words, a checksum of it all, where somebody has it already.
    """

    tokens: np.ndarray | Column
    starts: np.ndarray
    ids: Sequence[str]
    trained: np.ndarray | Column | None = None
    answers: tuple[np.ndarray, np.ndarray] | None = None
    content: str | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document: int64 [num_documents]."""
        return np.diff(self.starts)

    @property
    def uncut(self) -> np.ndarray | None:
        """Which documents a pack may hold whole only, those with answers: bool [num_documents]; None: no document."""
        return None if self.answers is None else np.diff(self.answers[0]) > 0

    def described(self) -> str:
        """Describe the data by what it holds, not by its path: it may move as long as it stays what it was."""
        if self.content is not None:
            return self.content
        digest = hashlib.sha256(self.tokens.tobytes())
        digest.update(self.starts.tobytes())
        for column in (self.trained, *(self.answers or ())):
            digest.update(b"" if column is None else column.tobytes())
        return f"{len(self.ids)} documents, {len(self.tokens)} tokens, sha256 {digest.hexdigest()[:12]}"

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


def tokenise_documents(
    source: Iterable[Document],
    tokenizer: Tokenizer,
    vocab_size: int | None = None,
    template: Callable[[], Template | None] | None = None,
    most_tokens: int | None = None,
    reject: Callable[[str, str], None] | None = None,
) -> DocumentStore:
    """Tokenise every document of a source.

    vocab_size: the model's, which may differ from the tokenizer's. template: gives what turns chats into text; called
    for the first chat, so that data without any needs none that is sound. most_tokens: of a shared question, which no
    pack may cut. reject: told the place and the reason of every document that `Rejected` is raised for, which is left
    out; without it the first one ends the walk. Errors (ValueError): what the source refuses; a token id outside either
    vocabulary, with the document's file:line.
    """
    chat_template = functools.cache(template or (lambda: None))

    def walk() -> Iterator[Sample]:
        for document in source:
            try:
                sample = tokenise(document, tokenizer, chat_template() if document.chat is not None else None)
                if sample.answers and most_tokens is not None and len(sample.tokens) > most_tokens:
                    detail = f"{len(sample.tokens)} tokens, of {most_tokens} at most"
                    raise Rejected(document.where, "a question with its answers is longer than a pack", detail)
            except Rejected as error:
                if reject is None:
                    raise
                reject(error.where, error.reason)
                continue
            if vocab_size is not None:
                check_token_ids(sample.tokens, vocab_size, document.where)
            yield sample

    return DocumentStore.from_samples(walk())
