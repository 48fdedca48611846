"""Stopping on a signal: the step is finished and saved first.

A signal may reach every rank, one of them, or only the launcher. A rank only notes it; the note travels with the step's
figures, so that all ranks stop after the same step. Ranks that HSAP starts are sent it by the process that started
them. torchrun and deepspeed send it on as well, kill ranks that are still there after 30 s, and end with an exit code
of their own; a signal to one of the ranks has neither limit.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, SIGTERM and SIGINT are noted instead of ending the process; a second SIGINT ends it at once.

    asked_by: the first signal that came to this rank; agreed: one that came to some rank, since the figures of a step
    told all of it. None if none has.
    """

    def __init__(self) -> None:
        self.asked_by: signal.Signals | None = None
        self.agreed: signal.Signals | None = None
        self._interrupts = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # A launcher that ends ranks because one has failed sends SIGTERM too: what a rank then finds broken is no news.
        if isinstance(error, RuntimeError) and self.asked_by == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked_by = self.asked_by or signal.Signals(number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
