"""Layout: which documents lie in a packed batch, and where the packs' borders are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Layout:
    """Document lengths of a packed micro-batch, in order.

    lengths: tokens of each document, all >= 1. sequences: number of documents in each pack (a pack may be empty);
    their sum is the number of documents.
    """

    lengths: tuple[int, ...]
    sequences: tuple[int, ...]

    def __post_init__(self) -> None:
        bad = [i for i, n in enumerate(self.lengths) if n < 1]
        if bad:
            raise ValueError(
                f"layout: document {bad[0]} has length {self.lengths[bad[0]]}; every document needs at least one "
                "token, so drop empty documents before packing"
            )
        if any(n < 0 for n in self.sequences) or sum(self.sequences) != len(self.lengths):
            raise ValueError(
                f"layout: sequences {self.sequences} (documents per pack) must add up to the {len(self.lengths)} "
                "documents given"
            )

    @classmethod
    def from_lengths(cls, lengths: Iterable[int], sequences: Sequence[int] | None = None) -> Layout:
        """Make a layout from document lengths [tokens]; one pack unless `sequences` gives documents per pack."""
        lengths = tuple(int(n) for n in lengths)
        return cls(lengths, (len(lengths),) if sequences is None else tuple(int(n) for n in sequences))

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def cu_seqlens(self) -> np.ndarray:
        """Document borders in token positions: int64 [num_documents + 1]."""
        return np.concatenate([[0], np.cumsum(np.array(self.lengths, dtype=np.int64))]).astype(np.int64)

    @property
    def document_spans(self) -> np.ndarray:
        """Span of each document: int64 [num_documents, 2]."""
        borders = self.cu_seqlens
        return np.stack([borders[:-1], borders[1:]], axis=1)
