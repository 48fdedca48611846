"""Precision: the dtype of every buffer, and so the bytes of a row.

Accumulators are wider than what travels: float32 for half-precision inputs, float64 for float32 ones, so that a merge
over many ranks adds no error to the kernel's own. An accumulator's lse is float64 always: it is small beside o, and in
float32 its error would double over 16 merges and enter every gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from hsap.ir.heads import DTYPE_BYTES
from hsap.ir.program import KV_ROLES, PARTIAL_ROLES, Role, Space

Size = TypeVar("Size", int, np.ndarray)

ALIGNMENT = 256
"""Bytes that every buffer in the arena starts on; the statistics behind the rows are aligned to it too."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtype names.

    io: q, k, v, do and results. wire: partial o, dq, dkv on the network. acc: accumulators. stat: lse and delta, where
    they are not an accumulator's.
    """

    io: str
    wire: str
    acc: str
    stat: str

    @classmethod
    def of(cls, dtype: str, wire_dtype: str | None = None) -> Precision:
        """Choose for inputs of `dtype`; partial results travel as `wire_dtype`, by default as the inputs do."""
        acc = "fp32" if dtype in ("bf16", "fp16") else "fp64"
        stat = "fp64" if dtype == "fp64" else "fp32"
        return cls(dtype, wire_dtype or dtype, acc, stat)

    def dtype_of(self, role: int, space: int, acc: bool) -> str:
        """Dtype name of a buffer's rows."""
        return (self.io, self.wire, self.acc)[int(_width_class(role, space, acc))]

    def stat_dtype_of(self, acc: bool) -> str:
        """Dtype name of a buffer's lse and delta."""
        return "fp64" if acc else self.stat


def _width_class(role: ArrayLike, space: ArrayLike, acc: ArrayLike) -> np.ndarray:
    """0: as the inputs, 1: as on the wire, 2: as an accumulator; vectorised over buffers."""
    travels = np.isin(role, PARTIAL_ROLES) & (np.asarray(space) == Space.ARENA)
    return np.where(acc, 2, np.where(travels, 1, 0))


def elements_per_row(role: np.ndarray, heads: np.ndarray, head_dim: int) -> np.ndarray:
    """Count the elements of one row, statistics excluded. heads: [n, 4] as in `Programs`."""
    return (
        np.where(np.isin(role, KV_ROLES), 2 * heads[..., 3].astype(np.int64), heads[..., 1].astype(np.int64)) * head_dim
    )


def stats_per_row(role: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Count the statistics (lse, delta) of one row."""
    return heads[..., 1].astype(np.int64) * ((role == Role.O) + 2 * (role == Role.DO))


def row_bytes(
    precision: Precision, role: ArrayLike, space: ArrayLike, acc: ArrayLike, heads: np.ndarray, head_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Give (bytes of a row's elements, bytes of its statistics), vectorised over buffers; no alignment."""
    role = np.asarray(role)
    sizes = np.array([DTYPE_BYTES[name] for name in (precision.io, precision.wire, precision.acc)])
    size = sizes[_width_class(role, space, acc)]
    stat = np.where(acc, DTYPE_BYTES[precision.stat_dtype_of(True)], DTYPE_BYTES[precision.stat_dtype_of(False)])
    return elements_per_row(role, heads, head_dim) * size, stats_per_row(role, heads) * stat


@lru_cache(maxsize=64)
def unit_bytes(precision: Precision, head_dim: int) -> np.ndarray:
    """Tabulate `row_bytes` for one head: int64 [2, role + 1, space, whether it accumulates], elements and statistics.

    A row's elements are those of its KV heads for `KV_ROLES`, else of its query heads; statistics are a query head's.
    """
    shape = (len(Role), len(Space), 2)
    role, space, acc = np.indices(shape)
    one_head = np.ones((*shape, 4), np.int64)
    return np.stack(row_bytes(precision, role - 1, space, acc == 1, one_head, head_dim)).astype(np.int64)


def aligned(num_bytes: Size) -> Size:
    """Round up to the alignment of the arena."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
