"""Check: all of a folder of prepared data against its checksums."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hsap import files
from hsap.data.prepared.index import Index, Shard, check_file, column_file, read_index
from hsap.data.prepared.reader import check_tokens, read_starts, store_of
from hsap.data.sources.tokens import mapped
from hsap.ir.check import Refused

_CHUNK = 1 << 22


def check(folder: str | Path) -> Index:
    """Read everything in a folder and compare it with the index; gives the index.

    ValueError for the first thing that is wrong, with the name of its file. It takes the time of reading all files.
    """
    folder, index = Path(folder), read_index(folder)
    for number, shard in enumerate(index.shards):
        for column, file in shard.columns.items():
            path = column_file(folder, number, column)
            check_file(path, file.bytes)
            if files.sha256(path) != file.sha256:
                raise Refused(
                    f"{path} is damaged: it doesn't have the SHA-256 that the index says; copy it again, or prepare "
                    f"the data anew"
                )
        read_starts(folder, number, shard.documents, shard.columns["ids"].bytes, "id_starts")
        _check_trained(folder, number, shard)
        path = column_file(folder, number, "tokens")
        tokens = mapped(path, np.dtype(index.token_dtype).newbyteorder("<"))
        for first in range(0, len(tokens), _CHUNK):
            check_tokens(tokens[first : first + _CHUNK], index.vocab_size, path, first)
    store_of(folder, index)
    return index


def _check_trained(folder: Path, number: int, shard: Shard) -> None:
    trained = shard.tokens
    if "trained" in shard.columns:
        path = column_file(folder, number, "trained")
        bits = mapped(path, np.dtype("u1"))
        trained = sum(int(np.bitwise_count(bits[i : i + _CHUNK]).sum()) for i in range(0, len(bits), _CHUNK))
    if trained != shard.trained:
        raise Refused(f"{folder}: {trained} tokens of shard {number} are trained, {shard.trained} by the index")
