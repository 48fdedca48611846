"""Sources: where documents come from. A source is any iterable of `Document` that can be walked again.

Here: JSON lines, plain or gzipped (told apart by content, not by name), one file or a directory of them.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hsap.data.document import Document

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz", ".json.gz")
"""The files of a directory that are read. A bare .json is not: it is a tokenizer or a manifest more often than data."""

_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"


class JsonLines:
    """Documents of JSON-lines files, streamed in the order of file name and line.

    path: a file, or a directory whose files with one of `SUFFIXES` are read, sorted by name.
    text_field: the field with the text; it wins where a row has tokens too, because those may be another tokenizer's.
    None reads tokens only. token_fields: names tried in order for a list of token ids. id_field: optional in the data.

    Blank lines are skipped. A document without text or tokens is skipped and counted in `num_empty`, which describes
    the last walk. Errors (ValueError): a line that can't be read, with file:line; a data set without any document.
    """

    def __init__(
        self,
        path: str | Path,
        text_field: str | None = "text",
        token_fields: tuple[str, ...] = ("tokens", "input_ids"),
        id_field: str = "id",
    ) -> None:
        self.files = list_files(path)
        self.path = Path(path)
        self.text_field = text_field
        self.token_fields = tuple(token_fields)
        self.id_field = id_field
        self.num_empty = 0

    def __iter__(self) -> Iterator[Document]:
        self.num_empty = num_documents = 0
        for file in self.files:
            for number, line in _lines(file):
                document = self._document(line, file, number)
                if document is None:
                    self.num_empty += 1
                else:
                    num_documents += 1
                    yield document
        if not num_documents:
            raise ValueError(
                f"the data set {self.path} holds no document: {len(self.files)} file(s) read, {self.num_empty} "
                f"document(s) without text; point data.path (or data.eval_path) at JSON lines with a field "
                f"{self.text_field!r}"
            )

    def _document(self, line: bytes, file: Path, number: int) -> Document | None:
        where = f"{file}:{number}"
        row = _parse(line, where)
        name = row.get(self.id_field)
        name = f"{file.name}:{number}" if name is None else str(name)
        if self.text_field is not None and self.text_field in row:
            text = _text(row[self.text_field], self.text_field, where)
            return Document(name, where, text=text) if text else None
        for field in self.token_fields:
            if field in row:
                tokens = _tokens(row[field], field, where)
                return Document(name, where, tokens=tokens) if len(tokens) else None
        wanted = [repr(field) for field in (self.text_field, *self.token_fields) if field is not None]
        raise ValueError(
            f"{where}: the row has none of the fields {', '.join(wanted)}, only {', '.join(sorted(row)) or 'none'}; "
            f"name the right one in data.text_field, or repair the line"
        )


def list_files(path: str | Path) -> list[Path]:
    """List the files of a data set: the file itself, or a directory's files with one of `SUFFIXES`, sorted by name.

    Errors (ValueError): nothing there, or a directory without such a file.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"data set {path} doesn't exist; set data.path (or data.eval_path) to a file or a directory")
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(SUFFIXES))
    if not files:
        raise ValueError(
            f"the data set directory {path} is empty: no file ends in {', '.join(SUFFIXES)}; set data.path (or "
            f"data.eval_path) to a directory with such files, or to one file of any name"
        )
    return files


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Walk the lines of a file that aren't blank, numbered from 1."""
    number = 0
    try:
        with open(file, "rb") as raw:
            packed = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            for line in gzip.GzipFile(fileobj=raw) if packed else raw:
                number += 1
                line = line.removeprefix(_UTF8_MARK) if number == 1 else line
                if line.strip():
                    yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{file}:{number + 1}: the gzip stream is cut short or damaged ({error}); copy the file again"
        ) from error
    except OSError as error:
        raise ValueError(f"{file}:{number + 1}: can't be read ({error}); check the file and its permissions") from error


def _parse(line: bytes, where: str) -> dict:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1}); convert the file to "
            f"UTF-8, or remove the line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}); repair or remove the line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: the line is a JSON {type(row).__name__}, not an object; write one object a line")
    return row


def _text(value: object, field: str, where: str) -> str:
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


def _tokens(value: object, field: str, where: str) -> np.ndarray:
    # bool is an int to Python, and JSON's true is no token.
    if not isinstance(value, list) or not all(type(token) is int and abs(token) < 1 << 62 for token in value):
        raise ValueError(f"{where}: field {field!r} is not a list of integers; repair the line")
    return np.array(value, dtype=np.int64)
