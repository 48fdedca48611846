"""Flat: files that are one array of tokens: nanoGPT's and llm.c's .bin, NumPy arrays, datatrove's .ds.

- nanoGPT: uint16 tokens, no header, no borders. llm.c: 256 int32 before them: 20240520, 1, number of uint16 tokens, or
  20240801, 7, number of uint32 tokens; no borders (its writers begin each document with <|endoftext|>).
- NumPy: an .npy by its header, one axis or one row a document; without one (OLMo's are so) tokens of a named dtype.
- datatrove: raw uint16 or uint32, little-endian u64 ends of documents in NAME.index, a byte a token in NAME.loss: 1
  where it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from hsap.data.document import Document
from hsap.data.sources.source import Reading, Tally, Turns
from hsap.data.sources.tokens import document, documents, mapped, named_dtype

NPY_MAGIC = b"\x93NUMPY"
LLMC_HEADER_BYTES = 1024
LLMC_VERSIONS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
_INDEX_BLOCK = 1 << 20
_MAX_HEADER_BYTES = 1 << 16


def read_bin(file: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Document]:
    """Walk a .bin of nanoGPT or, told by its first number, of llm.c."""
    header = np.fromfile(file, "<i4", 3)
    if len(header) and int(header[0]) in LLMC_VERSIONS:
        version, dtype = LLMC_VERSIONS[int(header[0])]
        size = file.stat().st_size
        if size < LLMC_HEADER_BYTES or header[1] != version or header[2] < 0:
            raise ValueError(
                f"{file} begins like a file of llm.c, but its header is cut short, or names version "
                f"{header[1:2].tolist()} (not {version}) or an impossible number of tokens {header[2:3].tolist()}; "
                f"write it anew"
            )
        tokens = mapped(file, np.dtype(dtype).newbyteorder("<"), LLMC_HEADER_BYTES, int(header[2]))
        if LLMC_HEADER_BYTES + tokens.nbytes != size:
            raise ValueError(
                f"{file} has {size - LLMC_HEADER_BYTES - tokens.nbytes} bytes beyond the {len(tokens)} tokens that its "
                f"header counts; write it anew"
            )
    else:
        tokens = mapped(file, named_dtype(reading, "uint16", file))
    yield from documents(tokens, file, reading, turns)


def read_npy(file: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Document]:
    """Walk a NumPy array; nothing in it is unpickled."""
    with open(file, "rb") as stream:
        if stream.read(6) != NPY_MAGIC:
            yield from documents(mapped(file, named_dtype(reading, None, file)), file, reading, turns)
            return
        stream.seek(0)
        shape, fortran, dtype = _npy_header(stream, file)
        offset = stream.tell()
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or (fortran and len(shape) == 2):
        raise ValueError(
            f"{file} is an array of {dtype} and shape {list(shape)}{' in column order' if fortran else ''}; tokens are "
            f"integers along one axis, or in rows of one document each"
        )
    tokens = mapped(file, dtype, offset, math.prod(shape))
    if offset + tokens.nbytes != file.stat().st_size:
        raise ValueError(f"{file} is longer than the shape {list(shape)} in its header; write it anew")
    if len(shape) == 1:
        yield from documents(tokens, file, reading, turns)
        return
    tokens = tokens.reshape(shape)
    for row in turns.among(shape[0]):
        yield document(tokens[row], file, row)


def _npy_header(stream: Any, file: Path) -> tuple[tuple[int, ...], bool, np.dtype]:
    try:
        version = np.lib.format.read_magic(stream)
        # NumPy reads as much as the header says it is long before it looks at it.
        if version[0] == 2 and int.from_bytes(stream.peek(4)[:4], "little") > _MAX_HEADER_BYTES:
            raise ValueError("its header is said to be longer than one is")
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}.get(version[0])
        if read is None:
            raise ValueError(f"version {version[0]}.{version[1]}")
        shape, fortran, dtype = read(stream)
        if min(shape, default=0) < 0:
            raise ValueError(f"shape {shape}")
    except (ValueError, TypeError, SyntaxError, TokenError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"{file} has no header of a NumPy array ({' '.join(str(error).split())}); write it anew"
        ) from error
    return shape, fortran, dtype


def read_datatrove(file: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Document]:
    """Walk a .ds by its index; without one it has no borders, like nanoGPT's."""
    index, loss = (file.with_name(file.name + suffix) for suffix in (".index", ".loss"))
    if not index.is_file():
        yield from documents(mapped(file, named_dtype(reading, "uint16", file)), file, reading, turns)
        return
    ends = mapped(index, np.dtype("<u8"))
    size = file.stat().st_size
    _check_ends(ends, index)
    total = int(ends[-1]) if len(ends) else 0
    width = size // total if total else 2
    if size != total * width or width not in (2, 4):
        raise ValueError(
            f"{index} ends at token {total}, which doesn't fit the {size} bytes of {file.name} at 2 or 4 bytes each: "
            f"one of them is cut short; copy both again"
        )
    tokens = mapped(file, np.dtype(f"<u{width}"))
    trained = None
    if loss.is_file():
        trained = mapped(loss, np.dtype("u1"))
        if len(trained) != total:
            raise ValueError(f"{loss} has {len(trained)} bytes for {total} tokens; copy it again")
    for number in turns.among(len(ends)):
        start, stop = int(ends[number - 1]) if number else 0, int(ends[number])
        mask = None if trained is None else trained[start:stop] != 0
        yield document(tokens[start:stop], file, number, mask)


def _check_ends(ends: np.ndarray, index: Path) -> None:
    """Check, a block at a time, that ends of documents ascend."""
    last = np.zeros(1, ends.dtype)
    for first in range(0, len(ends), _INDEX_BLOCK):
        block = np.concatenate([last, ends[first : first + _INDEX_BLOCK]])
        bad = np.flatnonzero(block[1:] < block[:-1])
        if len(bad):
            raise ValueError(f"{index}: document {first + int(bad[0])} ends before it begins; write the index anew")
        last = block[-1:]
