"""The cache: raw data is prepared by whoever trains on it first, and all others map what that one has left.

A folder of the cache is named after everything that decides what is in it: files (names, sizes, times of change),
settings, tokenizer, chat template and the code that reads them. So whatever changes leads to another folder, and what a
run finds under its name is what it would make itself. A lock beside the folder lets one process prepare it; it falls
with its holder, and the next one goes on behind the shards that are whole.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from hsap.data.config import DataConfig
from hsap.data.opening import open_data, open_tokenizer
from hsap.data.prepared.index import INDEX
from hsap.data.prepared.making import SHARD_TOKENS, prepare, work_of
from hsap.data.prepared.progress import Progress
from hsap.data.prepared.shards import is_named
from hsap.ir.check import Refused

WORKER_BYTES = 1 << 21
"""Bytes of files for which another process is started: starting one takes as long as tokenising a part of them."""
TOLD_AFTER_S = 5.0
"""A process that waits for another one says so after so long."""
_POLL_S, _MAX_POLL_S = 0.02, 1.0
_SEEN_WITHIN_S = 60.0
"""Network file systems may show what another machine has written as late as this."""
_FINISHED = b"finished"
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENOLCK, errno.EOPNOTSUPP)
_READING = Path(__file__).resolve().parents[1]
_NOT_READING = ("packing",)
"""Of the code in hsap/data: what has no part in how files become tokens."""

Named = str | Sequence[str] | Mapping[str, float]
"""A data set as data.path names it."""


def cached(data: DataConfig, path: Named, seed: int = 0, name: str = "data.path", who: str = "hsap") -> Path | None:
    """Give the folder of the cache that holds a data set, prepared now if it isn't there; None where there is no cache.

    Nor is there one for data that don't lie in files, whose changes nobody would see. path: of the data set, which
    need not be data.path. seed: of the order of a mixture. name, who: for messages. Errors (ValueError): what `prepare`
    refuses; a cache that can't be written.
    """
    folder, seed, work = _place(data, path, seed)
    if data.cache is None or folder is None or _is_finished(folder):
        return folder

    def tell() -> None:
        print(f"{who} waits for the process that prepares {name} in {folder}", file=sys.stderr, flush=True)

    with _disk_told(data.cache, name), _locked(folder, tell) as lock:
        if _is_finished(folder):
            return folder
        lock.truncate(0)
        workers = min(1 + work["source"]["bytes"] // WORKER_BYTES, len(os.sched_getaffinity(0)))
        if workers > 1:
            told = f"{who} prepares {name} in {folder}, once for all ranks and later runs"
            print(told, file=sys.stderr, flush=True)
        with Progress(f"{who}: {name}") as progress:
            prepare(replace(data, path=path), folder, workers, seed, progress, work=work)
        # It only saves others a wait: the folder is whole, even if the disk is full by now.
        with suppress(OSError):
            os.write(lock.fileno(), _FINISHED)
    return folder


def find_cached(data: DataConfig, path: Named, seed: int = 0) -> Path | None:
    """Give the folder of the cache that holds a data set, None where it isn't there; nothing is written."""
    folder, _, _ = _place(data, path, seed)
    return folder if folder is not None and _is_finished(folder) else None


def _is_finished(folder: Path) -> bool:
    return os.path.isfile(folder / INDEX)  # Path.is_file raises where a name is too long


def _place(data: DataConfig, path: Named, seed: int) -> tuple[Path | None, int, dict[str, Any]]:
    """Say where in the cache a data set lies, with which seed it is prepared, and from what."""
    if data.cache is None:
        return None, seed, {}
    source = open_data(data, path, seed)
    if not all(isinstance(file, Path) for part in source.parts for file in part.files):
        return None, seed, {}
    # Only a mixture has an order to choose: another seed must not prepare other data anew.
    seed = seed if isinstance(path, Mapping) else 0
    work = work_of(replace(data, path=path), seed, source, open_tokenizer(data), SHARD_TOKENS)
    places = [str(Path(part.path).resolve()) for part in source.parts]
    decides = json.dumps([work, places, _code()], sort_keys=True)
    # Sorted keys would hide in which order a mixture names its data sets.
    digest = hashlib.sha256(f"{decides}{json.dumps(path)}".encode("utf-8", "surrogateescape"))
    return Path(data.cache) / digest.hexdigest()[:16], seed, work


@functools.cache
def _code() -> str:
    """Describe the code that makes tokens of files: a correction of it must reach data that were prepared before."""
    digest = hashlib.sha256()
    for file in sorted(_READING.rglob("*")):
        if file.suffix in (".py", ".jinja") and file.relative_to(_READING).parts[0] not in _NOT_READING:
            digest.update(f"{file.relative_to(_READING)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@contextmanager
def _locked(folder: Path, tell: Callable[[], None]) -> Iterator[BinaryIO]:
    """Hold the lock of a folder, unless another process has finished that."""
    path = folder.with_name(f"{folder.name}.lock")
    while True:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+b") as lock:
            _acquire(lock, folder, tell)
            # Whoever empties the cache takes the lock's name: the next process then locks a file of its own.
            if _is_finished(folder) or is_named(lock, path):
                yield lock
                return


def _acquire(lock: BinaryIO, folder: Path, tell: Callable[[], None]) -> None:
    """Wait until this process holds a lock, or another one has finished the folder."""
    began, told, pause = time.monotonic(), False, _POLL_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if _is_finished(folder):
                return
        if not told and time.monotonic() - began >= TOLD_AFTER_S:
            tell()
            told = True
        time.sleep(pause)
        pause = min(2 * pause, _MAX_POLL_S)
    if pause == _POLL_S:
        return
    lock.seek(0)
    if lock.read() == _FINISHED:
        until = time.monotonic() + _SEEN_WITHIN_S
        while not _is_finished(folder) and time.monotonic() < until:
            time.sleep(_MAX_POLL_S)


@contextmanager
def _disk_told(cache: str, name: str) -> Iterator[None]:
    """Say in a paragraph what the file system of the cache refuses."""
    try:
        yield
    except OSError as error:
        # The cache's own parents are made too.
        named = Path(error.filename) if isinstance(error.filename, str | Path) else None
        inside = named is not None and (named.is_relative_to(cache) or named in Path(cache).parents)
        if not inside and error.errno not in _OF_THE_DISK:
            raise
        raise Refused(
            f"{name} can't be kept in data.cache={cache} ({error.strerror}): its tokens are written there once, 2 or 4 "
            f"bytes each, for all ranks and later runs; make room, set data.cache to a folder that can be written, or "
            f"to null: then every rank tokenises the data itself and keeps them in memory"
        ) from error
