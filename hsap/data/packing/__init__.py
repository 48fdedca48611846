"""Packing: which documents share a sequence, decided on lengths alone.

A *pack* is an ordered tuple of pieces of documents with at most `pack_tokens` tokens together; packs are not filled up.
The stream of packs is a function of the lengths, the seed, packs_per_step and the settings (`Packing`), cut into steps
of packs_per_step packs; it knows nothing of ranks or workers. Every epoch goes over all documents in an order of its
own, window by window; the packs of one epoch follow those of the one before, so that a step may hold the last packs of
one and the first of the next. Each policy is a file: `concat`, `best_fit`, `balanced`.
"""

from hsap.data.packing.deal import check_dealing, deal, deal_all, deal_by_weight
from hsap.data.packing.long import LongDocuments, count_long
from hsap.data.packing.packs import Pack, Packs, Piece, Pieces, StepPacks, pack_weight
from hsap.data.packing.settings import (
    LONG_DOCUMENTS,
    MAX_DELAY_STEPS,
    POLICIES,
    WINDOW,
    Packing,
)
from hsap.data.packing.stream import MAX_SOUGHT_EPOCHS, PackStream, epoch_packs

__all__ = [
    "LONG_DOCUMENTS",
    "MAX_DELAY_STEPS",
    "MAX_SOUGHT_EPOCHS",
    "POLICIES",
    "WINDOW",
    "LongDocuments",
    "Pack",
    "PackStream",
    "Packing",
    "Packs",
    "Piece",
    "Pieces",
    "StepPacks",
    "check_dealing",
    "count_long",
    "deal",
    "deal_all",
    "deal_by_weight",
    "epoch_packs",
    "pack_weight",
]
