"""Pack: which documents share a sequence, decided on lengths alone.

A *pack* is an ordered tuple of pieces of documents with at most `pack_tokens` tokens together; packs are not filled up.
The stream of packs is a function of the lengths, the seed and the policy, cut into steps of `packs_per_step` packs; it
knows nothing of ranks or workers. Every epoch goes over all documents in an order of its own; the packs of one epoch
follow those of the one before, so that a step may hold the last packs of one and the first of the next.

Policies:

- `best_fit`: no document is cut unless it is longer than a pack; such a one gives full packs first and its remainder
  is packed like a document. Within a window of documents, pieces go from long to short into the pack that they fill
  best (best-fit decreasing); the window's packs are then shuffled.
- `concat`: documents one after the other, cut every `pack_tokens` tokens.

Documents that are marked `uncut` (shared questions, whose answers see what they see only together) are never cut: one
that is longer than a pack is refused, and `concat` begins a new pack before one that doesn't fit into the rest.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

import numpy as np

from hsap.ir.check import instance, one_of, whole
from hsap.ir.slice import UNBOUNDED

POLICIES = ("best_fit", "concat")
MAX_SOUGHT_EPOCHS = 1 << 12
"""Epochs that `seek` packs at most; beyond, a start step is a slip of the pen and not worth hours."""
WINDOW = 65_536
"""Documents that best-fit looks at together: a hundred thousand pieces pack in under a second and fill 99.9 %."""


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
    """The packs of one step in global order: step counts from 1, epoch (of the first pack) from 0."""

    step: int
    epoch: int
    packs: tuple[Pack, ...]


def pack_area(pack: Pack) -> int:
    """Weigh a pack by its attention: the sum of squared piece lengths."""
    return sum(piece.num_tokens**2 for piece in pack)


def epoch_packs(
    lengths: np.ndarray,
    pack_tokens: int,
    seed: int,
    epoch: int,
    policy: str = "best_fit",
    window: int = WINDOW,
    uncut: np.ndarray | None = None,
) -> list[Pack]:
    """Pack all documents once, in the order of this seed and epoch; documents of no tokens are left out.

    uncut: which documents are never cut, bool [num_documents]; each fits a pack.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(np.flatnonzero(lengths))
    if policy == "concat":
        return _concat(
            order, lengths[order], pack_tokens, np.zeros(len(order), bool) if uncut is None else uncut[order]
        )
    packs: list[Pack] = []
    for first in range(0, len(order), window):
        some = order[first : first + window]
        full = _best_fit(some, lengths[some], pack_tokens)
        packs.extend(full[index] for index in random.permutation(len(full)))
    return packs


def _concat(order: np.ndarray, lengths: np.ndarray, pack_tokens: int, uncut: np.ndarray) -> list[Pack]:
    packs: list[Pack] = []
    pieces: list[Piece] = []
    room = pack_tokens
    for document, length, whole_only in zip(order.tolist(), lengths.tolist(), uncut.tolist()):
        start = 0
        if whole_only and length > room:
            packs.append(tuple(pieces))
            pieces, room = [], pack_tokens
        while start < length:
            stop = min(length, start + room)
            pieces.append(Piece(document, start, stop))
            room -= stop - start
            start = stop
            if not room:
                packs.append(tuple(pieces))
                pieces, room = [], pack_tokens
    return [*packs, tuple(pieces)] if pieces else packs


def _best_fit(order: np.ndarray, lengths: np.ndarray, pack_tokens: int) -> list[Pack]:
    packs: list[Pack] = []
    rest: list[tuple[int, int, Piece]] = []  # (-tokens, rank in the random order, piece): sorts from long to short
    for rank, (document, length) in enumerate(zip(order.tolist(), lengths.tolist())):
        cut = length - length % pack_tokens
        packs.extend((Piece(document, start, start + pack_tokens),) for start in range(0, cut, pack_tokens))
        if cut < length:
            rest.append((cut - length, rank, Piece(document, cut, length)))
    rest.sort()
    bins: list[list[tuple[int, Piece]]] = []
    rooms: list[tuple[int, int]] = []  # sorted (tokens left, bin) of the bins that aren't full
    for negative, rank, piece in rest:
        tokens = -negative
        best = bisect_left(rooms, (tokens, -1))
        if best < len(rooms):
            room, number = rooms.pop(best)
        else:
            room, number = pack_tokens, len(bins)
            bins.append([])
        bins[number].append((rank, piece))
        if room > tokens:
            insort(rooms, (room - tokens, number))
    # Within a pack the random order, not long to short: where a document stands should say nothing about its length.
    packs.extend(tuple(piece for _, piece in sorted(content)) for content in bins)
    return packs


class PackStream:
    """The endless stream of steps' packs; `next` gives `StepPacks`.

    lengths: tokens of each document [num_documents]. uncut: which of them are never cut, bool [num_documents]; None:
    any may be. Settings as in the module. Errors (ValueError): settings out of range, no document with a token, or one
    that may not be cut and doesn't fit a pack.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        pack_tokens: int,
        packs_per_step: int,
        seed: int = 0,
        policy: str = "best_fit",
        window: int = WINDOW,
        uncut: np.ndarray | None = None,
    ) -> None:
        self.lengths, self.uncut = np.asarray(lengths, dtype=np.int64), uncut
        self.pack_tokens, self.window = check_packing(self.lengths, pack_tokens, policy, window, uncut)
        self.packs_per_step = whole("train.packs_per_step", packs_per_step)
        self.seed = whole("train.seed", seed, 0, UNBOUNDED)
        self.policy = policy
        self._step = 0
        self._epoch = 0
        self._index = 0
        self._packs = self._pack_epoch(0)

    def __iter__(self) -> Iterator[StepPacks]:
        return self

    def __next__(self) -> StepPacks:
        self._skip_finished_epochs()
        epoch, packs = self._epoch, []
        while len(packs) < self.packs_per_step:
            self._skip_finished_epochs()
            taken = self._packs[self._index : self._index + self.packs_per_step - len(packs)]
            packs.extend(taken)
            self._index += len(taken)
        self._step += 1
        return StepPacks(self._step, epoch, tuple(packs))

    def seek(self, step: int) -> None:
        """Go to where the next step is `step` (from 1); packs every epoch before it, unlike `load_state_dict`."""
        step, packs = whole("start step", step), self._pack_epoch(0)
        if (step - 1) * self.packs_per_step > MAX_SOUGHT_EPOCHS * len(packs):
            raise ValueError(
                f"start step {step} lies more than {MAX_SOUGHT_EPOCHS} epochs of {len(packs)} packs ahead, and each is "
                "packed on the way; check the step, or resume from a checkpoint's cursor"
            )
        self._step, self._epoch, self._index = step - 1, 0, (step - 1) * self.packs_per_step
        self._packs = packs
        self._skip_finished_epochs()

    def state_dict(self) -> dict[str, int | str]:
        """Say where the stream stands after the last step given, and what it was made from; all of it fits JSON."""
        return {"step": self._step, "epoch": self._epoch, "pack": self._index, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Go on after the step that `state` was taken at; only the epoch it lies in is packed again.

        Errors (ValueError): a state of other data or settings, with what differs: its packs would be others; a place
        that the stream doesn't have.
        """
        instance("the data cursor", state, dict, "what a checkpoint keeps of the data stream")
        mine = self._identity()
        names = {**mine, "step": 0, "epoch": 0, "pack": 0}
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(f"the data cursor lacks {', '.join(missing)}; it is not one of this version's checkpoints")
        differs = [f"{name} was {state[name]}, now {mine[name]}" for name in mine if state[name] != mine[name]]
        if differs:
            raise ValueError(
                f"the data cursor belongs to another run: {'; '.join(differs)}; documents would be lost or seen twice, "
                f"so resume with the same data, tokenizer, seed and packing"
            )
        step = whole("the data cursor's step", state["step"], 0)
        # Every epoch has a pack, so that there are no more epochs than packs given.
        epoch = whole("the data cursor's epoch", state["epoch"], 0, min(step * self.packs_per_step, UNBOUNDED))
        packs = self._pack_epoch(epoch)
        index = whole("the data cursor's pack", state["pack"], 0, len(packs))
        given = step * self.packs_per_step
        if index + epoch > given or (not epoch and index != given):
            raise ValueError(
                f"the data cursor stands after step {step} at epoch {epoch}, pack {index}, where no run can be; the "
                "checkpoint is damaged, so resume from another"
            )
        self._step, self._epoch, self._index, self._packs = step, epoch, index, packs

    def _identity(self) -> dict[str, int | str]:
        return {
            "seed": self.seed,
            "pack_tokens": self.pack_tokens,
            "packs_per_step": self.packs_per_step,
            "policy": self.policy,
            "window": self.window,
            "num_documents": len(self.lengths),
            "num_tokens": int(self.lengths.sum()),
            "lengths_crc32": zlib.crc32(self.lengths.astype("<i8").tobytes()),
            "uncut_crc32": 0 if self.uncut is None else zlib.crc32(self.uncut.tobytes()),
        }

    def _pack_epoch(self, epoch: int) -> list[Pack]:
        return epoch_packs(self.lengths, self.pack_tokens, self.seed, epoch, self.policy, self.window, self.uncut)

    def _skip_finished_epochs(self) -> None:
        while self._index >= len(self._packs):
            self._index -= len(self._packs)
            self._epoch += 1
            self._packs = self._pack_epoch(self._epoch)


def check_packing(
    lengths: np.ndarray,
    pack_tokens: int,
    policy: str = "best_fit",
    window: int = WINDOW,
    uncut: np.ndarray | None = None,
) -> tuple[int, int]:
    """Give pack_tokens and window; ValueError for settings that can't work, and for data without any token."""
    pack_tokens, window = whole("data.pack_tokens", pack_tokens), whole("data.window", window)
    one_of("data.packing: unknown policy", policy, POLICIES)
    if not np.any(lengths):
        raise ValueError("the data set has no token at all: it is empty, or every document is; check data.path")
    too_long = np.flatnonzero(uncut & (lengths > pack_tokens)) if uncut is not None else ()
    if len(too_long):
        raise ValueError(
            f"{len(too_long)} documents are shared questions longer than data.pack_tokens={pack_tokens} and can't be "
            f"cut, the first is number {too_long[0]} with {lengths[too_long[0]]} tokens; raise data.pack_tokens, or "
            "leave them out"
        )
    return pack_tokens, window


def deal(packs: Sequence[Pack], dp_rank: int, dp_size: int, micro_packs: int = 1) -> list[list[Pack]]:
    """Deal the packs of a step to data-parallel ranks: this rank's micro-batches, each of `micro_packs` packs.

    Packs go from large to small attention area in rounds of dp_size × micro_packs, one micro-batch to each rank a
    round, the next pack always to the least loaded rank that still has room. So ranks carry near-equal area over the
    step and in each micro-step, and the largest micro-batch comes first. Over all ranks every pack is dealt once.
    Errors (ValueError): a number of packs that doesn't divide.
    """
    check_dealing(len(packs), dp_size, micro_packs)
    return deal_all(packs, dp_size, micro_packs)[whole("data-parallel rank", dp_rank, 0, dp_size - 1)]


def deal_all(packs: Sequence[Pack], dp_size: int, micro_packs: int = 1) -> list[list[list[Pack]]]:
    """Deal the packs of a step as `deal` does: the micro-batches of every data-parallel rank."""
    dealt = deal_by_area([pack_area(pack) for pack in packs], dp_size, micro_packs)
    return [[[packs[index] for index in micro] for micro in mine] for mine in dealt.tolist()]


def deal_by_area(areas: Sequence[int], dp_size: int, micro_packs: int = 1) -> np.ndarray:
    """Deal packs of these areas as `deal` does: the index of each, int64 [dp_size, num_micro_steps, micro_packs]."""
    check_dealing(len(areas), dp_size, micro_packs)
    descending = sorted(range(len(areas)), key=lambda index: (-areas[index], index))
    loads = [0] * dp_size
    dealt: list[list[int]] = [[] for _ in range(dp_size)]
    round_packs = dp_size * micro_packs
    for first in range(0, len(areas), round_packs):
        waiting = list(zip(loads, range(dp_size)))
        heapify(waiting)
        for index in descending[first : first + round_packs]:
            load, rank = waiting[0]
            dealt[rank].append(index)
            loads[rank] = load + areas[index]
            if len(dealt[rank]) * round_packs < (first + round_packs) * micro_packs:
                heapreplace(waiting, (loads[rank], rank))
            else:
                heappop(waiting)
    return np.array(dealt, np.int64).reshape(dp_size, -1, micro_packs)


def check_dealing(packs_per_step: int, dp_size: int, micro_packs: int) -> None:
    """Refuse a number of packs that data-parallel ranks and micro-batches don't divide."""
    whole("train.packs_per_step", packs_per_step, 0)
    whole("the data-parallel size", dp_size)
    whole("train.micro_packs", micro_packs)
    if packs_per_step % (dp_size * micro_packs):
        unit = dp_size * micro_packs
        below = packs_per_step - packs_per_step % unit
        fitting = f"{below} or {below + unit}" if below else f"{unit}"
        raise ValueError(
            f"train.packs_per_step={packs_per_step} doesn't divide over {dp_size} data-parallel rank(s) × "
            f"train.micro_packs={micro_packs}; set it to a multiple of {unit}, such as {fitting}, or change "
            f"train.micro_packs or the topology"
        )
