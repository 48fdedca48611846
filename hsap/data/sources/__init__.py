"""Sources: data sets as teams have them, read as documents; `open` is the door.

One file a format family: `jsonl` (JSON), `columns` (parquet, Arrow, saved data sets), `hf` (Hugging Face's objects),
`mds`, `megatron`, `flat` (nanoGPT, llm.c, NumPy, datatrove), `text` (text, source trees). `detect` tells them apart,
`mixture` mixes several by weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hsap.data.fields import Fields
from hsap.data.sources import hf
from hsap.data.sources.detect import FORMATS, READERS, find, unread
from hsap.data.sources.source import Reading, Rejection, Source, Tally
from hsap.data.sources.tokens import DTYPES
from hsap.ir.check import one_of, whole

__all__ = ["DTYPES", "FORMATS", "Reading", "Rejection", "Source", "Tally", "open"]


def open(
    path: Any,
    fields: Fields | None = None,
    *,
    format: str | None = None,
    token_dtype: str | None = None,
    end_id: int | None = None,
    begin_id: int | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Source:
    """Open a data set: a file, a folder, "hf:NAME#SPLIT", or an object of Hugging Face's `datasets`.

    fields: names of the fields of rows. format: one of `FORMATS`, by default told by content and suffix. token_dtype:
    of token files that don't say theirs. end_id, begin_id: the token that ends, or begins, every document of token
    files that don't record borders. shard: (i, n), reader i of n, see `Source`.

    Errors (ValueError): nothing there; a format that can't be told; settings that don't go together. No row is read.
    """
    shard = (whole("reader of a data set", shard[0], 0, shard[1] - 1), whole("readers of a data set", shard[1]))
    if token_dtype is not None:
        one_of("data.token_dtype: there is no dtype of tokens", token_dtype, DTYPES)
    for name, value in (("data.end_id", end_id), ("data.begin_id", begin_id)):
        if value is not None:
            whole(name, value, 0)
    if end_id is not None and begin_id is not None:
        raise ValueError(f"data.end_id={end_id} and data.begin_id={begin_id}: a border is one or the other; set one")
    fields = fields or Fields()
    if isinstance(path, str) and path.startswith(hf.PREFIX):
        path = hf.load(path)
    if hf.is_dataset(path):
        return Source("of datasets", "datasets", [path], hf.read_dataset, Reading(fields), shard)
    if path == "":
        raise ValueError("data.path (or data.eval_path) is empty; set it to a file or a directory")
    path = Path(path)
    format, files = find(path, format)
    root = path if path.is_dir() else None
    beside = () if root is None else unread(root, format, files)
    reading = Reading(fields, token_dtype, end_id, begin_id, root)
    return Source(path, format, files, READERS[format], reading, shard, beside)
