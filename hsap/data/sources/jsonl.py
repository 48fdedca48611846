"""JSON: lines of one object each, or an array of objects; plain, gzip or Zstandard, in whatever the name says."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hsap.data.fields import Row
from hsap.data.json_decoder import TWICE, JsonDecoder
from hsap.data.sources.source import MAX_DOCUMENT_BYTES, Reading, Tally, Turns
from hsap.data.sources.stream import UTF8_MARK, opened, told_at

_BLOCK_CHARACTERS = 1 << 16
_BLANKS = re.compile(r"[ \t\r\n]*")
_LONGEST_ESCAPE = 16


def read_json(file: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Row]:
    """Walk a file of JSON lines, or of one array of objects, as its first character says."""
    with told_at(lambda: f"{file}:1"), opened(file) as stream:
        head = stream.read(_BLOCK_CHARACTERS).removeprefix(UTF8_MARK).lstrip()
    decoder = JsonDecoder()
    for row in (_read_array if head[:1] == b"[" else _read_lines)(file, turns, decoder):
        if decoder.twice is None:
            yield row
        else:
            tally.reject(row.where, TWICE)


def _read_lines(file: Path, turns: Turns, decoder: JsonDecoder) -> Iterator[Row]:
    """Blank lines are skipped; other readers' lines are counted, not parsed."""
    for number, line in _lines(file):
        if turns.take():
            where = f"{file}:{number}"
            yield Row(_object(_decoded(line, where), where, decoder), where, f"{file.name}:{number}")


def _read_array(file: Path, turns: Turns, decoder: JsonDecoder) -> Iterator[Row]:
    """Nothing is in memory but a block and the object that it ends in."""
    for number, (line, value) in enumerate(_items(file, decoder)):
        if turns.take():
            where = f"{file}:{line} (item {number})"
            yield Row(_of_object(value, where, "item"), where, f"{file.name}:{number}")


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Walk the lines of a file that aren't blank, numbered from 1."""
    number = 0
    with told_at(lambda: f"{file}:{number + 1}"), opened(file) as stream:
        while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{file}:{number}: the line is longer than {MAX_DOCUMENT_BYTES} bytes; write one object a line, "
                    f"and split a document that long"
                )
            line = line.removeprefix(UTF8_MARK) if number == 1 else line
            if line.strip():
                yield number, line


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1}); convert the file to "
            f"UTF-8, or remove the line"
        ) from error


def _object(text: str, where: str, decoder: JsonDecoder) -> dict[str, Any]:
    try:
        value = decoder.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON ({error}); repair or remove the line") from error
    return _of_object(value, where, "line")


def _of_object(value: object, where: str, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(
            f"{where}: the {what} is a JSON {type(value).__name__}, not an object; write one object for each {what}"
        )
    return value


class _Window:
    """The part of a text file that is in memory. text[at:] is not yet used; line is where that begins."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self.file = file
        self.text = ""
        self.at = 0
        self.line = 1
        self.ended = False
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def more(self, characters: int = _BLOCK_CHARACTERS) -> None:
        """Read on, and leave behind what is used."""
        data = self._stream.read(characters)
        self.ended = not data
        self.text, self.at = self.text[self.at :], 0
        try:
            self.text += self._decoder.decode(data, final=self.ended)
        except UnicodeDecodeError as error:
            line = self.line + self.text.count("\n") + error.object[: error.start].count(b"\n")
            raise ValueError(
                f"{self.file}:{line}: not UTF-8 (byte 0x{error.object[error.start]:02x}); convert the file to UTF-8"
            ) from error

    def use(self, stop: int) -> None:
        """Go on to text[stop:]."""
        self.line += self.text.count("\n", self.at, stop)
        self.at = stop

    def next(self) -> str:
        """Go to the next character that isn't blank and give it; empty at the end of the file."""
        while True:
            blanks = _BLANKS.match(self.text, self.at)
            assert blanks, "none are blanks too"
            self.use(blanks.end())
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.more()

    def take(self) -> str:
        """Go behind the next character that isn't blank and give it."""
        character = self.next()
        self.use(self.at + len(character))
        return character

    def refuse(self, what: str, line: int | None = None) -> ValueError:
        return ValueError(f"{self.file}:{line or self.line}: not valid JSON ({what}); repair the file")


def _items(file: Path, decoder: JsonDecoder) -> Iterator[tuple[int, object]]:
    """Walk the items of an array with the lines they begin at."""
    window = None
    with told_at(lambda: f"{file}:{window.line if window else 1}"), opened(file) as stream:
        window = _Window(stream, file)
        window.take()
        border = ","
        if window.next() == "]":
            border = window.take()
        while border == ",":
            if not window.next():
                raise window.refuse("the file ends inside the array")
            yield window.line, _value(window, decoder)
            border = window.take()
        if border != "]":
            raise window.refuse("the file ends inside the array" if not border else f"{border!r} between items")
        if window.next():
            raise window.refuse("something follows the array")


def _value(window: _Window, decoder: JsonDecoder) -> object:
    """Decode the value that begins here, reading on until it is whole: twice as much each time, so in linear time."""
    block = _BLOCK_CHARACTERS
    while True:
        try:
            value, end = decoder.raw_decode(window.text, window.at)
        except json.JSONDecodeError as error:
            # What is only cut off fails at the end of the text, or within a string that has no end.
            cut = error.msg.startswith("Unterminated") or error.pos > len(window.text) - _LONGEST_ESCAPE
            if window.ended or not cut:
                line = window.line + window.text.count("\n", window.at, error.pos)
                raise window.refuse(error.msg, line) from error
            if len(window.text) - window.at > MAX_DOCUMENT_BYTES:
                raise window.refuse(f"the item that begins here goes on for {MAX_DOCUMENT_BYTES} characters") from error
            window.more(block)
            block *= 2
        except (ValueError, RecursionError) as error:
            raise window.refuse(str(error)) from error
        else:
            # A number may go on behind the window; an object ends where it ends.
            if end < len(window.text) or window.ended or isinstance(value, dict):
                window.use(end)
                return value
            window.more()
