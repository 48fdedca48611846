"""Fields: which fields of a row are its text, tokens, labels and name, and what document a row is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hsap.data.document import Document
from hsap.data.rejected import Rejected
from hsap.targets import NO_TARGET

ChatOf = Callable[[Mapping[str, object], str], tuple[Any, ...]]
"""Reads a row (values by field, its place for messages) as chats: none, one, or as many as a tree of messages has.

A chat's `unread` names fields of the row that it isn't read from. `Rejected` leaves that row alone out: a conversation
in the wrong order says nothing about the rest of the file.
"""

CHAT_BESIDE = "a chat beside {!r}, which is what is trained (set data.chat_template to train chats)"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data set. where: "path:line", or "path:row 7" where there are no lines. id: used if it has none."""

    values: Mapping[str, object]
    where: str
    id: str


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of fields, and who reads rows as chats.

    text: wins where a row has tokens too, because those may be another tokenizer's; None reads tokens only. What is
    empty or null isn't there, if anything else is. tokens: names tried in order for a list of token ids. labels: beside
    tokens, the token itself where it is a target of the loss, -100 where not (unshifted, as Hugging Face's models take
    them). mask: names tried in order for 0 or 1 a token, whether it is a target. padding: 0 where a token is padding,
    which is cut off. id: optional in the data. chat_of: reads chats. chat_names: the fields that they may be in.
    chats_first: a row that is a chat is read as one whatever else it has; otherwise only one without text and tokens.
    """

    text: str | None = "text"
    tokens: tuple[str, ...] = ("tokens", "input_ids")
    labels: str | None = "labels"
    mask: tuple[str, ...] = ("loss_mask", "assistant_masks")
    padding: str | None = "attention_mask"
    id: str | None = "id"
    chat_of: ChatOf | None = None
    chat_names: tuple[str, ...] = ()
    chats_first: bool = False

    def wanted(self, names: list[str]) -> list[str]:
        """Choose the columns to read of those there are: all, where a row may be a conversation."""
        content = [name for name in (self.text, *self.tokens) if name in names]
        if not content or self.chats_first:
            return names
        rest = (self.text, *self.tokens, self.labels, *self.mask, self.padding, self.id, *self.chat_names)
        return [name for name in names if name in rest]


def documents_of(row: Row, fields: Fields) -> tuple[Document, ...]:
    """Say what documents a row is: one, perhaps empty, or the chats in it.

    Errors: ValueError for a row that can't be read; `Rejected` for one that is to be left out and counted.
    """
    values, where = row.values, row.where
    name = values.get(fields.id) if fields.id is not None else None
    name = row.id if name is None else str(name)
    there = [field for field in (fields.text, *fields.tokens) if field is not None and field in values]
    # Where rows share their columns, what a row doesn't have is null or empty; a null alone is a fault that is told.
    full = next((field for field in there if not _is_empty(values[field])), None)
    named = full or next((field for field in there if values[field] is not None), next(iter(there), None))
    notes: tuple[str, ...] = ()
    if full is None or fields.chats_first:
        chats = fields.chat_of(values, where) if fields.chat_of is not None else ()
        if chats:
            return tuple(_of_chat(f"{name}#{i}" if i else name, where, chat) for i, chat in enumerate(chats))
    elif fields.chat_of is not None and _is_chat(values, where, fields.chat_of):
        notes = (CHAT_BESIDE.format(full),)
    if named is None:
        wanted = [repr(field) for field in (fields.text, *fields.tokens) if field is not None]
        raise ValueError(
            f"{where}: the row is no chat and has none of the fields {', '.join(wanted)}, only "
            f"{', '.join(sorted(values)) or 'none'}; name the right one in data.text_field (or those of chats in "
            f"data.chat_fields), or repair the line"
        )
    if named == fields.text:
        return (Document(name, where, text=as_text(values[named], named, where), notes=notes),)
    return (replace(_tokenised(name, values, named, fields, where), notes=notes),)


def _is_empty(value: object) -> bool:
    return value is None or (value.size == 0 if isinstance(value, np.ndarray) else value in ("", []))


def _is_chat(values: Mapping[str, object], where: str, chat_of: ChatOf) -> bool:
    try:
        return bool(chat_of(values, where))
    except Rejected:
        return True


def _of_chat(name: str, where: str, chat: Any) -> Document:
    unread = f"fields beside the chat that say something else ({', '.join(chat.unread)})" if chat.unread else ""
    return Document(name, where, chat=chat, notes=(unread,) if unread else ())


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
    given = _integers(values[field], field, where)
    tokens, real = as_tokens(given, where), np.ones(len(given), bool)
    if fields.padding is not None and values.get(fields.padding) is not None:
        real = _flags(values[fields.padding], fields.padding, tokens, where)
        kept = np.flatnonzero(real)
        if len(kept) and len(kept) != kept[-1] - kept[0] + 1:
            raise Rejected(where, f"{fields.padding} with zeros between ones, which is no padding at an end")
    trained = _trained(values, tokens, real, fields, where)
    tokens, trained = tokens[real], None if trained is None else trained[real]
    return Document(name, where, tokens=tokens, trained=trained)


def _trained(
    values: Mapping[str, object], tokens: np.ndarray, real: np.ndarray, fields: Fields, where: str
) -> np.ndarray | None:
    """Which tokens are targets, by labels or by masks, which say the same of real ones; None for all."""
    told: dict[str, np.ndarray] = {}
    if fields.labels is not None and values.get(fields.labels) is not None:
        labels = _integers(values[fields.labels], fields.labels, where)
        _same_length(labels, fields.labels, tokens, where)
        told[fields.labels] = trained = labels != NO_TARGET
        bad = np.flatnonzero(trained & (labels != tokens))
        if len(bad):
            raise Rejected(
                where,
                f"{fields.labels} that are neither their tokens nor {NO_TARGET} (undo a shift by one, or set "
                f"data.labels_field=null)",
                f"label {int(bad[0])} is {int(labels[bad[0]])}, the token {int(tokens[bad[0]])}",
            )
    for name in fields.mask:
        if values.get(name) is not None:
            told[name] = _flags(values[name], name, tokens, where)
    first, *others = told or ("",)
    # Padding is cut off, and nothing is before the first token that could predict it.
    counts = np.cumsum(real) > 1 if others else real
    for other in others:
        bad = np.flatnonzero(counts & real & (told[first] != told[other]))
        if len(bad):
            raise Rejected(where, f"{first} and {other} that contradict each other", f"at token {int(bad[0])}")
    return told[first] if told else None


def _flags(value: object, field: str, tokens: np.ndarray, where: str) -> np.ndarray:
    if isinstance(value, list):
        value = [int(v) if isinstance(v, bool) else v for v in value]
    elif isinstance(value, np.ndarray) and value.dtype == bool:
        value = value.astype(np.int8)
    flags = _integers(value, field, where)
    _same_length(flags, field, tokens, where)
    if not np.isin(flags, (0, 1)).all():
        raise Rejected(where, f"{field} of other numbers than 0 and 1")
    return flags.astype(bool)


def _same_length(values: np.ndarray, field: str, tokens: np.ndarray, where: str) -> None:
    if len(values) != len(tokens):
        raise Rejected(where, f"{field} of another length than the tokens", f"{len(values)} for {len(tokens)}")


def _integers(value: object, field: str, where: str) -> np.ndarray:
    # bool is an int to Python, and JSON's true is no token.
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return value
    if not isinstance(value, list) or not all(type(token) is int and abs(token) < 1 << 62 for token in value):
        raise ValueError(f"{where}: field {field!r} is not a list of integers; repair the line")
    return np.array(value, dtype=np.int64)
