"""Precision: the dtype of every buffer, and so the bytes of a row.

Accumulators are wider than what travels: float32 for half-precision inputs, float64 for float32 ones, so that a merge
over many ranks adds no error to the kernel's own. An accumulator's lse is float64 always: it is small beside o, and in
float32 its error would double over 16 merges and enter every gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.heads import DTYPE_BYTES
from hsap.ir.program import Role, Space

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
        if acc:
            return self.acc
        return self.wire if role in (Role.O, Role.DQ, Role.DKV) and space == Space.ARENA else self.io

    def stat_dtype_of(self, acc: bool) -> str:
        """Dtype name of a buffer's lse and delta."""
        return "fp64" if acc else self.stat


def elements_per_row(role: np.ndarray, heads: np.ndarray, head_dim: int) -> np.ndarray:
    """Count the elements of one row, statistics excluded. heads: [n, 4] as in `Programs`."""
    is_kv = (role == Role.KV) | (role == Role.DKV)
    return np.where(is_kv, 2 * heads[..., 3].astype(np.int64), heads[..., 1].astype(np.int64)) * head_dim


def stats_per_row(role: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Count the statistics (lse, delta) of one row."""
    return heads[..., 1].astype(np.int64) * ((role == Role.O) + 2 * (role == Role.DO))


def row_bytes(precision: Precision, role, space, acc, heads, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Give (bytes of a row's elements, bytes of its statistics), vectorised over buffers; no alignment."""
    wide = np.asarray(acc, dtype=bool)
    role, space = np.asarray(role), np.asarray(space)
    partial = (role == Role.O) | (role == Role.DQ) | (role == Role.DKV)
    narrow = np.where(partial & (space == Space.ARENA), DTYPE_BYTES[precision.wire], DTYPE_BYTES[precision.io])
    size = np.where(wide, DTYPE_BYTES[precision.acc], narrow)
    stat = np.where(wide, DTYPE_BYTES["fp64"], DTYPE_BYTES[precision.stat])
    return elements_per_row(role, heads, head_dim) * size, stats_per_row(role, heads) * stat


def aligned(num_bytes):
    """Round up to the alignment of the arena."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def buffer_bytes(num_rows, row: np.ndarray, stat: np.ndarray) -> np.ndarray:
    """Bytes that a buffer takes: its rows, then (aligned) its statistics."""
    return np.where(stat > 0, aligned(num_rows * row) + num_rows * stat, num_rows * row)
