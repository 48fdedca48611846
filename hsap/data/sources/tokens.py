"""Tokens: documents of one long array of token ids, mapped and never read before it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hsap.data.document import Document
from hsap.data.fields import as_tokens
from hsap.data.sources.source import MAX_DOCUMENT_TOKENS, Reading, Turns

_BLOCK_TOKENS = 1 << 20
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


def mapped(file: Path, dtype: np.dtype, offset: int = 0, count: int | None = None) -> np.ndarray:
    """Map `count` values of a file (all from the offset on, if None); the file's size is checked first.

    Errors (ValueError): the file is shorter, or ends within a value.
    """
    size = file.stat().st_size - offset
    if count is None:
        count, rest = divmod(size, dtype.itemsize)
        if rest:
            raise ValueError(
                f"{file} has {size} bytes of tokens, no multiple of {dtype.itemsize} ({dtype.name}): it is cut short, "
                f"or its tokens are of another dtype (data.token_dtype)"
            )
    elif count * dtype.itemsize > size:
        raise ValueError(
            f"{file} is cut short: {count} tokens of {dtype.name} need {count * dtype.itemsize} bytes after the first "
            f"{offset}, it has {size}; copy it again"
        )
    if not count:
        return np.zeros(0, dtype)
    # As a plain array: each slice of a memmap costs 20 µs, more than reading a short document.
    return np.memmap(file, dtype, "r", offset, (count,)).view(np.ndarray)


def documents(tokens: np.ndarray, file: Path, reading: Reading, turns: Turns) -> Iterator[Document]:
    """Split an array of tokens without borders at the id that the user names; without one it is a single document."""
    if reading.end_id is None and reading.begin_id is None:
        if turns.take():
            yield document(tokens, file, 0)
        return
    begins = reading.end_id is None
    border_id = reading.begin_id if reading.end_id is None else reading.end_id
    start = number = 0
    for border in _borders(tokens, border_id):
        stop = border if begins else border + 1
        if stop > start:
            if turns.take():
                yield document(tokens[start:stop], file, number)
            start, number = stop, number + 1
    if start < len(tokens) and turns.take():
        yield document(tokens[start:], file, number)


def document(tokens: np.ndarray, file: Path, number: int, trained: np.ndarray | None = None) -> Document:
    """Make a document of its part of a file, which is read only here."""
    where = f"{file}:document {number}"
    if len(tokens) > MAX_DOCUMENT_TOKENS:
        raise ValueError(
            f"{where} has {len(tokens)} tokens, more than {MAX_DOCUMENT_TOKENS}; name the token that ends documents in "
            f"data.end_id (or the one that begins them in data.begin_id)"
        )
    return Document(f"{file.name}:{number}", where, tokens=as_tokens(np.asarray(tokens), where), trained=trained)


def _borders(tokens: np.ndarray, border_id: int | None) -> Iterator[int]:
    for first in range(0, len(tokens), _BLOCK_TOKENS):
        yield from (np.flatnonzero(tokens[first : first + _BLOCK_TOKENS] == border_id) + first).tolist()


def named_dtype(reading: Reading, default: str | None, where: object) -> np.dtype:
    """Give the dtype that the user names, or the default; ValueError, which names the place, where there is neither."""
    name = reading.token_dtype or default
    if name is None:
        raise ValueError(
            f"{where} is an array without a header; name the dtype of its tokens in data.token_dtype "
            f"({', '.join(DTYPES)})"
        )
    return np.dtype(name).newbyteorder("<")
