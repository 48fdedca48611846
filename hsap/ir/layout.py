"""Layout: which documents lie in a packed batch, and where the packs' borders are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hsap.ir.check import MAX_TOKENS, wholes


@dataclass(frozen=True, slots=True)
class Layout:
    """Document lengths of a packed micro-batch, in order.

    lengths: tokens of each document, all >= 1, at most `MAX_TOKENS` together. sequences: number of documents in each
    pack (a pack may be empty); their sum is the number of documents.
    """

    lengths: tuple[int, ...]
    sequences: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", wholes("layout: lengths", self.lengths, 1, MAX_TOKENS))
        object.__setattr__(self, "sequences", wholes("layout: sequences", self.sequences, 0, MAX_TOKENS))
        if self.num_tokens > MAX_TOKENS:
            raise ValueError(
                f"layout: the documents have {self.num_tokens} tokens together, a packed batch may have {MAX_TOKENS}; "
                "put fewer documents into one"
            )
        if sum(self.sequences) != len(self.lengths):
            raise ValueError(
                f"layout: sequences add up to {sum(self.sequences)} documents, {len(self.lengths)} have a length; give "
                "the number of documents in each pack"
            )

    @classmethod
    def from_lengths(cls, lengths: Iterable[int], sequences: Sequence[int] | None = None) -> Layout:
        """Make a layout from document lengths [tokens]; one pack unless `sequences` gives documents per pack."""
        checked = wholes("layout: lengths", lengths, 1, MAX_TOKENS)
        return cls(checked, (len(checked),) if sequences is None else tuple(sequences))

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
