"""Text: a file as a document, and a source tree (a repository) as one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hsap.data.document import Document
from hsap.data.sources.source import MAX_DOCUMENT_BYTES, Reading, Tally, Turns
from hsap.data.sources.stream import UTF8_MARK, opened, told_at

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
MAX_FILE_BYTES = 1 << 20
"""The longest file of a source tree that is taken: longer ones are data or generated."""
HISTORIES = (".git", ".hg", ".svn", ".jj")
LEFT_OUT = (*HISTORIES, "__pycache__", "node_modules", ".venv", ".tox", ".mypy_cache", ".ruff_cache", ".pytest_cache")
_HEADER = "==> {} <==\n"


def read_text(file: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Document]:
    """Give a text file as one document; gzip and Zstandard are unpacked."""
    if not turns.take():
        return
    with told_at(lambda: file), opened(file) as stream:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{file} is longer than {MAX_DOCUMENT_BYTES} bytes, too long for one document; split the file")
    try:
        text = data.removeprefix(UTF8_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); convert the file to UTF-8, or take it away"
        ) from error
    name = file.relative_to(reading.root).as_posix() if reading.root is not None else file.name
    yield Document(name, f"{file}:1", text=text)


def read_tree(folder: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Document]:
    """Give a repository as one document: its text files in order of their paths, each under a line with its path.

    Left out and counted: binary files, files that aren't UTF-8 or whose names aren't, files longer than
    `MAX_FILE_BYTES`, links; a repository of more than `MAX_DOCUMENT_BYTES` altogether. Histories and caches are left
    out without a word.
    """
    if not turns.take():
        return
    parts, num_bytes = [], 0
    for file in _walk(folder, tally):
        text = _source(file, tally)
        if text is None:
            continue
        parts.append(_HEADER.format(file.relative_to(folder).as_posix()) + text + ("" if text.endswith("\n") else "\n"))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_DOCUMENT_BYTES:
            tally.reject(str(folder), f"a repository of more than {MAX_DOCUMENT_BYTES} bytes")
            return
    yield Document(folder.resolve().name, str(folder), text="\n".join(parts))


def _walk(folder: Path, tally: Tally) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename or folder}: can't be read ({error}); check its permissions") from error

    paths = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        paths += [Path(root, name) for name in names if name not in LEFT_OUT]
    for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix()):
        if path.is_symlink() or not path.is_file():
            tally.reject(str(path), "a link or no regular file")
        else:
            yield path


def _source(file: Path, tally: Tally) -> str | None:
    """Read a file of a source tree; None where it is left out, and counted."""
    if any("\ud800" <= character <= "\udfff" for character in str(file)):  # how Python names what isn't
        tally.reject(str(file), "a file in a source tree whose name isn't UTF-8")
        return None
    with told_at(lambda: file), open(file, "rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        tally.reject(str(file), f"a file of more than {MAX_FILE_BYTES} bytes in a source tree")
        return None
    if b"\0" in data:
        tally.reject(str(file), "a binary file in a source tree")
        return None
    try:
        return data.removeprefix(UTF8_MARK).decode("utf-8")
    except UnicodeDecodeError:
        tally.reject(str(file), "a file in a source tree that isn't UTF-8")
        return None
