"""Settings of packing, and what becomes of documents that are longer than a pack."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hsap.data.packing.packs import Pieces
from hsap.ir.check import MAX_TOKENS, Refused, one_of, shown, whole, wholes

POLICIES = ("best_fit", "balanced", "concat")
"""Each has a file that packs, and in `Windows` a method of its name that feeds it."""
LONG_DOCUMENTS = ("cut", "keep", "drop")
WINDOW = 1 << 19
"""Documents that are looked at together: half a million pack in a third of a second, and fill 99.9 % of 128K tokens."""
MAX_DELAY_STEPS = 128
"""Steps that `balanced` looks at together: enough that long documents find their like on long-tailed data."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents become packs; a stage of it is a range of steps whose packs are equally long.

    pack_tokens: tokens of a pack. policy: one of `POLICIES`. window: documents looked at together, at most.
    long_documents: `cut` those longer than a pack into packs and a rest; `keep` them whole, each in a pack of its own,
    up to max_document_tokens, and cut the others; or `drop` them. Documents that may not be cut are dropped where
    others are cut. max_delay_steps: how far `balanced` may move a document. curriculum: (step, pack_tokens), ...: from
    that step on packs have so many tokens. Errors (ValueError): settings that can't work.
    """

    pack_tokens: int
    policy: str = "best_fit"
    window: int = WINDOW
    long_documents: str = "cut"
    max_document_tokens: int | None = None
    max_delay_steps: int = MAX_DELAY_STEPS
    curriculum: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        whole("data.pack_tokens", self.pack_tokens, 1, MAX_TOKENS)
        one_of("data.packing: unknown policy", self.policy, POLICIES)
        whole("packing: window", self.window)
        one_of("data.long_documents: unknown choice", self.long_documents, LONG_DOCUMENTS)
        whole("data.max_delay_steps", self.max_delay_steps)
        object.__setattr__(self, "curriculum", _checked(self.curriculum))
        longest = max(tokens for _, tokens in self.stages)
        if (self.long_documents == "keep") != (self.max_document_tokens is not None):
            raise Refused(
                f"data.long_documents={self.long_documents} with data.max_document_tokens="
                f"{shown(self.max_document_tokens)}; the limit is needed by keep, and by nothing else"
            )
        if self.max_document_tokens is not None:
            name = "data.max_document_tokens (at least a pack)"
            whole(name, self.max_document_tokens, longest, MAX_TOKENS)

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """First step and pack_tokens of each stage, the first of which begins with step 1."""
        return ((1, self.pack_tokens), *self.curriculum)

    @property
    def max_pack_tokens(self) -> int:
        """The most tokens that a pack can have at any step."""
        return max(*(tokens for _, tokens in self.stages), self.max_document_tokens or 1)

    def stage(self, step: int) -> int:
        """Index of the stage that a step belongs to."""
        return max(index for index, (first, _) in enumerate(self.stages) if first <= step)


@dataclass(frozen=True, slots=True)
class LongDocuments:
    """What becomes of documents when packs have `pack_tokens` tokens: how many are empty, cut, kept and dropped.

    dropped_tokens: of those dropped.
    """

    pack_tokens: int
    empty: int
    cut: int
    kept: int
    dropped: int
    dropped_tokens: int

    def __str__(self) -> str:
        counts = ((self.cut, "cut"), (self.kept, "kept whole"), (self.dropped, "dropped"))
        long = ", ".join(f"{count:,} {word}" for count, word in counts if count)
        lost = f" ({self.dropped_tokens:,} tokens)" if self.dropped else ""
        empty = f"{self.empty:,} without any token left out" if self.empty else ""
        longer = f"longer than {self.pack_tokens:,} tokens: {long}{lost}" if long else ""
        return "; ".join(part for part in (longer, empty) if part)


def count_long(lengths: np.ndarray, uncut: np.ndarray | None, packing: Packing) -> list[LongDocuments]:
    """Count, for each stage of `packing`, what becomes of documents.

    lengths: tokens of each document. uncut: bool [num_documents], whether it may not be cut; None: all may.
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
        counts.append(
            LongDocuments(
                pack_tokens=pack_tokens,
                empty=int((documents.stop == 0).sum()),
                cut=int((long & stays & ~kept).sum()),
                kept=int((long & stays & kept).sum()),
                dropped=len(dropped),
                dropped_tokens=int(dropped.sum()),
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


def _checked(curriculum: object) -> tuple[tuple[int, int], ...]:
    """Give a curriculum as tuples; ValueError where it is none."""
    sound = isinstance(curriculum, (list, tuple)) and all(
        isinstance(stage, (list, tuple)) and len(stage) == 2 for stage in curriculum
    )
    if not sound:
        raise Refused(
            f"data.curriculum is {shown(curriculum)}; give [[step, pack_tokens], ...]: from that step on packs have so "
            "many tokens"
        )
    stages = tuple(wholes(f"data.curriculum[{i}]", stage, 1, MAX_TOKENS) for i, stage in enumerate(curriculum))
    steps = [1, *(step for step, _ in stages)]
    if any(a >= b for a, b in pairwise(steps)):
        raise Refused(
            f"data.curriculum has the steps {shown(steps[1:])}; they must ascend and begin after step 1, whose packs "
            "have data.pack_tokens"
        )
    return stages
