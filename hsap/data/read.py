"""Read: a data set as the store that training takes, tokenised now or prepared before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hsap.data import prepared
from hsap.data.chat.template import Template
from hsap.data.config import DataConfig
from hsap.data.opening import open_data
from hsap.data.sources import Tally
from hsap.data.store import DocumentStore, tokenise_documents
from hsap.data.tokenise import Tokenizer


def read_store(
    data: DataConfig,
    path: str | Sequence[str] | Mapping[str, float],
    tokenizer: Tokenizer,
    template: Callable[[], Template | None],
    seed: int,
    vocab_size: int | None = None,
) -> tuple[DocumentStore, Tally]:
    """Read a data set; gives its documents, and what was left out.

    template, vocab_size: as in `tokenise_documents`; of prepared data see `check_agreement`.
    seed: of the order of a mixture. ValueError: what the source, the tokenizer or the folder refuses.
    """
    if prepared.is_prepared(path):
        store, tally = prepared.open_store(path), prepared.read_index(path).left_out
    else:
        source = open_data(data, path, seed)
        store = tokenise_documents(source, tokenizer, vocab_size, template, source.reject)
        tally = source.tally
    return store, tally
