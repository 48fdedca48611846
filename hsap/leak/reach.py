"""Reach: which rows may differ when some tokens do, by what the masks let rows see.

After layer l a row's hidden state depends on the rows that it sees there, and through them on more: a change spreads by
one layer's mask at a time. A row's gradient depends on all rows that it reaches above, and changes with any of them.
What is beyond that must keep every bit, whether it lies in another document, in another answer to the same question,
before the change, or behind a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hsap.ir.slice import HI, K0, K1, LO, Q0, Q1
from hsap.ir.span import ranges


def forward_reach(changed: np.ndarray, layers: Sequence[int], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Rows whose hidden states may differ in front of the first layer, and behind each: bool [T], layers + 1 of them.

    changed: bool [T], tokens that differ. layers: index of each layer's mask in `masks`, which are slices of the whole
    packed batch: int64 [n, 6].
    """
    return _spread(changed, layers, masks)


def backward_reach(
    reached: Sequence[np.ndarray], layers: Sequence[int], masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Rows whose gradients may differ in front of the first layer, and behind each; reached: of `forward_reach`."""
    turned = [np.stack([m[:, K0], m[:, K1], m[:, Q0], m[:, Q1], -m[:, HI], -m[:, LO]], axis=1) for m in masks]
    return _spread(reached[-1], list(layers)[::-1], turned)[::-1]


def _spread(marked: np.ndarray, layers: Sequence[int], masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    out = [marked]
    done: dict[int, int] = {}
    for index in layers:
        count = int(marked.sum())
        if done.get(index) != count:  # else this mask has shown all that it can
            marked = marked | _sees(masks[index], marked)
            done[index] = int(marked.sum()) if int(marked.sum()) == count else -1
        out.append(marked)
    return out


def _sees(table: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """Rows that see a marked key: bool [T]."""
    before = np.concatenate([[0], np.cumsum(marked, dtype=np.int64)])
    table = table[before[table[:, K1]] > before[table[:, K0]]]
    seen = np.zeros_like(marked)
    owner, rows = ranges(table[:, Q0], table[:, Q1])
    first = np.maximum(table[owner, K0], rows + table[owner, LO])
    stop = np.maximum(np.minimum(table[owner, K1], rows + table[owner, HI] + 1), first)
    seen[rows[before[stop] > before[first]]] = True
    return seen
