"""Batch: from packs to arrays in packed token-position order, the form in which a micro-batch is sharded later.

Labels are shifted within each document, before any sharding. The last token of a document has no target (-100). A
document longer than a pack is cut, but its labels are not: the last token of a piece that isn't the document's last
has the next piece's first token as its target, and positions go on counting in the next piece. (Attention doesn't
reach back over a cut.) So targets and positions of a token are the document's own, however documents are packed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hsap.data.document import NO_TARGET
from hsap.data.packing import Pack
from hsap.data.store import DocumentStore


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The packs that one sequence-parallel group holds in a micro-step, T tokens in token-position order.

    tokens: int32 [T]. labels: int32 [T], `NO_TARGET` where there is none. positions: int32 [T], within the document.
    lengths: tokens of each piece, pack after pack, none empty (`Layout.from_lengths`). sequences: pieces in each pack,
    0 for an empty pack (`Layout.sequences`). document_ids: one a piece. num_targets: labels that aren't `NO_TARGET`.
    padding_share: the part of the packs' capacity that holds no token. T may be 0.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    lengths: tuple[int, ...]
    sequences: tuple[int, ...]
    document_ids: tuple[str, ...]
    num_targets: int
    padding_share: float


def build_micro_batch(store: DocumentStore, packs: Sequence[Pack], pack_tokens: int) -> MicroBatch:
    """Gather the tokens, labels and positions of packs of `store`; packs may be empty."""
    pieces = [piece for pack in packs for piece in pack]
    num_tokens = sum(piece.num_tokens for piece in pieces)
    tokens = np.empty(num_tokens, dtype=np.int32)
    labels = np.empty(num_tokens, dtype=np.int32)
    positions = np.empty(num_tokens, dtype=np.int32)
    row = 0
    for document, start, stop in pieces:
        document_tokens = store.tokens[store.starts[document] : store.starts[document + 1]]
        rows = slice(row, row + stop - start)
        tokens[rows] = document_tokens[start:stop]
        targets = document_tokens[start + 1 : stop + 1]
        labels[row : row + len(targets)] = targets
        if stop == len(document_tokens):
            labels[rows.stop - 1] = NO_TARGET
        positions[rows] = np.arange(start, stop)
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
    )


def count_targets(store: DocumentStore, packs: Iterable[Pack]) -> int:
    """Count the target tokens of packs without building them: all tokens but each document's last."""
    return sum(
        piece.num_tokens - int(piece.stop == store.starts[piece.document + 1] - store.starts[piece.document])
        for pack in packs
        for piece in pack
    )


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
