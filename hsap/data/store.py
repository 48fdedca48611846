"""The document store: every document's tokens in one array, made once before training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from hsap.data.sources import Document
from hsap.data.tokenise import Tokenizer, check_token_ids, tokenise


@dataclass(frozen=True, slots=True, eq=False)
class DocumentStore:
    """Tokenised documents, in memory.

    tokens: int32 [num_tokens], the documents one after the other. starts: int64 [num_documents + 1]; document i is
    tokens[starts[i]:starts[i + 1]]. ids: one a document, as its source names it.
    """

    tokens: np.ndarray
    starts: np.ndarray
    ids: tuple[str, ...]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document: int64 [num_documents]."""
        return np.diff(self.starts)

    @classmethod
    def from_documents(cls, documents: Iterable[tuple[str, np.ndarray]]) -> DocumentStore:
        """Make a store from (id, token ids) pairs."""
        ids, parts = [], [np.zeros(0, dtype=np.int32)]
        for name, tokens in documents:
            ids.append(name)
            parts.append(np.asarray(tokens, dtype=np.int32))
        starts = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return cls(np.concatenate(parts), starts, tuple(ids))


def tokenise_documents(
    source: Iterable[Document], tokenizer: Tokenizer, vocab_size: int | None = None
) -> DocumentStore:
    """Tokenise every document of a source.

    vocab_size: the model's, which may differ from the tokenizer's. Errors (ValueError): what the source refuses; a
    token id outside either vocabulary, with the document's file:line.
    """

    def walk():
        for document in source:
            tokens = tokenise(document, tokenizer)
            if vocab_size is not None:
                check_token_ids(tokens, vocab_size, document.where)
            yield document.id, tokens

    return DocumentStore.from_documents(walk())
