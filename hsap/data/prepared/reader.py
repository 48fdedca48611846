"""Reader: prepared data as a `DocumentStore` whose tokens stay on the disk until a batch asks for them."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from hsap.data.column import Column
from hsap.data.prepared.index import Index, Shard, check_file, column_file, read_index
from hsap.data.sources.tokens import mapped
from hsap.data.store import DocumentStore
from hsap.ir.check import Refused, shown

_MAX_MAPS = 1024
"""Files of a column that are mapped at a time: systems allow 65,530 maps a process."""
_AGAIN = "copy it again, or prepare the data anew"


def open_store(folder: str | Path) -> DocumentStore:
    """Open a folder of prepared data; what is in memory then grows with its documents, not with its tokens.

    Errors (ValueError, each names the file): `read_index`'s; a file that is missing or of another size; starts or
    answers out of order. Later, when they are read: token ids outside the vocabulary, ids that aren't UTF-8.
    """
    return store_of(Path(folder), read_index(folder))


def store_of(folder: Path, index: Index) -> DocumentStore:
    """Open the documents of a folder whose index has been read."""
    for number, shard in enumerate(index.shards):
        for column, file in shard.columns.items():
            check_file(column_file(folder, number, column), file.bytes)
    starts = np.zeros(index.documents + 1, np.int64)
    documents, tokens = _borders(index, "documents"), _borders(index, "tokens")
    for number, shard in enumerate(index.shards):
        own = read_starts(folder, number, shard.documents, shard.tokens, "starts")
        starts[documents[number] : documents[number + 1] + 1] = own + tokens[number]
    trained = any("trained" in shard.columns for shard in index.shards)
    return DocumentStore(
        tokens=Column(tokens, np.int32, _token_reader(folder, index)),
        starts=starts,
        ids=_Ids(folder, index.shards, documents),
        trained=Column(tokens, bool, _trained_reader(folder, index.shards)) if trained else None,
        answers=_answers(folder, index, starts),
    )


class _Ids(Sequence[Any]):
    """Ids of documents, decoded one by one when they are asked for."""

    def __init__(self, folder: Path, shards: Sequence[Shard], borders: list[int]) -> None:
        self._folder, self._shards, self._borders = folder, shards, borders
        self._maps = functools.lru_cache(_MAX_MAPS)(self._map)

    def __len__(self) -> int:
        return self._borders[-1]

    def __getitem__(self, document: int) -> str:  # type: ignore[override]  # nobody asks for a slice of ids
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        shard = bisect_right(self._borders, document) - 1
        starts, text = self._maps(shard)
        begin, end = starts[document - self._borders[shard] :][:2].tolist()
        file = column_file(self._folder, shard, "ids")
        if not 0 <= begin <= end <= len(text):
            raise Refused(f"{file}: the id of document {document} lies outside it ({begin} to {end}); {_AGAIN}")
        try:
            return text[begin:end].tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise Refused(f"{file}: the id of document {document} isn't UTF-8 ({error}); {_AGAIN}") from error

    def _map(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        starts = _mapped(self._folder, self._shards, shard, "id_starts", "<u8")
        return starts, _mapped(self._folder, self._shards, shard, "ids", "u1")


def _mapped(folder: Path, shards: Sequence[Shard], shard: int, column: str, dtype: str | np.dtype) -> np.ndarray:
    """Map a file, which has been there: maps are made when they are first needed, hours later perhaps."""
    file = column_file(folder, shard, column)
    try:
        if (found := file.stat().st_size) != (was := shards[shard].columns[column].bytes):
            raise Refused(
                f"{file} had {was} bytes when the data were opened, and has {found} now; put it back as it was, and go "
                f"on from the newest checkpoint (resume=true), wherever the folder now lies"
            )
        return mapped(file, np.dtype(dtype))
    except OSError as error:
        raise Refused(
            f"{file} was there when the data were opened, and can't be read any more ({error.strerror}); put it back, "
            f"and go on from the newest checkpoint (resume=true), wherever the folder now lies"
        ) from error


def read_starts(folder: Path, shard: int, count: int, last: int, column: str) -> np.ndarray:
    """Read where things of a shard begin: int64 [count + 1], ascending from 0 to `last`; ValueError if they aren't."""
    file = column_file(folder, shard, column)
    starts = np.fromfile(file, "<u8", count + 1)
    if len(starts) != count + 1 or starts[0] != 0 or starts[-1] != last or (starts[1:] < starts[:-1]).any():
        raise Refused(f"{file}: its numbers don't ascend from 0 to {last}; {_AGAIN}")
    return starts.astype(np.int64)


def _borders(index: Index, count: str) -> list[int]:
    return list(accumulate((getattr(shard, count) for shard in index.shards), initial=0))


def _token_reader(folder: Path, index: Index) -> Callable[[int, int, int], np.ndarray]:
    dtype = np.dtype(index.token_dtype).newbyteorder("<")

    @functools.lru_cache(_MAX_MAPS)
    def tokens_of(shard: int) -> np.ndarray:
        return _mapped(folder, index.shards, shard, "tokens", dtype)

    def read(shard: int, start: int, stop: int) -> np.ndarray:
        tokens = tokens_of(shard)[start:stop]
        check_tokens(tokens, index.vocab_size, column_file(folder, shard, "tokens"), start)
        return tokens.astype(np.int32)

    return read


def check_tokens(tokens: np.ndarray, vocab_size: int, file: Path, first: int) -> None:
    """Refuse ids outside the vocabulary that the data was prepared with: a file that isn't the writer's."""
    if len(tokens) and tokens.max() >= vocab_size:
        bad = int(np.argmax(tokens >= vocab_size))
        raise Refused(
            f"{file}: token {first + bad} has id {tokens[bad]}, outside the vocabulary of {vocab_size} entries; the "
            f"file is damaged; {_AGAIN}"
        )


def _trained_reader(folder: Path, shards: Sequence[Shard]) -> Callable[[int, int, int], np.ndarray]:
    @functools.lru_cache(_MAX_MAPS)
    def bits_of(shard: int) -> np.ndarray:
        return _mapped(folder, shards, shard, "trained", "u1")

    def read(shard: int, start: int, stop: int) -> np.ndarray:
        if "trained" not in shards[shard].columns:
            return np.ones(stop - start, bool)
        byte = start // 8
        bits = np.unpackbits(bits_of(shard)[byte : -(-stop // 8)], bitorder="little")
        return bits[start - 8 * byte : stop - 8 * byte].astype(bool)

    return read


def _answers(folder: Path, index: Index, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Read the answers of all shards, and check that each document's lie in it and ascend."""
    if not any("answers" in shard.columns for shard in index.shards):
        return None
    firsts, rows = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)]
    for number, shard in enumerate(index.shards):
        if "answers" not in shard.columns:
            firsts.append(np.full(shard.documents, firsts[-1][-1]))
            continue
        count = shard.columns["answers"].bytes // 8
        first = read_starts(folder, number, shard.documents, count, "answer_starts")
        file = column_file(folder, number, "answers")
        own = np.fromfile(file, "<u8", count).astype(np.int64)
        firsts.append(firsts[-1][-1] + first[1:])
        rows.append(own)
    first, row = np.concatenate(firsts), np.concatenate(rows)
    document = np.repeat(np.arange(index.documents), np.diff(first))
    same = document[1:] == document[:-1]
    bad = (row < 0) | (row >= np.diff(starts)[document])
    bad[1:] |= same & (row[1:] <= row[:-1])
    if bad.any():
        where = shown(int(document[np.argmax(bad)]))
        raise Refused(f"{folder}: the answers of document {where} don't lie in it in ascending order; {_AGAIN}")
    return first, row
