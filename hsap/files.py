"""Files that must survive a crash: on the disk when a function returns, and known by their checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was written. size: bytes. sha256: hexadecimal."""

    size: int
    sha256: str


def write(path: Path, chunks: Iterable[Any]) -> Written:
    """Write bytes, or contiguous arrays' bytes, one chunk after the other; OSError, which names the file."""
    try:
        with open(path, "wb") as file:
            written = measure(_each(chunks, file))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # What is written to an open file fails without a name.
        error.filename = error.filename or str(path)
        raise
    return written


def replace(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, and its name with it."""
    fresh = path.with_name(f".{path.name}")
    write(fresh, [content])
    os.replace(fresh, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Put a folder's names on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def measure(chunks: Iterable[Any]) -> Written:
    """Say what `write` would give, without a file."""
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size += memoryview(chunk).nbytes
    return Written(size, digest.hexdigest())


def sha256(path: str | Path) -> str:
    """Read a file, a piece at a time, and give its checksum: hexadecimal."""
    with open(path, "rb") as file:
        return measure(iter(lambda: file.read(_CHUNK), b"")).sha256


def short(digest: str) -> str:
    """Spell a checksum as people are told it, and checkpoints too."""
    return f"sha256 {digest[:12]}"


def _each(chunks: Iterable[Any], file: IO[bytes]) -> Iterator[Any]:
    for chunk in chunks:
        file.write(chunk)
        yield chunk
