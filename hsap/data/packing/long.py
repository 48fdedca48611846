"""Long: what becomes of documents that are longer than a pack, and of those without tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.data.packing.packs import Pieces
from hsap.data.packing.settings import LONG_DOCUMENTS, Packing


@dataclass(frozen=True, slots=True)
class LongDocuments:
    """What becomes of documents when packs have `pack_tokens` tokens: how many are empty, cut, kept and dropped.

    dropped_tokens: of those dropped. cut_chats: of those cut, how many are chats, or at most are if `perhaps`.
    """

    pack_tokens: int
    empty: int
    cut: int
    kept: int
    dropped: int
    dropped_tokens: int
    cut_chats: int = 0
    perhaps: bool = False

    def __str__(self) -> str:
        counts = ((self.cut, "cut"), (self.kept, "kept whole"), (self.dropped, "dropped"))
        long = ", ".join(f"{count:,} {word}" for count, word in counts if count)
        lost = f" ({self.dropped_tokens:,} tokens)" if self.dropped else ""
        empty = f"{self.empty:,} without any token left out" if self.empty else ""
        longer = f"longer than {self.pack_tokens:,} tokens: {long}{lost}" if long else ""
        chats = ""
        if self.cut_chats:
            most, are = "up to " if self.perhaps else "", "chat is" if self.cut_chats == 1 else "chats are"
            chats = (
                f"{most}{self.cut_chats:,} {are} cut: what is behind a cut trains answers without what they answer; "
                f"data.long_documents=drop leaves them out, keep packs them whole up to data.max_document_tokens"
            )
        return "; ".join(part for part in (longer, empty, chats) if part)


def count_long(
    lengths: np.ndarray, uncut: np.ndarray | None, packing: Packing, chats: np.ndarray | None = None
) -> list[LongDocuments]:
    """Count, for each stage of `packing`, what becomes of documents.

    lengths: tokens of each document. uncut: bool [num_documents], whether it may not be cut; None: all may.
    chats: int8 [num_documents], whether it is a chat, see `Index.chats`; None: no document is.
    Errors (ValueError): a stage for which no document is left, or data without any token.
    """
    if not np.any(lengths):
        raise ValueError("the data set has no token at all: it is empty, or every document is; check data.path")
    counts = []
    documents = Pieces(np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.asarray(lengths, np.int64))
    for _, pack_tokens in packing.stages:
        stays, kept = judge(documents, uncut, pack_tokens, packing)
        long = documents.stop > pack_tokens
        dropped = documents.stop[~stays]
        cut = long & stays & ~kept
        cut_chats = np.zeros(0, np.int8) if chats is None else chats[cut]
        counts.append(
            LongDocuments(
                pack_tokens=pack_tokens,
                empty=int((documents.stop == 0).sum()),
                cut=int(cut.sum()),
                kept=int((long & stays & kept).sum()),
                dropped=len(dropped),
                dropped_tokens=int(dropped.sum()),
                cut_chats=int((cut_chats > 0).sum()),
                perhaps=bool((cut_chats > 1).any()),
            )
        )
        if not np.any(documents.stop[stays]):
            raise ValueError(
                f"every document is longer than data.pack_tokens={pack_tokens} and dropped; raise it, or set "
                f"data.long_documents to another of {', '.join(LONG_DOCUMENTS)}"
            )
    return counts


def judge(
    pieces: Pieces, uncut: np.ndarray | None, pack_tokens: int, packing: Packing
) -> tuple[np.ndarray, np.ndarray]:
    """Say which pieces are packed, and which of them stay uncut: two of bool [num_pieces].

    uncut: of documents, see `count_long`. A piece that stays uncut is no longer than a pack or gets one of its own.
    What an earlier stage left of a document is judged by its own length.
    """
    tokens = pieces.tokens
    asked = np.zeros(len(pieces), bool) if uncut is None else uncut[pieces.document]
    long = tokens > pack_tokens
    if packing.long_documents == "keep":
        kept = long & (tokens <= packing.max_document_tokens)
        return ~(long & asked & ~kept), asked | kept
    return ~(long & (asked | (packing.long_documents == "drop"))), asked


def cut(pieces: Pieces, uncut: np.ndarray, pack_tokens: int) -> tuple[Pieces, np.ndarray]:
    """Cut what is longer than a pack into packs and a rest, but for what may not be cut.

    Gives the parts, and for each of them which of `pieces` it is of: int64.
    """
    parts = np.where(uncut, 1, -(-pieces.tokens // pack_tokens))
    if np.all(parts == 1):
        return pieces, np.arange(len(pieces))
    row = np.repeat(np.arange(len(pieces)), parts)
    part = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = pieces.start[row] + part * pack_tokens
    stop = np.where(uncut[row], pieces.stop[row], np.minimum(start + pack_tokens, pieces.stop[row]))
    return Pieces(pieces.document[row], start, stop), row
