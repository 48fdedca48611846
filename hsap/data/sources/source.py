"""Source: a data set as an iterable of documents that can be walked again, and what a walk left out and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hsap.data.document import Document
from hsap.data.fields import Fields, Row, documents_of
from hsap.data.rejected import Rejected
from hsap.data.sources.stream import told_at
from hsap.ir.check import printable

MAX_REASONS = 100
EXAMPLES = 3
OTHER = "other reasons"
EMPTY = "no text and no tokens"
BESIDE = "data in a folder beside the files that are read"

MAX_DOCUMENT_TOKENS = 1 << 28
"""A document is in memory whole; one of more tokens is a file that nobody said where to split."""
MAX_DOCUMENT_BYTES = 1 << 28
"""The same for text: a line, a row or a file."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a reader is told beside its file.

    fields: names of a row's fields. token_dtype: of token files that don't say it themselves. end_id, begin_id: the
    token that ends (begins) every document of token files that don't record borders; at most one of them. root: the
    data set's folder, for the names of files in it.
    """

    fields: Fields = field(default_factory=Fields)
    token_dtype: str | None = None
    end_id: int | None = None
    begin_id: int | None = None
    root: Path | None = None


class Turns:
    """Deals a data set to readers: of its rows in order, row k is reader k mod n's. One is made for each walk."""

    def __init__(self, shard: tuple[int, int]) -> None:
        self._reader, self._readers = shard
        self._next = 0

    def take(self) -> bool:
        """Say whether the next row is this reader's."""
        mine = self._next % self._readers == self._reader
        self._next += 1
        return mine

    def among(self, count: int) -> range:
        """Say which of the next `count` rows are this reader's."""
        first = (self._reader - self._next) % self._readers
        self._next += count
        return range(first, count, self._readers)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Something that was left out. where: "path:line" or a file; reason: words that are the same for the same fault."""

    where: str
    reason: str


class Tally:
    """What a walk gave and left out: num_documents; counts by reason, with the first few places of each.

    notes: of documents that were given, counts of what of their rows was not, by `Document.notes`.
    """

    def __init__(self) -> None:
        self.num_documents = 0
        self.counts: dict[str, int] = {}
        self.notes: dict[str, int] = {}
        self.examples: list[Rejection] = []

    def reject(self, where: str, reason: str) -> None:
        """Count what was left out."""
        self._count(self.counts, where, reason)

    def give(self, document: Document) -> None:
        """Count a document that is given, and what of its row isn't."""
        self.num_documents += 1
        for note in document.notes:
            self._count(self.notes, document.where, note)

    def _count(self, counts: dict[str, int], where: str, reason: str) -> None:
        if reason not in counts and len(counts) >= MAX_REASONS:
            reason = OTHER
        counts[reason] = counts.get(reason, 0) + 1
        if counts[reason] <= EXAMPLES:
            self.examples.append(Rejection(where, reason))

    @classmethod
    def of(cls, tallies: Iterable[Tally]) -> Tally:
        """Add tallies up."""
        total = cls()
        for tally in tallies:
            total.num_documents += tally.num_documents
            total.examples += tally.examples
            for counts, more in ((total.counts, tally.counts), (total.notes, tally.notes)):
                for reason, count in more.items():
                    counts[reason] = counts.get(reason, 0) + count
        return total

    @property
    def num_empty(self) -> int:
        """How many were left out because they had neither text nor tokens."""
        return self.counts.get(EMPTY, 0)

    @property
    def num_rejected(self) -> int:
        """How many were left out for other reasons than that they were empty."""
        return sum(self.counts.values()) - self.num_empty

    def told(self) -> str:
        """Say in one paragraph what was left out and what of rows was, with examples; empty where nothing was."""
        parts = []
        if self.counts:
            parts.append(f"{sum(self.counts.values())} left out: {self._listed(self.counts)}")
        if self.notes:
            parts.append(f"{sum(self.notes.values())} trained only in part: {self._listed(self.notes)}")
        return "; and ".join(parts)

    def _listed(self, counts: dict[str, int]) -> str:
        listed = []
        for reason, count in counts.items():
            places = [printable(one.where) for one in self.examples if one.reason == reason]
            listed.append(f"{count} for {reason} ({', '.join(places)}{', ...' if count > len(places) else ''})")
        return "; ".join(listed)


Reader = Callable[[Path, Reading, Turns, Tally], Iterator[Row | Document]]
"""Walks the rows or documents of one file that are this reader's turn. ValueError: a file that can't be trusted."""


class Source:
    """Documents of files of one format, streamed in the order of the files.

    shard: (i, n) is reader i of n; all readers' documents together are the data set, document k reader k mod n's
    (counted with empty and rejected ones). beside: files of folders beside `files` that look like data and aren't read.
    tally: what the last walk gave and left out.

    Errors (ValueError), in a walk: a file or a row that can't be read, with its place; a data set without documents
    (where there is one reader: of several, one may have none).
    """

    again = False
    """Whether the document given last had been given before; only a mixture's may."""

    def __init__(
        self,
        path: Any,
        format: str,
        files: list[Any],
        reader: Reader,
        reading: Reading,
        shard: tuple[int, int],
        beside: Sequence[Path] = (),
    ) -> None:
        self.path = path
        self.format = format
        self.files = files
        self.reading = reading
        self.shard = shard
        self.beside = beside
        self.tally = Tally()
        self._reader = reader

    @property
    def parts(self) -> tuple[Source, ...]:
        """The sources that it is made of: itself."""
        return (self,)

    def __iter__(self) -> Iterator[Document]:
        tally = self.tally = Tally()
        turns = Turns(self.shard)
        for file in self.beside if self.shard[0] == 0 else ():
            tally.reject(str(file), BESIDE)
        for item in self._items(turns, tally):
            for document in self._documents(item, tally):
                if is_empty(document):
                    tally.reject(document.where, EMPTY)
                else:
                    tally.give(document)
                    yield document
        if not tally.num_documents and self.shard == (0, 1):
            raise ValueError(self._nothing())

    def _items(self, turns: Turns, tally: Tally) -> Iterator[Row | Document]:
        for file in self.files:
            with told_at(file.__str__):
                yield from self._reader(file, self.reading, turns, tally)

    def _documents(self, item: Row | Document, tally: Tally) -> tuple[Document, ...]:
        if isinstance(item, Document):
            return (item,)
        try:
            return documents_of(item, self.reading.fields)
        except Rejected as rejected:
            tally.reject(rejected.where, rejected.reason)
            return ()

    def _nothing(self) -> str:
        tally = self.tally
        left_out = f", {tally.told()}" if tally.num_rejected else ""
        do = (
            "mend what is left out, or point data.path (or data.eval_path) at other data"
            if tally.num_rejected
            else f"point data.path (or data.eval_path) at data with a field {self.reading.fields.text!r}, with tokens "
            f"or with chats"
        )
        return (
            f"the data set {self.path} holds no document: {len(self.files)} file(s) read, {tally.num_empty} "
            f"document(s) without text (read as {self.format}){left_out}; {do}"
        )


def is_empty(document: Document) -> bool:
    """Say whether there is nothing to train on: no text, no tokens, no chat."""
    return not document.text and document.chat is None and (document.tokens is None or not len(document.tokens))
