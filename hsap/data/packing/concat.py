"""concat: documents one after the other, cut every `pack_tokens` tokens; what GPT-style pretraining does.

Full packs in the order of the documents, but a document of up to `pack_tokens` tokens may be cut as well. One that may
not be cut begins a new pack where it doesn't fit the one before. One pass over the documents.
"""

from __future__ import annotations

import numpy as np

from hsap.data.packing.packs import Packs, Pieces
from hsap.loops import loop


def concat(pieces: Pieces, uncut: np.ndarray, pack_tokens: int) -> tuple[Packs, np.ndarray]:
    """Concatenate and cut; the last pack may have room left.

    uncut: bool [num_pieces], what may not be cut. Gives the packs, and for each of their pieces which of `pieces` it
    is of: int64.
    """
    row, start, stop, borders = _concat(pieces.tokens, uncut, pack_tokens)
    first = pieces.start[row]
    return Packs(Pieces(pieces.document[row], first + start, first + stop), borders), row


@loop
def _concat(
    tokens: np.ndarray, uncut: np.ndarray, pack_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    most = len(tokens) + tokens.sum() // pack_tokens + 1
    row, start, stop = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    borders = np.zeros(most + 1, np.int64)
    pieces = packs = 0
    room = pack_tokens
    for i in range(len(tokens)):
        at = 0
        if uncut[i] and room < tokens[i] and borders[packs] < pieces:
            packs += 1
            borders[packs] = pieces
            room = pack_tokens
        while at < tokens[i]:
            end = tokens[i] if uncut[i] else min(tokens[i], at + room)
            row[pieces], start[pieces], stop[pieces] = i, at, end
            pieces += 1
            room -= end - at
            at = end
            if room <= 0:
                packs += 1
                borders[packs] = pieces
                room = pack_tokens
    if borders[packs] < pieces:
        packs += 1
        borders[packs] = pieces
    return row[:pieces], start[:pieces], stop[:pieces], borders[: packs + 1]
