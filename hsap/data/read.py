"""Read: a data set as the store that training takes, prepared before, in the cache now, or in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hsap.data import prepared
from hsap.data.config import DataConfig
from hsap.data.prepared.reader import store_of
from hsap.data.store import DocumentStore
from hsap.ir.check import Refused


def read_store(
    data: DataConfig,
    path: str | Path | Sequence[str] | Mapping[str, float],
    seed: int,
    name: str = "data.path",
    who: str = "hsap",
) -> tuple[DocumentStore, prepared.Index]:
    """Read a data set; gives its documents, and what is known of them: how they were made, and what was left out.

    seed: of the order of a mixture. name, who: for messages. ValueError: what the source, the tokenizer, the folder or
    the cache refuses. Whether prepared data are what a run asks for says `check_agreement`.
    """
    if isinstance(path, str | Path) and prepared.is_prepared(path):
        return _mapped(Path(path))
    named = str(path) if isinstance(path, Path) else path
    folder = prepared.cached(data, named, seed, name, who)
    if folder is None:
        return prepared.read_whole(replace(data, path=named), seed)
    try:
        return _mapped(folder)
    except Refused as error:
        raise Refused(f"{error}; this is in the cache: remove {folder}, and the next run makes it anew") from error


def _mapped(folder: Path) -> tuple[DocumentStore, prepared.Index]:
    index = prepared.read_index(folder)
    return store_of(folder, index), index
