"""Columns: rows of Arrow batches, which parquet files, Arrow files and saved data sets are read as."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hsap.data.fields import Row
from hsap.data.sources.source import Reading, Tally, Turns

_BATCH_ROWS = 64
"""Rows of a parquet file that are decoded together: few, because one row may be a book."""
_STREAM_ENDS = (b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\x00\x00\x00\x00")
"""How a stream's writer says that it was done; the shorter one before Arrow 0.15."""


def read_parquet(file: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Row]:
    """Walk the rows of a parquet file, a few at a time; only the columns that are wanted are read."""
    arrow = _pyarrow(file)
    import pyarrow.parquet as parquet

    number = 0
    with _told(arrow, file, "parquet"), parquet.ParquetFile(file, memory_map=True) as table:
        columns = _columns(table.schema_arrow.names, reading, file)
        for group in range(table.num_row_groups):
            count = table.metadata.row_group(group).num_rows
            mine = turns.among(count)
            if not len(mine):
                number += count
                continue
            first = 0
            for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                yield from _rows(batch, _within(mine, first, len(batch)), file, number)
                first += len(batch)
                number += len(batch)


def read_arrow(file: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Row]:
    """Walk the rows of an Arrow IPC stream or file; it is memory-mapped, so that a batch isn't read before its rows."""
    arrow = _pyarrow(file)
    if not file.stat().st_size:
        raise ValueError(f"{file} is empty, not an Arrow file; copy it again")
    number = 0
    with _told(arrow, file, "Arrow"), arrow.memory_map(str(file)) as mapped:
        for batch in _batches(arrow, mapped, file):
            batch = batch.select(_columns(batch.schema.names, reading, file))
            # Offsets in a mapped file may point anywhere, and the library follows them.
            batch.validate(full=True)
            yield from _rows(batch, turns.among(len(batch)), file, number)
            number += len(batch)


def _batches(arrow: Any, mapped: Any, file: Path) -> Iterator[Any]:
    head = mapped.read(6)
    mapped.seek(0)
    if head == b"ARROW1":
        reader = arrow.ipc.open_file(mapped)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)
        return
    if head[:4] == b"FEA1":
        raise ValueError(f"{file} is a Feather file of version 1; write it anew as Arrow or parquet")
    yield from arrow.ipc.open_stream(mapped)
    mapped.seek(max(0, mapped.size() - 8))
    # The library takes a stream cut between two batches for a complete one.
    if not mapped.read(8).endswith(_STREAM_ENDS):
        raise ValueError(f"{file}: the Arrow stream ends without its end mark, so it was cut short; copy it again")


def saved_files(folder: Path) -> list[Path]:
    """List the Arrow files of a data set that Hugging Face's `save_to_disk` wrote.

    Errors (ValueError): a shard that is missing; several splits, of which the user is to name one.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _names(_json(folder / "dataset_dict.json").get("splits"), folder / "dataset_dict.json")
        if len(splits) != 1:
            raise ValueError(
                f"{folder} holds the splits {', '.join(splits) or 'none'}; name one, as in "
                f"data.path={folder / (splits[0] if splits else 'train')}"
            )
        return saved_files(inside(folder, splits[0], folder / "dataset_dict.json"))
    state_file = folder / "state.json"
    state = _json(state_file)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(f"{folder} is a selection of other rows (its state.json names index files); save it flattened")
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ValueError(f"{state_file} lists no _data_files; save the data set again with save_to_disk")
    names = _names([one.get("filename") for one in listed], state_file)
    files = [inside(folder, name, state_file) for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(
            f"{state_file} lists {len(files)} files, but {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} missing; copy the whole folder"
        )
    return files


def inside(folder: Path, name: str, told_by: Path) -> Path:
    """Give the path of a file that an index names; ValueError where it would lie outside the data set."""
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{told_by} names {name!r}, which is outside the data set; repair the index")
    return path


def _columns(names: list[str], reading: Reading, file: Path) -> list[str]:
    """Choose the columns to read; ValueError where a name doesn't tell which column is meant."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{file} has several columns named {twice[0]!r}; name its columns differently")
    return reading.fields.wanted(names)


def _names(values: object, told_by: Path) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ValueError(f"{told_by} doesn't list names where it should; save the data set again with save_to_disk")
    return values


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} can't be read as JSON ({error}); copy the whole folder again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object; copy the whole folder again")
    return value


def _within(mine: range, first: int, count: int) -> range:
    """Those of `mine` that lie in [first, first + count), counted from first."""
    start = mine.start + max(0, -(-(first - mine.start) // mine.step)) * mine.step
    return range(start - first, min(mine.stop, first + count) - first, mine.step)


def _rows(batch: Any, indices: range, file: Path, number: int) -> Iterator[Row]:
    """Give the rows of a batch; number: rows of the file before it."""
    getters = [(name, _getter(column)) for name, column in zip(batch.schema.names, batch.columns)]
    for index in indices:
        where = f"{file}:row {number + index}"
        try:
            values = {name: get(index) for name, get in getters}
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: a string isn't UTF-8 ({error}); write the file anew") from error
        yield Row(values, where, f"{file.name}:{number + index}")


def _getter(column: Any) -> Callable[[int], Any]:
    """Give a function from a row's index to its value; a list of integers stays an array, no Python object each."""
    import pyarrow.types as types

    kind = column.type
    if (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type):

        def get(index: int) -> Any:
            values = column[index].values
            return values if values is None else values.to_pylist() if values.null_count else values.to_numpy()

        return get
    return lambda index: column[index].as_py()


@contextmanager
def _told(arrow: Any, file: Path, format: str) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())[:300]
        raise ValueError(f"{file} is no readable {format} file ({told}); copy it again, or write it anew") from error


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise ValueError(f"{file} is read by pyarrow; to read it: pip install pyarrow") from error
    return pyarrow
