"""Data shards: the writing side of a folder of prepared data, so that a crash at any moment loses one at most."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import IO, Any

import numpy as np

from hsap import files
from hsap.data.prepared.index import (
    COLUMNS,
    INDEX,
    File,
    Index,
    Shard,
    check_file,
    column_file,
    read_signed,
    signed,
    tally_json,
    tally_of_json,
)
from hsap.data.sources import Tally
from hsap.data.store import DocumentStore
from hsap.ir.check import Refused, shown

UNFINISHED = "unfinished.json"
_OURS = re.compile(rf"\d{{5,}}\.({'|'.join(COLUMNS)}|json)|\.?{UNFINISHED}|\.{INDEX}|\.\d{{5,}}\.json")
_RECORD = "json"


@contextmanager
def begun(folder: Path, work: Mapping[str, object]) -> Iterator[list[tuple[Shard, Tally]]]:
    """Begin a folder, or go on with one that was left; gives the shards that are whole, with what each left out.

    work: what is being prepared, JSON values by name. Nobody else can write to the folder meanwhile. Errors
    (ValueError): a folder of other things or of other work; one that is being written.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    strangers = sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name))
    if strangers:
        raise Refused(f"{folder} holds other things ({', '.join(strangers[:3])}); name a folder that is new or empty")
    with open(folder / UNFINISHED, "ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(f"{folder} is being prepared by another process; wait for it, or end it") from error
        if (folder / INDEX).is_file() or not is_named(held, folder / UNFINISHED):
            # Between our look at the folder and the lock, whoever had that has finished, and may have begun to train.
            raise Refused(f"{folder} has just been prepared by another process; run the same command again")
        if column_file(folder, 0, _RECORD).is_file():
            same_work(folder, read_signed(folder / UNFINISHED), work)
        else:
            # Nothing is lost by beginning anew, so that a slip can be mended.
            held.truncate(0)
            held.write(_json(signed(dict(work))))
            held.flush()
            os.fsync(held.fileno())
        dtype = str(work["token_dtype"])
        finished = _finished(folder, dtype)
        try:
            yield finished
        except BaseException:
            if not any(shard.documents for shard, _ in _finished(folder, dtype)):
                _leave(folder, is_new)
            raise


def _leave(folder: Path, is_new: bool) -> None:
    """Take away the traces of what came to nothing, and the folder if nothing was there before."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            path.unlink()
    if is_new:
        folder.rmdir()


def is_named(file: IO[Any], path: Path) -> bool:
    """Say whether an open file still has that name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def same_work(folder: Path, was: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Refuse to go on with a folder that was begun from something else, or otherwise; ValueError says what differs.

    A seed differs only where there is an order to choose, which is in a mixture.
    """
    was, now = (dict(_flat(json.loads(json.dumps(values)))) for values in (was, now))
    without_order = () if isinstance(now.get("data.path"), dict) else ("train.seed",)
    differs = [
        f"{name} was {shown(was.get(name))}, now {shown(one)}"
        for name, one in now.items()
        if was.get(name) != one and name not in without_order
    ]
    if differs:
        raise Refused(
            f"{folder} holds data that was prepared from something else, or otherwise: {'; '.join(differs)}; run the "
            f"command that made it, name another folder, or remove this one"
        )


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Walk settings one by one, by name."""
    for name, value in values.items():
        if name == "settings":
            yield from value.items()
        elif name == "source":
            yield from ((f"{name} {inner}", one) for inner, one in value.items())
        elif name != "sha256":
            yield name, value


def _finished(folder: Path, token_dtype: str) -> list[tuple[Shard, Tally]]:
    """Read which shards are whole, and remove what a crash has left of others."""
    found: list[tuple[Shard, Tally]] = []
    while (record := column_file(folder, len(found), _RECORD)).is_file():
        values = read_signed(record)
        shard = Shard.of_json(values.get("shard"), str(record), token_dtype)
        for name, file in shard.columns.items():
            check_file(column_file(folder, len(found), name), file.bytes)
        found.append((shard, tally_of_json(values.get("left_out"), str(record))))
    for path in folder.iterdir():
        number = path.name.lstrip(".").split(".")[0]
        if path.name.startswith(".") or (number.isdigit() and int(number) >= len(found)):
            path.unlink()
    return found


class Growing:
    """A shard that grows in memory. read, chats: as in `Shard`; left_out: documents of it that tokenising left out."""

    def __init__(self) -> None:
        self.parts: list[DocumentStore] = []
        self.documents = self.tokens = self.trained = self.read = self.chats = 0
        self.left_out = Tally()

    def add(self, store: DocumentStore, read: int, chats: int) -> None:
        """Put documents behind those that are there."""
        self.parts.append(store)
        self.documents += len(store.ids)
        self.tokens += len(store.tokens)
        self.trained += len(store.tokens) if store.trained is None else int(np.count_nonzero(store.trained[:]))
        self.read += read
        self.chats += chats

    def write(self, folder: Path, number: int, token_dtype: str) -> Shard:
        """Put the shard on the disk: its columns, then the record that makes it whole."""
        columns = self._columns(np.dtype(token_dtype).newbyteorder("<"))
        shard = self._shard(
            {name: File(*astuple(files.write(column_file(folder, number, name), chunks))) for name, chunks in columns}
        )
        files.sync(folder)
        record = {"shard": asdict(shard), "left_out": tally_json(self.left_out)}
        files.replace(column_file(folder, number, _RECORD), _json(signed(record)))
        return shard

    def measured(self, token_dtype: str) -> Shard:
        """Say what the shard would be on the disk."""
        columns = self._columns(np.dtype(token_dtype).newbyteorder("<"))
        return self._shard({name: File(*astuple(files.measure(chunks))) for name, chunks in columns})

    def _shard(self, columns: Mapping[str, File]) -> Shard:
        return Shard(self.documents, self.tokens, self.trained, self.read, self.chats, columns)

    def _columns(self, dtype: np.dtype) -> Iterator[tuple[str, Iterable[bytes | np.ndarray]]]:
        parts = self.parts
        yield "tokens", (part.tokens[:].astype(dtype) for part in parts)
        yield "starts", [_starts([part.lengths for part in parts])]
        ids = [[name.encode("utf-8", "surrogatepass") for name in part.ids] for part in parts]
        yield "ids", map(b"".join, ids)
        yield "id_starts", [_starts([np.array([*map(len, some)], np.int64) for some in ids])]
        if any(part.trained is not None for part in parts):
            marks = [np.ones(len(part.tokens), bool) if part.trained is None else part.trained[:] for part in parts]
            yield "trained", [np.packbits(np.concatenate(marks), bitorder="little")]
        if any(part.answers is not None for part in parts):
            counts = [np.diff(p.answers[0]) if p.answers is not None else np.zeros(len(p.ids), int) for p in parts]
            yield "answer_starts", [_starts(counts)]
            yield "answers", (part.answers[1].astype("<u8") for part in parts if part.answers is not None)


def publish(folder: Path, index: Index) -> None:
    """Make a folder of whole shards prepared data: the index appears at once, when all else is on the disk."""
    files.replace(folder / INDEX, _json(index.to_json()))
    clear(folder)


def clear(folder: Path) -> None:
    """Take away what only a folder that isn't finished needs; a crash may have come between."""
    for path in folder.glob(f"*.{_RECORD}"):
        if _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)  # of two that do this at a time the other was faster
    files.sync(folder)


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=1).encode()


def _starts(lengths: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int64), *lengths]))]).astype("<u8")
