"""Shared questions: a layer's mask for a document that holds one question and several answers to it.

The document is the question without its last token, then each answer behind that token. The mask of such a document
makes every answer see what it would see in a document of its own, the whole question and itself: its slices are those
of the layer's mask for that document, moved to where the question and the answer stand in the shared one. So attention
equals that of one document per answer, with the question computed once. That needs a mask whose first rows depend on
nothing behind them: causal families that don't count from the document's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hsap.ir.check import Refused
from hsap.ir.families import MASKS
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, SliceMask
from hsap.ir.slice import HI, K0, K1, LO, Q0, Q1

SHAREABLE = ("causal", "window", "lambda", "chunked")
"""Families whose rows see what they see whatever follows them."""


def check_shareable(mask: Mask) -> None:
    """Refuse a mask that has no meaning for shared questions: ValueError with the masks that have one."""
    if mask.name not in SHAREABLE:
        raise Refused(
            f"mask {mask}: what the answers to a shared question see under it isn't defined, because what the question "
            f"sees would depend on the answer; models that are trained on them have masks of {', '.join(SHAREABLE)}"
        )


def shared_masks(mask: Mask, lengths: Sequence[int], answers: Sequence[Sequence[int]]) -> tuple[Mask | SliceMask, ...]:
    """Give a layer's mask for each document of a packed batch, of which some are shared questions.

    answers: for each document the rows at which its answers begin, ascending; empty: the layer's mask as it is.
    ValueError: see `check_shareable`; answers that aren't in order.
    """
    check_shareable(mask)
    shared = [i for i, rows in enumerate(answers) if rows]

    def pattern(_: int, parts: tuple[int, ...]) -> np.ndarray:
        return _slices(mask, parts)

    parts = [np.diff([0, *answers[i], lengths[i]]).tolist() for i in shared]
    made = Mask.of(pattern, Layout.from_lengths(lengths[i] for i in shared), parts, f"{mask} shared")
    masks: list[Mask | SliceMask] = [mask] * len(lengths)
    for i, one in zip(shared, made):
        masks[i] = one
    return tuple(masks)


def _slices(mask: Mask, parts: tuple[int, ...]) -> np.ndarray:
    """Give the slices of a document made of a question and answers of these lengths, not canonical: int64 [n, 6]."""
    question, *answers = parts
    tables = [_clipped(MASKS[mask.name].slices(question, *mask.parameters), (0, question), (0, question), 0, 0)]
    start = question
    for length in answers:
        alone = MASKS[mask.name].slices(question + length, *mask.parameters)
        rows, moved = (question, question + length), start - question
        tables.append(_clipped(alone, rows, (0, question), moved, 0))
        tables.append(_clipped(alone, rows, rows, moved, moved))
        start += length
    return np.concatenate(tables)


def _clipped(
    table: np.ndarray, rows: tuple[int, int], keys: tuple[int, int], move_rows: int, move_keys: int
) -> np.ndarray:
    """Cut slices to a rectangle of rows and keys, and move that; k - q changes with it."""
    table = table.copy()
    table[:, [Q0, Q1]] = np.clip(table[:, [Q0, Q1]], *rows) + move_rows
    table[:, [K0, K1]] = np.clip(table[:, [K0, K1]], *keys) + move_keys
    table[:, [LO, HI]] += move_keys - move_rows
    return table
