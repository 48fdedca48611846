"""Tokenise: from documents to samples of token ids, and to the store that holds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from hsap.data.chat.template import Template
from hsap.data.document import Document, Sample
from hsap.data.rejected import Rejected
from hsap.data.store import DocumentStore
from hsap.data.tokenizer import Tokenizer


def tokenise_documents(
    source: Iterable[Document],
    tokenizer: Tokenizer,
    template: Callable[[], Template | None] | None = None,
    reject: Callable[[str, str], None] | None = None,
) -> DocumentStore:
    """Tokenise every document of a source.

    template: gives what turns chats into text; called for the first chat, so that data without any needs none that is
    sound. reject: told the place and the reason of every document that `Rejected` is raised for, which is left out;
    without it the first one ends the walk. Errors (ValueError): what the source refuses; a token id outside the
    vocabulary, with the document's file:line.
    """
    chat_template = functools.cache(template or (lambda: None))

    def walk() -> Iterator[Sample]:
        for document in source:
            try:
                yield tokenise(document, tokenizer, chat_template() if document.chat is not None else None)
            except Rejected as error:
                if reject is None:
                    raise
                reject(error.where, error.reason)

    return DocumentStore.from_samples(walk())


def tokenise(document: Document, tokenizer: Tokenizer, template: Template | None = None) -> Sample:
    """Give a document's sample: text by the BOS and EOS policy, a chat by the template, or its tokens as they are.

    Errors (ValueError): an id outside the tokenizer's vocabulary, or a chat where there is no template, with file:line;
    `Rejected`: a chat that the template has no form for.
    """
    if document.chat is not None:
        if template is None:
            raise ValueError(
                f"{document.where}: this is a chat, and the tokenizer comes with no chat template; set "
                "data.chat_template to chatml, llama2, mistral, or to a file"
            )
        return template.sample(document.id, document.chat, document.where)
    if document.tokens is None:
        assert document.text is not None, "a document has text, tokens or a chat"
        try:
            return Sample(document.id, tokenizer.encode_document(document.text))
        except ValueError as error:
            raise ValueError(f"{document.where}: {error}") from error
    check_token_ids(document.tokens, tokenizer.vocab_size, document.where)
    return Sample(document.id, document.tokens.astype(np.int32), document.trained)


def check_token_ids(tokens: np.ndarray, vocab_size: int, where: str) -> None:
    """Refuse token ids that a model with `vocab_size` entries can't embed: ValueError with the document's file:line."""
    bad = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(bad):
        raise ValueError(
            f"{where}: token {int(bad[0])} of the document has id {int(tokens[bad[0]])}, outside the vocabulary of "
            f"{vocab_size} entries (ids 0 to {vocab_size - 1}); use the tokenizer that the model was made for "
            f"(data.tokenizer), or set the model's vocabulary size to the tokenizer's"
        )
