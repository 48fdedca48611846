"""Fields: which fields of a row are its text, tokens, labels and name, and what document a row is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hsap.data.document import NO_TARGET, Document, Rejected

ChatOf = Callable[[Mapping[str, object], str], tuple]
"""Reads a row (values by field, its place for messages) as chats: none, one, or as many as a tree of messages has.

`Rejected` leaves that row alone out: a conversation in the wrong order says nothing about the rest of the file.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data set. where: "path:line", or "path:row 7" where there are no lines. id: used if it has none."""

    values: Mapping[str, object]
    where: str
    id: str


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of fields, and who reads rows as chats.

    text: wins where a row has tokens too, because those may be another tokenizer's; None reads tokens only. tokens:
    names tried in order for a list of token ids. labels: beside tokens, the token itself where it is a target of the
    loss, -100 where not (unshifted, as Hugging Face's models take them). mask: names tried in order for 0 or 1 a token,
    whether it is a target. padding: 0 where a token is padding, which is cut off. id: optional in the data.
    chats_first: a row that is a chat is read as one whatever else it has; otherwise only one without text and tokens.
    """

    text: str | None = "text"
    tokens: tuple[str, ...] = ("tokens", "input_ids")
    labels: str | None = "labels"
    mask: tuple[str, ...] = ("loss_mask", "assistant_masks")
    padding: str | None = "attention_mask"
    id: str | None = "id"
    chat_of: ChatOf | None = None
    chats_first: bool = False

    def wanted(self, names: list[str]) -> list[str]:
        """Choose the columns to read of those there are: all, where a row may be a conversation."""
        content = [name for name in (self.text, *self.tokens) if name in names]
        if not content or self.chats_first:
            return names
        rest = (self.text, *self.tokens, self.labels, *self.mask, self.padding, self.id)
        return [name for name in names if name in rest]


def documents_of(row: Row, fields: Fields) -> tuple[Document, ...]:
    """Say what documents a row is: one, perhaps empty, or the chats in it.

    Errors: ValueError for a row that can't be read; `Rejected` for one that is to be left out and counted.
    """
    values, where = row.values, row.where
    name = values.get(fields.id) if fields.id is not None else None
    name = row.id if name is None else str(name)
    there = [field for field in (fields.text, *fields.tokens) if field is not None and field in values]
    # Where rows share their columns, what a row doesn't have is null; a null alone is a fault that is told.
    named = next((field for field in there if values[field] is not None), next(iter(there), None))
    if named is None or values[named] is None or fields.chats_first:
        chats = fields.chat_of(values, where) if fields.chat_of is not None else ()
        if chats:
            return tuple(Document(f"{name}#{i}" if i else name, where, chat=chat) for i, chat in enumerate(chats))
    if named is None:
        wanted = [repr(field) for field in (fields.text, *fields.tokens) if field is not None]
        raise ValueError(
            f"{where}: the row is no chat and has none of the fields {', '.join(wanted)}, only "
            f"{', '.join(sorted(values)) or 'none'}; name the right one in data.text_field (or those of chats in "
            f"data.chat_fields), or repair the line"
        )
    if named == fields.text:
        return (Document(name, where, text=as_text(values[named], named, where)),)
    return (_tokenised(name, values, named, fields, where),)


def as_text(value: object, field: str, where: str) -> str:
    """Give a field's text; ValueError, with its place, where it is none."""
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: field {field!r} is a {type(value).__name__}, not a string; repair the line, or name the right "
            f"field in data.text_field"
        )
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: field {field!r} holds half of a surrogate pair (character {error.start + 1}), which is no text; "
            f"repair or remove the line"
        ) from error
    return value


def as_tokens(values: np.ndarray, where: str) -> np.ndarray:
    """Give token ids as int64 [num_tokens]: whole numbers from 0, whatever their type. ValueError names the first bad.

    Some tokenised formats hold floating-point numbers; their ids must be whole all the same.
    """
    if values.dtype.kind == "f":
        bad = np.flatnonzero(~((values >= 0) & (values == np.floor(values)) & (values < 2**53)))
    elif values.dtype == np.uint64 or (values.dtype.kind == "i" and len(values) and values.min() < 0):
        bad = np.flatnonzero((values < 0) | (values > np.iinfo(np.int64).max))
    else:
        return values.astype(np.int64)
    if len(bad):
        raise ValueError(
            f"{where}: token {int(bad[0])} of the document has id {values[bad[0]]}, outside every vocabulary (ids are "
            f"whole numbers from 0); the file holds something else, or its tokens are of another dtype"
        )
    return values.astype(np.int64)


def _tokenised(name: str, values: Mapping[str, object], field: str, fields: Fields, where: str) -> Document:
    tokens = as_tokens(_integers(values[field], field, where), where)
    trained = _trained(values, tokens, fields, where)
    if fields.padding is not None and values.get(fields.padding) is not None:
        real = _flags(values[fields.padding], fields.padding, tokens, where)
        kept = np.flatnonzero(real)
        if len(kept) and len(kept) != kept[-1] - kept[0] + 1:
            raise Rejected(where, f"{fields.padding} with zeros between ones, which is no padding at an end")
        tokens, trained = tokens[real], None if trained is None else trained[real]
    return Document(name, where, tokens=tokens, trained=trained)


def _trained(values: Mapping[str, object], tokens: np.ndarray, fields: Fields, where: str) -> np.ndarray | None:
    """Which tokens are targets: by labels, else by a mask, else None for all."""
    if fields.labels is not None and values.get(fields.labels) is not None:
        labels = _integers(values[fields.labels], fields.labels, where)
        _same_length(labels, fields.labels, tokens, where)
        trained = labels != NO_TARGET
        bad = np.flatnonzero(trained & (labels != tokens))
        if len(bad):
            raise Rejected(
                where,
                f"{fields.labels} that are neither their tokens nor {NO_TARGET} (undo a shift by one, or set "
                f"data.labels_field=null)",
                f"label {int(bad[0])} is {int(labels[bad[0]])}, the token {int(tokens[bad[0]])}",
            )
        return trained
    for name in fields.mask:
        if values.get(name) is not None:
            return _flags(values[name], name, tokens, where)
    return None


def _flags(value: object, field: str, tokens: np.ndarray, where: str) -> np.ndarray:
    flags = _integers(
        [int(v) if isinstance(v, bool) else v for v in value] if isinstance(value, list) else value, field, where
    )
    _same_length(flags, field, tokens, where)
    if not np.isin(flags, (0, 1)).all():
        raise Rejected(where, f"{field} of other numbers than 0 and 1")
    return flags.astype(bool)


def _same_length(values: np.ndarray, field: str, tokens: np.ndarray, where: str) -> None:
    if len(values) != len(tokens):
        raise Rejected(where, f"{field} of another length than the tokens", f"{len(values)} for {len(tokens)}")


def _integers(value: object, field: str, where: str) -> np.ndarray:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iub":
        return value
    # bool is an int to Python, and JSON's true is no token.
    if not isinstance(value, list) or not all(type(token) is int and abs(token) < 1 << 62 for token in value):
        raise ValueError(f"{where}: field {field!r} is not a list of integers; repair the line")
    return np.array(value, dtype=np.int64)
