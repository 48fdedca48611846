"""Stream: the bytes of a text file, plain, gzip or Zstandard, told apart by content and not by name."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
UTF8_MARK = b"\xef\xbb\xbf"

PACKED = (".gz", ".zst", ".zstd")

_CHUNK_BYTES = 8192
"""Zstandard input taken at once: at its highest ratio, 32,768, this much becomes 256 MiB."""
_WINDOW_BYTES = 1 << 27
"""Zstandard's own limit of what a frame may ask a reader to keep; `--long=31` asks for 2 GiB, which large files may."""


def is_zstd(head: bytes) -> bool:
    """Say whether a file begins a Zstandard frame, or one that is to be skipped (parallel compressors write these)."""
    return head[:4] == ZSTD_MAGIC or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F)


def compression_of(head: bytes) -> str | None:
    """Name the compression of a file by its first bytes: gzip, zstd or None."""
    return "gzip" if head[:2] == GZIP_MAGIC else "zstd" if is_zstd(head) else None


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file to be read forward, uncompressed on the way; nothing is read ahead but a buffer's length."""
    with open(file, "rb") as raw:
        head = raw.read(4)
        raw.seek(0)
        if not head and file.suffix in PACKED:
            raise EOFError("it is empty") if file.suffix == ".gz" else _Damaged("it is empty")
        if head[:2] == GZIP_MAGIC:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        elif is_zstd(head):
            yield io.BufferedReader(_Frames(raw, file), 1 << 17)
        else:
            yield raw


@contextmanager
def told_at(place: Callable[[], object]) -> Iterator[None]:
    """Turn errors of reading into a ValueError that names the place. place: gives "path:line" when asked."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, _Damaged) as error:
        kind = "Zstandard" if isinstance(error, _Damaged) else "gzip"
        raise ValueError(
            f"{place()}: the {kind} stream is cut short or damaged ({error}); copy the file again"
        ) from error
    except OSError as error:
        raise ValueError(f"{place()}: can't be read ({error}); check the file and its permissions") from error


class _Damaged(Exception):
    """A Zstandard stream that ends too early or isn't one."""


class _Frames(io.RawIOBase):
    """Zstandard frames one after the other, whether or not they say their size; a last frame that isn't complete is
    an error here, while the library's own stream reader takes it for the end."""

    def __init__(self, raw: BinaryIO, file: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(f"{file} is compressed by Zstandard; to read it: pip install zstandard") from error
        self._zstd = zstandard
        self._raw = raw
        self._file_bytes = file.stat().st_size
        self._frame: Any = None
        self._coming = b""  # compressed bytes read and not yet given to a frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._advance():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _advance(self) -> bool:
        """Decompress some more; False at the end of the file."""
        if not self._coming:
            self._coming = self._raw.read(_CHUNK_BYTES)
            if not self._coming:
                if self._frame is not None:
                    raise _Damaged("its last frame is not complete")
                return False
        try:
            if self._frame is None:
                self._frame = self._open_frame()
            self._ready = memoryview(self._frame.decompress(self._coming))
        except (self._zstd.ZstdError, MemoryError) as error:
            raise _Damaged(str(error)) from error
        self._coming = self._frame.unused_data
        if self._frame.eof:
            self._frame = None
        return True

    def _open_frame(self) -> Any:
        """Begin a frame; the memory that it asks for is granted to files that are themselves of that order."""
        self._coming += self._raw.read(max(0, 18 - len(self._coming)))  # the longest header
        window = _WINDOW_BYTES
        if self._coming[:4] == ZSTD_MAGIC:
            asked = self._zstd.get_frame_parameters(self._coming).window_size
            if asked > max(_WINDOW_BYTES, 32 * self._file_bytes):
                raise _Damaged(f"a file of {self._file_bytes} bytes asks for a window of {asked} bytes")
            window = max(window, asked)
        return self._zstd.ZstdDecompressor(max_window_size=min(window, 1 << 31)).decompressobj()
