"""Columns: many integer columns as one short string, which the page's `columns.js` reads back.

Each column is kept in the narrowest of four dtypes, rising ones as differences, all of them compressed together: an
instruction then takes about ten characters, where an object of JSON takes two hundred.
"""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

_DTYPES = (("b", "<i1"), ("h", "<i2"), ("i", "<i4"), ("d", "<f8"))
ALIGNMENT = 8
"""Columns begin at multiples of this many bytes, so that the page can look at them in place."""


class Columns:
    """Collects columns by name; `packed` gives them all."""

    def __init__(self) -> None:
        self._listed: list[list[Any]] = []
        self._raw: list[bytes] = []

    def add(self, name: str, values: ArrayLike, rising: bool = False) -> None:
        """Add integers, which must be below 2^53 in size.

        rising: keep differences of neighbours, which are small where values follow each other.
        """
        values = np.asarray(values, np.int64).ravel()
        # Differences are added up in 32 bits by the page.
        rising = rising and len(values) > 0 and np.abs(values).max() < 1 << 30
        if rising:
            values = np.diff(values, prepend=0)
        code, narrow = next(
            (code, narrow) for code, dtype in _DTYPES if ((narrow := values.astype(dtype)) == values).all()
        )
        raw = narrow.tobytes()
        self._listed.append([name, code, len(values), int(rising)])
        self._raw.append(raw + bytes(-len(raw) % ALIGNMENT))

    def packed(self) -> dict[str, Any]:
        """JSON value: `columns`, a list of (name, dtype, length, whether differences); `data`, base64 of gzip."""
        data = gzip.compress(b"".join(self._raw), compresslevel=6, mtime=0)
        return {"columns": self._listed, "data": base64.b64encode(data).decode()}
