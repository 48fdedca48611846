"""Windows: the documents of an epoch, some at a time, and the packs that each time's make.

A window is a function of its place alone: no pack holds documents of two windows, and no window waits for what another
left over. So a checkpoint holds a place and nothing else. Only where packs change their length in the middle of a
window (a stage of the curriculum begins) is something left: the pieces of the packs not yet given go first in the new
stage, as its own windows. The place then names the old one, from which they follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hsap.data.packing.long import judge
from hsap.data.packing.packs import NO_PIECES, Packs, Pieces
from hsap.data.packing.settings import Packing


class Place(NamedTuple):
    """Where a stream stands.

    stage: of `Packing.stages`. epoch: from 0. first, offset: the window begins with this row of the epoch's, less its
    first `offset` tokens. pack: packs of the window that were given. before: where earlier stages of this epoch ended,
    the first one first, of whose packs the epoch's rows begin with what is left; each a place but for its own `before`,
    which is those before it.
    """

    stage: int = 0
    epoch: int = 0
    first: int = 0
    offset: int = 0
    pack: int = 0
    before: tuple[tuple[int, int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The packs of a window, and the row and the offset in it with which the next one begins."""

    packs: Packs
    first: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of an epoch: what an earlier stage left, then the documents from number `resume` of the order on."""

    left: Pieces
    resume: int


class Windows:
    """The windows of a data set; policies are loaded when first used, as compiled loops take a while to load.

    lengths: int64 [num_documents]. uncut: bool [num_documents] or None, what may not be cut.
    """

    def __init__(
        self, lengths: np.ndarray, uncut: np.ndarray | None, packing: Packing, packs_per_step: int, seed: int
    ) -> None:
        self.lengths, self.uncut, self.packing = lengths, uncut, packing
        self.packs_per_step, self.seed = packs_per_step, seed
        self._filled = np.flatnonzero(lengths)
        self._mean_tokens = lengths.sum() / len(self._filled)
        self._order: tuple[int, np.ndarray] | None = None
        self._left: tuple[tuple[Any, ...], _Rows] = ((), _Rows(NO_PIECES, 0))

    def at(self, place: Place) -> Window:
        """Pack the window at a place."""
        return self._packed(place, self._rows(place.before))

    def _packed(self, place: Place, rows: _Rows) -> Window:
        num_rows = self._num_rows(place.epoch, rows) - place.first
        size = min(self._size(place.stage), num_rows)
        policies = {"concat": self._concat, "best_fit": self._best_fit, "balanced": self._balanced}
        pack = policies[self.packing.policy]
        while True:
            pieces = self._pieces(place.epoch, rows, place.first, place.first + size, place.offset)
            window, fitting = pack(place, pieces, size == num_rows)
            if window is not None:
                return window
            size = min(fitting, num_rows)

    def following(self, place: Place, window: Window) -> Place:
        """The place after all packs of the window at `place`."""
        rows = self._rows(place.before)
        if window.first >= self._num_rows(place.epoch, rows):
            return Place(place.stage, place.epoch + 1)
        if window.first < len(rows.left):
            return place._replace(first=window.first, offset=window.offset, pack=0)
        first = rows.resume + window.first - len(rows.left)
        return Place(place.stage, place.epoch, first, window.offset)

    def _concat(self, place: Place, pieces: Pieces, last: bool) -> tuple[Window | None, int]:
        """The unfinished pack at the end is left to the next window; where no other is, more rows are needed."""
        from hsap.data.packing.concat import concat

        stays, uncut, pack_tokens = self._judge(place, pieces)
        packs, row = concat(pieces[stays], uncut[stays], pack_tokens)
        if last or not len(packs) or packs.tokens[-1] >= pack_tokens:
            return Window(packs, place.first + len(pieces), 0), 0
        if len(packs) == 1:
            return None, 2 * len(pieces)
        end = int(packs.borders[-2])
        first = int(np.flatnonzero(stays)[row[end]])
        done = Packs(packs.pieces[:end], packs.borders[:-1])
        offset = int(packs.pieces.start[end]) - int(pieces.start[first]) + (0 if first else place.offset)
        return Window(done, place.first + first, offset), 0

    def _best_fit(self, place: Place, pieces: Pieces, last: bool) -> tuple[Window | None, int]:
        from hsap.data.packing.best_fit import best_fit

        stays, uncut, pack_tokens = self._judge(place, pieces)
        packs = best_fit(pieces[stays], uncut[stays], pack_tokens, self._random(place))
        return Window(packs, place.first + len(pieces), 0), 0

    def _balanced(self, place: Place, pieces: Pieces, last: bool) -> tuple[Window | None, int]:
        """Fewer rows, where they make more steps than a document may be delayed."""
        from hsap.data.packing.balanced import FILL, balanced

        stays, uncut, pack_tokens = self._judge(place, pieces)
        step_tokens = self.packs_per_step * pack_tokens
        most = self.packing.max_delay_steps
        enough = max(int(np.searchsorted(np.cumsum(pieces.tokens), most * step_tokens * FILL, side="right")), 1)
        if enough < len(pieces):
            return None, enough
        packs = balanced(pieces[stays], uncut[stays], pack_tokens, self.packs_per_step, self._random(place))
        steps = len(packs) // self.packs_per_step
        if steps > most and len(pieces) > 1:
            return None, max(min(len(pieces) * most // steps, len(pieces) - 1), 1)
        return Window(packs, place.first + len(pieces), 0), 0

    def _size(self, stage: int) -> int:
        """Rows to begin with; `balanced` needs no more than twice what its steps hold of documents of mean length."""
        if self.packing.policy != "balanced":
            return self.packing.window
        tokens = 2 * self.packing.max_delay_steps * self.packs_per_step * self.packing.stages[stage][1]
        return min(self.packing.window, int(tokens / self._mean_tokens) + 1)

    def _judge(self, place: Place, pieces: Pieces) -> tuple[np.ndarray, np.ndarray, int]:
        pack_tokens = self.packing.stages[place.stage][1]
        return *judge(pieces, self.uncut, pack_tokens, self.packing), pack_tokens

    def _random(self, place: Place) -> np.random.Generator:
        return np.random.default_rng([self.seed, place.epoch, 1 + place.stage, place.first])

    def _documents(self, epoch: int) -> np.ndarray:
        """The epoch's documents in its order, those without tokens left out."""
        if self._order is None or self._order[0] != epoch:
            self._order = None  # one of them in memory at a time
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(self._filled))
        return self._order[1]

    def _num_rows(self, epoch: int, rows: _Rows) -> int:
        return len(rows.left) + len(self._filled) - rows.resume

    def _pieces(self, epoch: int, rows: _Rows, first: int, last: int, offset: int) -> Pieces:
        """Rows first to last (exclusive), the first of them less `offset` tokens."""
        begin = rows.resume - len(rows.left)
        document = self._documents(epoch)[max(first + begin, rows.resume) : max(last + begin, rows.resume)]
        left, start = rows.left[first:last], np.zeros(len(document), np.int64)
        pieces = Pieces.joined([left, Pieces(document, start, self.lengths[document])])
        pieces.start[:1] += offset
        return pieces

    def _rows(self, before: tuple[tuple[Any, ...], ...]) -> _Rows:
        """The rows of an epoch in which stages ended at `before`."""
        known, rows = self._left
        if known != before[: len(known)]:
            known, rows = (), _Rows(NO_PIECES, 0)
        for i in range(len(known), len(before)):
            stage, epoch, first, offset, pack = before[i]
            place = Place(stage, epoch, first, offset, pack, before[:i])
            rows = self._left_at(place, rows, self._packed(place, rows))
        self._left = (before, rows)
        return rows

    def _left_at(self, place: Place, rows: _Rows, window: Window) -> _Rows:
        """The rows that a stage leaves that ends at a place of these rows, in this window."""
        begun = window.packs.pieces[int(window.packs.borders[place.pack]) :]
        rest = self._pieces(
            place.epoch, rows, window.first, max(window.first + bool(window.offset), len(rows.left)), window.offset
        )
        resume = max(rows.resume, rows.resume + window.first + bool(window.offset) - len(rows.left))
        return _Rows(Pieces.joined([begun, rest]).merged(), resume)
