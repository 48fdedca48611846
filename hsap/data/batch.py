"""Batch: from packs to arrays in packed token-position order, the form in which a micro-batch is sharded later.

Labels are shifted within each document, before any sharding. The last token of a document has no target (-100). A
document longer than a pack is cut, but its labels are not: the last token of a piece that isn't the document's last
has the next piece's first token as its target, and positions go on counting in the next piece. (Attention doesn't
reach back over a cut.) So targets and positions of a token are the document's own, however documents are packed.

A shared question is stored as the question without its last token, then each answer behind that token. Every answer's
positions begin at the question's last, and the last token of an answer has no target. The question's last token, which
stands before every answer, is a target once: of the row before the first answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hsap.data.packing import Pack, Piece
from hsap.data.store import DocumentStore
from hsap.targets import NO_TARGET

ARRAYS = ("tokens", "labels", "positions")
"""Fields of a micro-batch with a number for each token."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The packs that one sequence-parallel group holds in a micro-step, T tokens in token-position order.

    tokens: int32 [T]. labels: int32 [T], `NO_TARGET` where there is none. positions: int32 [T], within the document.
    lengths: tokens of each piece, pack after pack, none empty (`Layout.from_lengths`). sequences: pieces in each pack,
    0 for an empty pack (`Layout.sequences`). document_ids: one a piece. num_targets: labels that aren't `NO_TARGET`.
    padding_share: the part of the packs' capacity that holds no token. T may be 0. answers: for each piece the rows
    of the piece at which a shared question's answers begin; () where no piece has any.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    lengths: tuple[int, ...]
    sequences: tuple[int, ...]
    document_ids: tuple[str, ...]
    num_targets: int
    padding_share: float
    answers: tuple[tuple[int, ...], ...] = ()


def build_micro_batch(store: DocumentStore, packs: Sequence[Pack], pack_tokens: int) -> MicroBatch:
    """Gather the tokens, labels and positions of packs of `store`; packs may be empty."""
    pieces = [piece for pack in packs for piece in pack]
    num_tokens = sum(piece.num_tokens for piece in pieces)
    tokens = np.empty(num_tokens, dtype=np.int32)
    labels = np.empty(num_tokens, dtype=np.int32)
    positions = np.empty(num_tokens, dtype=np.int32)
    row = 0
    answers = tuple(store.answers_of(piece.document) for piece in pieces) if store.answers is not None else ()
    for piece in pieces:
        rows = slice(row, row + piece.num_tokens)
        first = store.starts[piece.document] + piece.start
        tokens[rows] = store.tokens[first : first + piece.num_tokens]
        labels[rows] = _labels(store, piece)
        positions[rows] = _positions(store, piece)
        row = rows.stop
    return MicroBatch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        lengths=tuple(piece.num_tokens for piece in pieces),
        sequences=tuple(len(pack) for pack in packs),
        document_ids=tuple(store.ids[piece.document] for piece in pieces),
        num_targets=count_targets(store, packs),
        padding_share=padding_share(packs, pack_tokens),
        answers=answers if any(answers) else (),
    )


def _labels(store: DocumentStore, piece: Piece) -> np.ndarray:
    """Give the target of every row of a piece: int32 [num_tokens]."""
    targets = _targets(store, piece)
    labels = np.full(piece.num_tokens, NO_TARGET, dtype=np.int32)
    labels[: targets.stop - targets.start] = store.tokens[targets]
    if store.trained is not None:
        labels[: targets.stop - targets.start][~store.trained[targets]] = NO_TARGET
    labels[[row - 1 for row in _later_answers(store, piece)]] = NO_TARGET
    return labels


def _positions(store: DocumentStore, piece: Piece) -> np.ndarray:
    """Give the position of every row of a piece in its document, or in the question with one answer."""
    positions = np.arange(piece.start, piece.stop)
    for row in _later_answers(store, piece):
        positions[row:] = np.arange(piece.stop - row) + store.answers_of(piece.document)[0]
    return positions


def _targets(store: DocumentStore, piece: Piece) -> slice:
    """Say which tokens of the store follow those of a piece in its document."""
    begin, end = store.starts[piece.document : piece.document + 2].tolist()
    return slice(begin + piece.start + 1, min(begin + piece.stop + 1, end))


def _later_answers(store: DocumentStore, piece: Piece) -> tuple[int, ...]:
    """Give the rows of a document that begin an answer but the first: nothing in the row before predicts them."""
    answers = store.answers_of(piece.document)
    begin, end = store.starts[piece.document : piece.document + 2].tolist()
    assert not answers or (piece.start, piece.stop) == (0, end - begin), "a shared question was cut"
    return answers[1:]


def count_targets(store: DocumentStore, packs: Iterable[Pack]) -> int:
    """Count the target tokens of packs without building them: the trained ones that some token stands before."""
    return sum(_num_targets(store, piece) for pack in packs for piece in pack)


def _num_targets(store: DocumentStore, piece: Piece) -> int:
    targets = _targets(store, piece)
    later = _later_answers(store, piece)
    if store.trained is None:
        return targets.stop - targets.start - len(later)
    trained = store.trained[targets]
    # The first target is the document's second token.
    return int(np.count_nonzero(trained)) - sum(bool(trained[row - 1]) for row in later)


def count_tokens(packs: Iterable[Pack]) -> int:
    """Count the tokens of packs."""
    return sum(piece.num_tokens for pack in packs for piece in pack)


def padding_share(packs: Iterable[Pack], pack_tokens: int) -> float:
    """Say which part of the capacity of packs holds no token; 0 for no packs at all.

    A pack of a document that is kept whole although it's longer than `pack_tokens` is full.
    """
    tokens = [count_tokens([pack]) for pack in packs]
    return 1.0 - sum(tokens) / sum(max(some, pack_tokens) for some in tokens) if tokens else 0.0


def doc_ids_hash(store: DocumentStore, packs: Iterable[Pack]) -> str:
    """Hash which tokens a step trains on: 16 hexadecimal digits over ids and cut ranges, pack by pack in global order.

    Equal for equal steps whatever the data-parallel size, the number of ranks and the topology.
    """
    digest = hashlib.sha256()
    for pack in packs:
        names = [[store.ids[piece.document], piece.start, piece.stop] for piece in pack]
        digest.update(json.dumps(names, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()[:16]
