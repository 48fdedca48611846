"""The document store: every document's tokens in one array, made once before training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hsap.data.document import Document
from hsap.data.tokenise import Tokenizer, check_token_ids, tokenise
from hsap.ir.check import shown


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

    @property
    def uncut(self) -> np.ndarray | None:
        """Which documents may not be cut, whatever their length: bool [num_documents]; None: all may be."""
        return None

    @classmethod
    def from_documents(cls, documents: Iterable[tuple[str, np.ndarray]]) -> DocumentStore:
        """Make a store from (id, token ids) pairs; ValueError where ids aren't a list of integers that fit int32."""
        ids, parts = [], [np.zeros(0, dtype=np.int32)]
        for name, tokens in documents:
            ids.append(name)
            parts.append(_token_ids(name, tokens))
        starts = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return cls(np.concatenate(parts), starts, tuple(ids))


def _token_ids(name: str, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        given = np.asarray(tokens)
    except (ValueError, OverflowError):
        given = np.empty(0, dtype=object)
    bounds = np.iinfo(np.int32)
    sound = given.ndim == 1 and (given.dtype.kind in "iu" or (given.size == 0 and given.dtype.kind == "f"))
    if not sound or (given.size and not bounds.min <= int(given.min()) <= int(given.max()) <= bounds.max):
        raise ValueError(
            f"document {name}: its token ids are {shown(tokens)}; they must be one list of integers from {bounds.min} "
            f"to {bounds.max}"
        )
    return given.astype(np.int32)


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
