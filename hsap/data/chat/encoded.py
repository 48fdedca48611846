"""Encoded: a conversation in tokens, as a template makes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Tokens of a conversation: int32 [num_tokens], and which are trained: bool [num_tokens].

    begins: for each assistant's turn, by its index, the first token of what the assistant says.
    """

    tokens: np.ndarray
    trained: np.ndarray
    begins: dict[int, int]
