"""Stored: the file form of a plan's columns: magic, JSON header (with dtypes and shapes), raw little-endian columns.

Nothing in it is executable or pickled. It says how columns lie in a file and which there may be; what they make up is
the plan's own affair (`hsap.ir.plan`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hsap.ir.check import one_line, shown
from hsap.ir.program import COLUMN_DTYPES, COLUMN_WIDTHS

MAGIC = b"hsap-plan-2\n"
"""First bytes of the stored form; the number rises whenever the columns change their meaning."""
MAX_HEADER_BYTES = 1 << 28


def write(header: dict[str, Any], columns: Sequence[tuple[str, np.ndarray]]) -> bytes:
    """Lay a header and named columns out as the bytes of a file."""
    described = [[name, column.dtype.str, list(column.shape)] for name, column in columns]
    text = json.dumps(header | {"columns": described}).encode()
    raw = (np.ascontiguousarray(column).data for _, column in columns)
    return b"".join([MAGIC, len(text).to_bytes(8, "little"), text, *raw])


def read(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read what `write` gives: (header, columns by name); sizes are checked before anything is allocated.

    ValueError: not a file of this version, cut short, damaged, or with a column that no plan has. What the header lacks
    or mistypes comes as whatever error that makes.
    """
    start = len(MAGIC) + 8
    if data[: len(MAGIC)] != MAGIC or len(data) < start:
        raise ValueError(
            "not a stored plan of this version: the file doesn't begin with hsap-plan-2; compile the batch again"
        )
    size = int.from_bytes(data[len(MAGIC) : start], "little")
    if size > min(MAX_HEADER_BYTES, len(data) - start):
        raise ValueError(f"the header claims {size} bytes, more than the file has; it is cut short or damaged")
    try:
        header = from_json(data[start : start + size].decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header isn't JSON that can be read ({one_line(error)}); the file is damaged") from None
    columns, offset = {}, start + size
    for name, dtype, shape in header["columns"]:
        known = _layout(name)
        # Names are compared: np.dtype makes no end of things from a string.
        if dtype != known[0].str or tuple(shape[1:]) != known[1] or not all(type(n) is int for n in shape):
            raise ValueError(f"column {shown(name)} has dtype {shown(dtype)} and shape {shown(shape)}; no plan's has")
        count = shape[0] * int(np.prod(known[1], dtype=np.int64))
        if count < 0 or offset + count * known[0].itemsize > len(data):
            raise ValueError(f"column {name} reaches beyond the end of the file; it is cut short or damaged")
        column = np.frombuffer(data, known[0], count, offset).reshape(shape)
        columns[name], offset = column, offset + column.nbytes
    if offset != len(data):
        raise ValueError(f"{len(data) - offset} bytes follow the last column; the file is damaged")
    return header, columns


def from_json(text: str) -> Any:
    """Read JSON; ValueError for what is none, and for what can't be written again.

    These are numbers that aren't finite, which strict JSON doesn't have, and halves of surrogate pairs in texts.
    """
    value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    (json.dumps(value, ensure_ascii=False) if "\\u" in text else text).encode()
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is no finite number")
    return value


def _layout(name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Stored dtype and row shape of a column."""
    last = name.rsplit(".", 1)[-1]
    if name in ("spans", "column_rows", "rank_rows", "shards.spans"):
        return np.dtype(np.int64), (2,)
    if name in ("shards.offsets", "shards.home"):
        return np.dtype(np.int64), ()
    if last in ("slices", "chart") and name.count(".") == (1 if last == "slices" else 2):
        return np.dtype(np.int64), (6,)
    return np.dtype(COLUMN_DTYPES[last]), (COLUMN_WIDTHS[last],) if last in COLUMN_WIDTHS else ()
