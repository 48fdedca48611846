"""Load: what a data-parallel rank trains on, step by step, and what it is evaluated on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hsap.data.batch import MicroBatch, build_micro_batch, count_targets, count_tokens, doc_ids_hash, padding_share
from hsap.data.packing import Pack, Packing, PackStream, check_dealing, deal, epoch_packs
from hsap.data.prefetch import Prefetch
from hsap.data.store import DocumentStore
from hsap.ir.check import whole


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """One step: this data-parallel rank's micro-batches, and figures of the whole step, equal on all ranks.

    step: from 1. epoch: from 0, that of the step's first pack. global_num_targets: over all packs of the step, the
    denominator of the loss; may be 0. doc_ids_hash, num_tokens, padding_share: over all packs of the step.
    pack_tokens: of this step. cursor: fits JSON; a loader given it goes on with the next step.
    """

    step: int
    epoch: int
    micro_batches: tuple[MicroBatch, ...]
    global_num_targets: int
    doc_ids_hash: str
    num_tokens: int
    padding_share: float
    pack_tokens: int
    cursor: dict[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class EvalBatches:
    """The held-out data once: this data-parallel rank's micro-batches, and figures over all ranks, equal on all.

    Every rank has the same number of micro-batches; where packs don't divide, the last are empty. padding_share counts
    those empty packs.
    """

    micro_batches: tuple[MicroBatch, ...]
    global_num_targets: int
    doc_ids_hash: str
    num_tokens: int
    padding_share: float


class StepLoader:
    """The steps of a run for one data-parallel rank, endless, prepared `lookahead` steps ahead on a background thread.

    packs_per_step must be a multiple of dp_size × micro_packs; the quotient is the number of micro-batches in a step
    (gradient accumulation). What a step holds depends on store, seed, packing and packs_per_step alone.
    To resume, give `cursor` (that of the last step done; cheap) or `start_step` (the first step to give).
    An exception of the thread comes out of `next`. Use it as a context manager, or call `close`.
    Errors (ValueError): settings that don't fit; another run's cursor.
    """

    def __init__(
        self,
        store: DocumentStore,
        packing: Packing,
        *,
        packs_per_step: int,
        micro_packs: int = 1,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        lookahead: int = 2,
        start_step: int = 1,
        cursor: dict[str, object] | None = None,
    ) -> None:
        check_dealing(packs_per_step, dp_size, micro_packs)
        whole("data-parallel rank", dp_rank, 0, dp_size - 1)
        stream = PackStream(store.lengths, packing, packs_per_step, seed, store.uncut)
        if cursor is not None:
            stream.load_state_dict(cursor)
        elif whole("start step", start_step) != 1:
            stream.seek(start_step)
        self._steps = Prefetch(_steps(store, stream, dp_rank, dp_size, micro_packs), lookahead)

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        return next(self._steps)

    def close(self) -> None:
        """End the background thread."""
        self._steps.close()

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _steps(
    store: DocumentStore, stream: PackStream, dp_rank: int, dp_size: int, micro_packs: int
) -> Iterator[StepBatch]:
    for step in stream:
        hands = deal(step.packs, dp_rank, dp_size, micro_packs)
        yield StepBatch(
            step=step.step,
            epoch=step.epoch,
            micro_batches=tuple(build_micro_batch(store, hand, step.pack_tokens) for hand in hands),
            global_num_targets=count_targets(store, step.packs),
            doc_ids_hash=doc_ids_hash(store, step.packs),
            num_tokens=count_tokens(step.packs),
            padding_share=padding_share(step.packs, step.pack_tokens),
            pack_tokens=step.pack_tokens,
            cursor=stream.state_dict(),
        )


def eval_packing(packing: Packing) -> Packing:
    """How held-out data are packed: as long as the longest stage; there are no steps to be `balanced`."""
    pack_tokens = max(tokens for _, tokens in packing.stages)
    policy = "best_fit" if packing.policy == "balanced" else packing.policy
    return replace(packing, pack_tokens=pack_tokens, policy=policy, curriculum=())


def eval_batches(
    store: DocumentStore,
    packing: Packing,
    *,
    micro_packs: int = 1,
    dp_rank: int = 0,
    dp_size: int = 1,
    max_packs: int | None = None,
) -> EvalBatches:
    """Prepare held-out data once: the same packs at every evaluation and for every seed and data-parallel size.

    max_packs: take no more than the first so many (they are in random order); None: all. Errors (ValueError): settings
    that don't fit.
    """
    packing = eval_packing(packing)
    if max_packs is not None:
        max_packs = whole("eval max_packs (None for all)", max_packs, 0)
    packs = epoch_packs(store.lengths, packing, seed=0, epoch=0, uncut=store.uncut)[:max_packs]
    check_dealing(0, dp_size, micro_packs)
    padded: list[Pack] = packs + [()] * (-len(packs) % (dp_size * micro_packs))
    hands = deal(padded, dp_rank, dp_size, micro_packs)
    return EvalBatches(
        micro_batches=tuple(build_micro_batch(store, hand, packing.pack_tokens) for hand in hands),
        global_num_targets=count_targets(store, packs),
        doc_ids_hash=doc_ids_hash(store, packs),
        num_tokens=count_tokens(packs),
        padding_share=padding_share(padded, packing.pack_tokens),
    )
