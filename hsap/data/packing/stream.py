"""The stream of steps: windows one after the other, epoch after epoch, `packs_per_step` packs at a time."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from hsap.data.packing.long import count_long
from hsap.data.packing.packs import Pack, StepPacks
from hsap.data.packing.settings import Packing
from hsap.data.packing.windows import Place, Windows
from hsap.ir.check import Refused, instance, shown, whole
from hsap.ir.slice import UNBOUNDED

MAX_SOUGHT_EPOCHS = 1 << 12
"""Epochs that `seek` packs at most; beyond, a start step is a slip of the pen and not worth hours."""


def epoch_packs(
    lengths: Sequence[int] | np.ndarray,
    packing: Packing,
    seed: int,
    epoch: int,
    packs_per_step: int = 1,
    uncut: np.ndarray | None = None,
) -> list[Pack]:
    """Pack all documents once, in the order of this seed and epoch, as the first stage has them."""
    windows = Windows(*_checked(lengths, uncut, packing), packing, packs_per_step, seed)
    packs: list[Pack] = []
    place = Place(epoch=epoch)
    while place.epoch == epoch:
        window = windows.at(place)
        packs += window.packs.taken(0, len(window.packs))
        place = windows.following(place, window)
    return packs


class PackStream:
    """The endless stream of steps' packs; `next` gives `StepPacks`.

    lengths: tokens of each document [num_documents]. uncut: bool [num_documents], documents that may not be cut; None:
    all may. Errors (ValueError): settings out of range; no document with a token, or none that a stage doesn't drop.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        packing: Packing,
        packs_per_step: int,
        seed: int = 0,
        uncut: np.ndarray | None = None,
    ) -> None:
        self.packing = packing
        self.packs_per_step = whole("train.packs_per_step", packs_per_step)
        self.seed = whole("train.seed", seed, 0, UNBOUNDED)
        self.lengths, self.uncut = _checked(lengths, uncut, packing)
        self._windows = Windows(self.lengths, self.uncut, packing, self.packs_per_step, self.seed)
        self._go_to(0, Place())

    def __iter__(self) -> Iterator[StepPacks]:
        return self

    def __next__(self) -> StepPacks:
        packs: list[Pack] = []
        epoch = self._next_step(packs)
        return StepPacks(self._step, epoch, tuple(packs), self.packing.stages[self._place.stage][1])

    def seek(self, step: int) -> None:
        """Go to where the next step is `step` (from 1); packs every epoch before it, unlike `load_state_dict`."""
        step = whole("start step", step)
        # Every step but an epoch's last has a pack, and every pack a piece.
        shortest = min(tokens for _, tokens in self.packing.stages)
        most = MAX_SOUGHT_EPOCHS * (len(self.lengths) + int(self.lengths.sum()) // shortest)
        self._go_to(0, Place())
        while self._step < step - 1:
            if step > most or self._place.epoch >= MAX_SOUGHT_EPOCHS:
                raise ValueError(
                    f"start step {step} lies more than {MAX_SOUGHT_EPOCHS} epochs ahead, and each is packed on the "
                    "way; check the step, or resume from a checkpoint's cursor"
                )
            self._next_step(None)

    def state_dict(self) -> dict[str, object]:
        """Say where the stream stands after the last step given, and what it was made from; all of it fits JSON."""
        state = {"step": self._step, "place": _to_json(self._place), **self._identity()}
        return {**state, "crc32": _crc32(state)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on after the step that `state` was taken at; only the window it lies in is packed again.

        Errors (ValueError): a state of other data or settings, with what differs: its packs would be others; a damaged
        one.
        """
        instance("the data cursor", state, dict, "what a checkpoint keeps of the data stream")
        mine = self._identity()
        missing = [name for name in ("step", "place", *mine, "crc32") if name not in state]
        if missing:
            raise Refused(f"the data cursor lacks {', '.join(missing)}; it is not one of this version's checkpoints")
        # What a list and a tuple have in common counts.
        differs = [f"{name} was {state[name]}, now {now}" for name, now in mine.items() if state[name] != now]
        if differs:
            raise Refused(
                f"the data cursor belongs to another run: {'; '.join(differs)}; documents would be lost or seen twice, "
                f"so resume with the same data, tokenizer, seed and packing"
            )
        step = whole("the data cursor's step", state["step"], 0)
        if state["crc32"] != _crc32({name: state[name] for name in ("step", "place", *mine)}):
            raise Refused(
                f"the data cursor, of step {step}, doesn't have the checksum that it had when it was written; the "
                "checkpoint is damaged, so resume from another"
            )
        self._go_to(step, _from_json(state["place"]))

    def _go_to(self, step: int, place: Place) -> None:
        self._step, self._place = step, place
        self._window = self._windows.at(place)

    def _next_step(self, packs: list[Pack] | None) -> int:
        """Go over a step, appending its packs to `packs` unless that is None; gives its epoch."""
        self._skip_finished()
        self._enter(self.packing.stage(self._step + 1))
        epoch = self._place.epoch
        due = self.packs_per_step
        while due:
            self._skip_finished()
            first = self._place.pack
            last = min(first + due, len(self._window.packs))
            if packs is not None:
                packs += self._window.packs.taken(first, last)
            self._place = self._place._replace(pack=last)
            due -= last - first
        self._step += 1
        return epoch

    def _enter(self, stage: int) -> None:
        """Go on with packs of that stage's length."""
        place = self._place
        if stage != place.stage:
            untouched = place._replace(stage=stage)
            begun = Place(stage, place.epoch, before=(*place.before, place[:-1]))
            self._go_to(self._step, begun if place.pack else untouched)
            self._skip_finished()

    def _skip_finished(self) -> None:
        while self._place.pack >= len(self._window.packs):
            self._go_to(self._step, self._windows.following(self._place, self._window))

    def _identity(self) -> dict[str, object]:
        settings = asdict(self.packing) | {"curriculum": [list(stage) for stage in self.packing.curriculum]}
        uncut = b"" if self.uncut is None else np.packbits(self.uncut).tobytes()
        return {
            "seed": self.seed,
            "packs_per_step": self.packs_per_step,
            **settings,
            "num_documents": len(self.lengths),
            "num_tokens": int(self.lengths.sum()),
            "lengths_crc32": zlib.crc32(uncut, zlib.crc32(self.lengths.astype("<i8").tobytes())),
        }


def _checked(
    lengths: Sequence[int] | np.ndarray, uncut: np.ndarray | None, packing: Packing
) -> tuple[np.ndarray, np.ndarray | None]:
    lengths = np.asarray(lengths, dtype=np.int64)
    uncut = None if uncut is None else np.asarray(uncut, dtype=bool)
    assert uncut is None or uncut.shape == lengths.shape
    count_long(lengths, uncut, packing)
    return lengths, uncut


def _to_json(place: Place) -> list[Any]:
    return [*place[:-1], [list(one) for one in place.before]]


def _from_json(place: Any) -> Place:
    try:
        *here, before = place
        places: list[Any] = [tuple(whole("place", value, 0) for value in one) for one in (here, *before)]
    except (TypeError, ValueError):
        places = []
    if not places or any(len(one) != len(Place._fields) - 1 for one in places):
        raise Refused(f"the data cursor's place is {shown(place)}; the checkpoint is of another version of hsap")
    stage, epoch, first, offset, pack = places[0]
    return Place(stage, epoch, first, offset, pack, tuple(places[1:]))


def _crc32(state: dict[str, object]) -> int:
    try:
        return zlib.crc32(json.dumps(state, sort_keys=True).encode())
    except (TypeError, ValueError):
        return -1
