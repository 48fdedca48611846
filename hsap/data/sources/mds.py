"""MosaicML MDS (Streaming): an index.json that lists shards, each a table of samples of encoded columns.

A shard is: u32 samples, u32 offset of each sample and of the end, the columns' description as JSON, the samples. A
sample is a u32 size of each column whose size isn't fixed, then the columns. Only columns that are wanted are decoded;
pickled ones never, because unpickling runs code. Sizes and offsets are checked; the index's hashes are not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hsap.data.fields import Row
from hsap.data.json_decoder import TWICE, JsonDecoder
from hsap.data.sources.columns import inside
from hsap.data.sources.source import MAX_DOCUMENT_BYTES, Reading, Tally, Turns
from hsap.data.sources.stream import opened, told_at
from hsap.data.sources.tokens import mapped, named_dtype

_MAX_SHARD_BYTES = 1 << 32
"""Offsets are u32, so no shard is longer."""
_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_VALUE_DTYPES = {code: name for name, code in zip(_NUMBERS, (8, 16, 32, 64, 9, 17, 33, 65, 18, 34, 66))}
_SHAPE_DTYPES = ("uint8", "uint16", "uint32", "uint64")


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    packed: bool
    num_bytes: int
    samples: int
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


def read_mds(index: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Row]:
    """Walk the samples of all shards that an index.json lists, in its order."""
    shards = _shards(index)
    for number, shard in enumerate(shards):
        mine = turns.among(shard.samples)
        if len(mine):
            yield from _samples(shard, mine, reading, tally, f"{index.parent.name}/{number}")


def _shards(index: Path) -> list[_Shard]:
    try:
        listed = json.loads(index.read_bytes())
        version, entries = listed["version"], listed["shards"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
        raise ValueError(
            f"{index} is no index of MDS shards ({type(error).__name__}: {error}); copy it again"
        ) from error
    if version != 2 or not isinstance(entries, list):
        raise ValueError(f"{index} is of MDS version {version!r}; version 2 is read: write the data set anew")
    return [_shard(index, number, entry) for number, entry in enumerate(entries)]


def _shard(index: Path, number: int, entry: Any) -> _Shard:
    where = f"{index}: shard {number}"
    try:
        raw, packed = entry["raw_data"], entry["zip_data"]
        names, encodings, sizes = entry["column_names"], entry["column_encodings"], entry["column_sizes"]
        num_bytes, samples, compression = raw["bytes"], entry["samples"], entry["compression"]
        basenames: list[Any] = [one["basename"] if one else None for one in (raw, packed)]
        sound = (
            all(type(value) is int and value >= 0 for value in (num_bytes, samples))
            and len(names) == len(encodings) == len(sizes)
            and all(isinstance(value, str) for value in (*names, *encodings, basenames[0]))
            and (packed is None or isinstance(basenames[1], str))
            and all(size is None or (type(size) is int and size >= 0) for size in sizes)
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where} isn't described as MDS does ({type(error).__name__}: {error}); repair it") from error
    if entry.get("format") != "mds" or not sound:
        raise ValueError(
            f"{where} is of format {entry.get('format')!r} or has impossible columns or sizes; only MDS is read"
        )
    path = inside(index.parent, basenames[0], index)
    use_packed = not path.is_file() and packed is not None
    if use_packed:
        path = inside(index.parent, basenames[1], index)
        if str(compression).partition(":")[0] not in ("zstd", "gz"):
            raise ValueError(
                f"{where} is compressed by {compression}; zstd and gz are read: unpack it or write it anew"
            )
    if not path.is_file():
        raise ValueError(f"{where} is missing: there is no {path}; copy the whole data set")
    if num_bytes >= _MAX_SHARD_BYTES:
        raise ValueError(f"{where} is said to hold {num_bytes} bytes, more than MDS allows; repair the index")
    return _Shard(path, use_packed, num_bytes, samples, tuple(names), tuple(encodings), tuple(sizes))


def _content(shard: _Shard) -> np.ndarray:
    """Give a shard's bytes: mapped where it is plain, unpacked to at most the size the index says where not."""
    if not shard.packed:
        data = mapped(shard.path, np.dtype(np.uint8))
    else:
        with told_at(lambda: shard.path), opened(shard.path) as stream:
            parts, left = [], shard.num_bytes + 1
            while left and (part := stream.read(min(left, 1 << 20))):
                parts.append(part)
                left -= len(part)
            data = np.frombuffer(b"".join(parts), np.uint8)
    size = len(data)
    if size != shard.num_bytes:
        more = "at least " if shard.packed and size > shard.num_bytes else ""
        raise ValueError(
            f"{shard.path} holds {more}{size} bytes, its index says {shard.num_bytes}: it is cut short or another "
            f"data set's; copy it again"
        )
    return data


def _samples(shard: _Shard, indices: range, reading: Reading, tally: Tally, name: str) -> Iterator[Row]:
    data = _content(shard)
    table = 4 * (shard.samples + 2)
    if table > len(data) or int(data[:4].view("<u4")[0]) != shard.samples:
        raise ValueError(f"{shard.path} doesn't begin with its {shard.samples} samples; copy the whole data set again")
    offsets = data[4:table].view("<u4")
    if int(offsets[0]) < table or int(offsets[-1]) != len(data) or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{shard.path}: the samples' offsets point outside the shard or backwards; copy it again")
    decoders = _decoders(shard, reading)
    for index in indices:
        where = f"{shard.path}:sample {index}"
        sample = data[int(offsets[index]) : int(offsets[index + 1])]
        try:
            values = _decode(sample, shard, decoders, where)
        except _Twice:
            tally.reject(where, TWICE)
        else:
            yield Row(values, where, f"{name}:{index}")


def _decoders(shard: _Shard, reading: Reading) -> dict[str, Callable[..., Any]]:
    """Give a decoder for each wanted column; other kinds are passed over if there are some that can be read."""
    decoders: dict[str, Callable[..., Any]] = {}
    wanted = reading.fields.wanted(list(shard.names))
    for name, encoding in zip(shard.names, shard.encodings):
        if name in wanted:
            kind, _, details = encoding.partition(":")
            if kind == "bytes" and name in reading.fields.tokens:
                decoders[name] = partial(
                    np.frombuffer, dtype=named_dtype(reading, None, f"{shard.path}: column {name!r}")
                )
            elif kind in _DECODERS:
                decoders[name] = _DECODERS[kind]
            elif kind == "ndarray":
                decoders[name] = _array_decoder(details, shard.path)
    if not decoders:
        described = ", ".join(f"{name} ({encoding})" for name, encoding in zip(shard.names, shard.encodings))
        raise ValueError(
            f"{shard.path}: no column can be read as text or tokens, only {described or 'none'}; of other kinds are "
            f"read {', '.join(_DECODERS)} and ndarray"
        )
    return decoders


def _decode(
    sample: np.ndarray, shard: _Shard, decoders: dict[str, Callable[..., Any]], where: str
) -> dict[str, object]:
    at = 4 * sum(1 for size in shard.sizes if not size)
    if at > len(sample):
        raise ValueError(f"{where}: too short for the sizes of its columns; copy the shard again")
    told = iter(sample[:at].tobytes()[i : i + 4] for i in range(0, at, 4))
    values = {}
    for name, fixed in zip(shard.names, shard.sizes):
        size = fixed or int.from_bytes(next(told), "little")
        if at + size > len(sample):
            raise ValueError(f"{where}: column {name!r} reaches beyond the sample; copy the shard again")
        if name in decoders:
            if size > MAX_DOCUMENT_BYTES:
                raise ValueError(f"{where}: column {name!r} has {size} bytes, more than {MAX_DOCUMENT_BYTES}; split it")
            try:
                values[name] = decoders[name](sample[at : at + size].tobytes())
            except (ValueError, RecursionError, IndexError) as error:
                raise ValueError(f"{where}: column {name!r} isn't what its encoding says ({error})") from error
        at += size
    if at != len(sample):
        raise ValueError(f"{where}: {len(sample) - at} bytes follow its columns; copy the shard again")
    return values


class _Twice(Exception):
    """An object in a column of JSON names a field twice."""


def _json(data: bytes) -> object:
    decoder = JsonDecoder()
    value = decoder.decode(data.decode("utf-8"))
    if decoder.twice is not None:
        raise _Twice
    return value


def _number(dtype: str) -> Callable[[bytes], int | float]:
    def decode(data: bytes) -> int | float:
        (value,) = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
        return value.item()

    return decode


def _array_decoder(details: str, path: Path) -> Callable[[bytes], np.ndarray]:
    """Read "", "DTYPE" or "DTYPE:SHAPE": what isn't said here stands before each array."""
    dtype, _, shape = details.partition(":")
    sizes = tuple(int(size) for size in shape.split(",")) if shape.replace(",", "").isdecimal() else None
    if (dtype and dtype not in _NUMBERS) or (shape and sizes is None):
        raise ValueError(f"{path}: a column is encoded as ndarray:{details}, which MDS doesn't have; repair the index")

    def decode(data: bytes) -> np.ndarray:
        at = 0
        kind = dtype
        if not kind:
            if data[0] not in _VALUE_DTYPES:
                raise ValueError(f"there is no dtype of code {data[0]}")
            kind, at = _VALUE_DTYPES[data[0]], 1
        lengths = sizes
        if lengths is None:
            num_axes, width = data[at] >> 2, np.dtype(_SHAPE_DTYPES[data[at] & 3]).newbyteorder("<")
            lengths = tuple(np.frombuffer(data, width, num_axes, at + 1).tolist())
            at += 1 + num_axes * width.itemsize
        values = np.frombuffer(data, np.dtype(kind).newbyteorder("<"), offset=at)
        if math.prod(lengths) != len(values):
            raise ValueError(f"an array of shape {list(lengths)} has {len(values)} values")
        return values.reshape(lengths)

    return decode


_DECODERS: dict[str, Callable[..., Any]] = {
    "str": lambda data: data.decode("utf-8"),
    "json": _json,
    "int": _number("int64"),
    "str_int": lambda data: int(data.decode("utf-8")),
    "str_float": lambda data: float(data.decode("utf-8")),
    "str_decimal": lambda data: data.decode("utf-8"),
    "bytes": lambda data: data,
    **{dtype: _number(dtype) for dtype in _NUMBERS},
}
