"""Sort: stable orders and groups of integer keys, several times faster than NumPy's own `argsort` and `unique`.

NumPy sorts plain integers with vector instructions but index arrays without; so key and place are packed into one
integer wherever 64 bits hold both.
"""

from __future__ import annotations

import numpy as np


def order_of(keys: np.ndarray) -> np.ndarray:
    """Give the indices that sort the keys, equal ones in their order: int64 [n]. keys: int64 [n]."""
    bits = len(keys).bit_length()
    if len(keys) == 0 or max(int(np.maximum.reduce(keys)), -int(np.minimum.reduce(keys))) >> (63 - bits):
        return np.argsort(keys, kind="stable")
    packed = keys << bits
    packed |= np.arange(len(keys))
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the distinct keys in rising order, and which of them each key is: int64 [m] and [n]."""
    order = order_of(keys)
    in_order = keys[order]
    fresh = np.ones(len(keys), bool)
    np.not_equal(in_order[1:], in_order[:-1], out=fresh[1:])
    index = np.empty(len(keys), np.int64)
    index[order] = np.cumsum(fresh) - 1
    return in_order[fresh], index
