"""Megatron: NAME.idx and NAME.bin, as Megatron-LM, Megatron-DeepSpeed and NeMo write them.

The index: "MMIDIDX\\0\\0", u64 version 1, u8 dtype code, u64 sequences, u64 documents + 1, then i32 tokens and i64 byte
pointer of each sequence, and the i64 document index: document d is sequences [index[d], index[d + 1]), joined here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hsap.data.document import Document
from hsap.data.sources.source import Reading, Tally, Turns
from hsap.data.sources.tokens import document, mapped

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
"""By dtype code, which counts from 1."""
_HEADER = struct.Struct("<9sQBQQ")
_BLOCK = 1 << 20


def read_megatron(index: Path, reading: Reading, turns: Turns, tally: Tally) -> Iterator[Document]:
    """Walk the documents of an .idx and its .bin. What the index says is checked against both files' sizes first."""
    file = index.with_suffix(".bin")
    if not file.is_file():
        raise ValueError(f"{index} has no {file.name} beside it; copy both files")
    dtype, lengths, pointers, borders = _read_index(index)
    size = file.stat().st_size
    _check_sequences(index, lengths, pointers, dtype.itemsize, size)
    _check_borders(index, borders, len(lengths))
    data = mapped(file, np.dtype(np.uint8))

    def sequence(number: int) -> np.ndarray:
        start = int(pointers[number])
        return data[start : start + int(lengths[number]) * dtype.itemsize].view(dtype)

    for number in turns.among(len(borders) - 1):
        parts = [sequence(one) for one in range(int(borders[number]), int(borders[number + 1]))]
        tokens = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype), *parts])
        yield document(tokens, file, number)


def _read_index(index: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    size = index.stat().st_size
    with open(index, "rb") as stream:
        head = stream.read(_HEADER.size)
    if head.startswith(LEGACY_MAGIC):
        raise ValueError(
            f"{index} is of fairseq's older layout (TNTIDX); write it anew with Megatron's preprocess_data"
        )
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise ValueError(f"{index} is no Megatron index: it begins with {head[:9]!r}, not {MAGIC!r}")
    if len(head) < _HEADER.size:
        raise ValueError(f"{index} is cut short within its header ({size} bytes); copy it again")
    _, version, code, sequences, num_borders = _HEADER.unpack(head)
    if version != 1:
        raise ValueError(f"{index} is of version {version}; version 1 is read")
    if not 1 <= code <= len(DTYPES):
        raise ValueError(f"{index} names dtype code {code}; there are 1 to {len(DTYPES)} ({', '.join(DTYPES)})")
    needed = _HEADER.size + 12 * sequences + 8 * num_borders
    if size < needed:
        raise ValueError(
            f"{index} is cut short: {sequences} sequences and {num_borders} document borders need {needed} bytes, it "
            f"has {size}; copy it again"
        )
    if size > needed:
        raise ValueError(
            f"{index} has {size - needed} bytes behind its document index: it is damaged, or of a multimodal data set, "
            f"which isn't read"
        )
    if num_borders < 1:
        raise ValueError(f"{index} has no document index; write it anew with Megatron's preprocess_data")
    at = _HEADER.size
    lengths = mapped(index, np.dtype("<i4"), at, sequences)
    pointers = mapped(index, np.dtype("<i8"), at + 4 * sequences, sequences)
    borders = mapped(index, np.dtype("<i8"), at + 12 * sequences, num_borders)
    return np.dtype(DTYPES[code - 1]).newbyteorder("<"), lengths, pointers, borders


def _check_sequences(index: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int, size: int) -> None:
    for first in range(0, len(lengths), _BLOCK):
        counts, starts = lengths[first : first + _BLOCK].astype(np.int64), pointers[first : first + _BLOCK]
        # Divided, not multiplied: a hostile pointer must not overflow into range.
        bad = np.flatnonzero((counts < 0) | (starts < 0) | (starts > size) | (counts > (size - starts) // itemsize))
        if len(bad):
            number = int(bad[0])
            raise ValueError(
                f"{index}: sequence {first + number} ({int(counts[number])} tokens of {itemsize} bytes from byte "
                f"{int(starts[number])} on) lies outside the {size} bytes of its .bin, which is cut short or "
                f"another's; copy both files again"
            )
        steps, spaced = np.diff(starts), counts[:-1] > 0
        if spaced.any() and not (steps == counts[:-1] * itemsize).any():
            widths = set((steps[spaced] / counts[:-1][spaced]).tolist())
            if len(widths) == 1:
                raise ValueError(
                    f"{index}: its dtype code says {itemsize} bytes a token, its pointers {widths.pop():g}; the code "
                    f"is wrong, write the index anew"
                )


def _check_borders(index: Path, borders: np.ndarray, sequences: int) -> None:
    if int(borders[0]) != 0 or int(borders[-1]) != sequences:
        raise ValueError(
            f"{index}: its document index goes from {int(borders[0])} to {int(borders[-1])}, not from 0 to its "
            f"{sequences} sequences; write it anew"
        )
    for first in range(0, len(borders) - 1, _BLOCK):
        block = borders[first : first + _BLOCK + 1]
        bad = np.flatnonzero(block[1:] < block[:-1])
        if len(bad):
            raise ValueError(
                f"{index}: document {first + int(bad[0])} ends before it begins in its document index; write it anew"
            )
