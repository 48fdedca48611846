"""Packs: pieces of documents, as columns where they are many and as tuples where a step's few are used."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
    """Tokens [start, stop) of a document, counted within the document."""

    document: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


Pack = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class StepPacks:
    """The packs of one step in global order.

    step counts from 1, epoch (of the first pack) from 0. pack_tokens: the most tokens that a pack of this step may
    have, but for documents that are kept whole.
    """

    step: int
    epoch: int
    packs: tuple[Pack, ...]
    pack_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Many pieces. document, start, stop: int64 [num_pieces]."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    def __len__(self) -> int:
        return len(self.document)

    def __getitem__(self, rows: slice | np.ndarray) -> Pieces:
        return Pieces(self.document[rows], self.start[rows], self.stop[rows])

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each: int64 [num_pieces]."""
        return self.stop - self.start

    @classmethod
    def joined(cls, parts: list[Pieces]) -> Pieces:
        """Pieces one part after the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def merged(self) -> Pieces:
        """The same tokens in the fewest pieces: parts of a document that meet become one, at the first one's place."""
        by_place = np.lexsort((self.start, self.document))
        document, start, stop = self.document[by_place], self.start[by_place], self.stop[by_place]
        begins = np.ones(len(self), bool)
        begins[1:] = (document[1:] != document[:-1]) | (start[1:] != stop[:-1])
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(self))[: len(first)] - 1
        earliest = np.minimum.reduceat(by_place, first) if len(first) else first
        return Pieces(document[first], start[first], stop[last])[np.argsort(earliest, kind="stable")]


NO_PIECES = Pieces(*np.zeros((3, 0), np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Packs:
    """Many packs: pack i is pieces[borders[i]:borders[i + 1]]. borders: int64 [num_packs + 1]."""

    pieces: Pieces
    borders: np.ndarray

    def __len__(self) -> int:
        return len(self.borders) - 1

    @classmethod
    def gathered(cls, pieces: Pieces, pack: np.ndarray, num_packs: int) -> Packs:
        """Pieces by the pack that each goes into, int64 [num_pieces]; within a pack they keep their order."""
        borders = np.concatenate([[0], np.cumsum(np.bincount(pack, minlength=num_packs))])
        return cls(pieces[np.argsort(pack, kind="stable")], borders)

    def taken(self, first: int, last: int) -> list[Pack]:
        """Packs first to last (exclusive), as tuples."""
        begin, end = int(self.borders[first]), int(self.borders[last])
        some = self.pieces[begin:end]
        pieces = list(map(Piece, some.document.tolist(), some.start.tolist(), some.stop.tolist()))
        borders = (self.borders[first : last + 1] - begin).tolist()
        return [tuple(pieces[a:b]) for a, b in pairwise(borders)]

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of each pack: int64 [num_packs]."""
        return self._sums(self.pieces.tokens)

    @property
    def weights(self) -> np.ndarray:
        """`pack_weight` of each pack: int64 [num_packs]."""
        return self._sums(self.pieces.tokens**2)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        return np.diff(np.concatenate([[0], np.cumsum(values)])[self.borders])


def pack_weight(pack: Pack) -> int:
    """Weigh a pack by its attention: the sum of squared piece lengths.

    These are the pairs of full attention, and twice those of causal attention but for one a token. Of layers whose mask
    has a window or chunks it overstates long documents; no weight fits a model that has both.
    """
    return sum(piece.num_tokens**2 for piece in pack)
