"""Record: when each instruction of a rank's streams began and ended.

A step ends where the next begins, so a clock is read once a step, into memory that is there before the stream starts.
On CPUs that is the host's monotonic clock (0.2 µs a reading). On GPUs it is an event on the current stream, read when
the records are taken: what counts there is when the device came to an instruction, not when the host launched it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hsap.ir.plan import Plan

FIRST_CAPACITY = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One execution of one rank's stream.

    step_of: int64 [steps], the instruction that each step belongs to, in stream order. clock_ns: int64 [steps + 1],
    when each step began, and when the last one ended; nanoseconds of the host's monotonic clock.
    """

    plan: Plan
    rank: int
    mask: int
    direction: int
    layer: int
    micro: int
    step_of: np.ndarray
    clock_ns: np.ndarray

    def times_s(self) -> tuple[np.ndarray, np.ndarray]:
        """When each instruction of the stream began and ended: float64 [instructions] each, seconds.

        A Send or Recv takes no time of its own: it is part of its Launch.
        """
        lo, hi = self.plan.programs[self.mask][self.direction].offsets[self.rank : self.rank + 2]
        instruction = np.arange(hi - lo)
        first = np.searchsorted(self.step_of, instruction, side="left")
        after = np.searchsorted(self.step_of, instruction, side="right")
        return self.clock_ns[first] / 1e9, self.clock_ns[after] / 1e9


class Recorder:
    """Records the layers wanted (None: all) of what runs while a session has it. micro: what is run next."""

    def __init__(self, device: torch.device | str = "cpu", layers: Collection[int] | None = None) -> None:
        self.layers, self.micro = layers, 0
        self.clock: _Clock = _DeviceClock() if torch.device(device).type == "cuda" else _HostClock()
        self._begun: list[tuple[Any, ...]] = []

    def begin(
        self, plan: Plan, rank: int, mask: int, direction: int, layer: int, step_of: np.ndarray
    ) -> Callable[[], None] | None:
        """Begin a stream: gives what to call after every step; None where the layer isn't wanted."""
        if self.layers is not None and layer not in self.layers:
            return None
        first = self.clock.reserve(len(step_of) + 1)
        self._begun.append((first, plan, rank, mask, direction, layer, self.micro, step_of))
        self.clock.mark()
        return self.clock.mark

    def take(self) -> list[Record]:
        """Give what was recorded since, and forget it. Waits for the device."""
        clock_ns = self.clock.take()
        taken = [
            Record(plan, rank, mask, direction, layer, micro, step_of, clock_ns[first : first + len(step_of) + 1])
            for first, plan, rank, mask, direction, layer, micro, step_of in self._begun
        ]
        self._begun = []
        return taken


class _Clock(Protocol):
    def reserve(self, count: int) -> int:
        """Have room for so many readings more; gives the place of the first."""
        ...

    def mark(self) -> None:
        """Read the clock."""
        ...

    def take(self) -> np.ndarray:
        """All readings, int64 nanoseconds; forgets them."""
        ...


class _HostClock:
    def __init__(self) -> None:
        self.readings, self.used = array("q", bytes(8 * FIRST_CAPACITY)), 0

    def reserve(self, count: int) -> int:
        while self.used + count > len(self.readings):
            self.readings.extend(self.readings)
        return self.used

    def mark(self) -> None:
        self.readings[self.used] = time.perf_counter_ns()
        self.used += 1

    def take(self) -> np.ndarray:
        taken = np.array(self.readings[: self.used], np.int64)
        self.used = 0
        return taken


class _DeviceClock:
    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.used = 0
        self._start()

    def reserve(self, count: int) -> int:
        short = max(self.used + count, FIRST_CAPACITY) - len(self.events)
        self.events += [torch.cuda.Event(enable_timing=True) for _ in range(short)]
        return self.used

    def mark(self) -> None:
        self.events[self.used].record()
        self.used += 1

    def take(self) -> np.ndarray:
        torch.cuda.synchronize()
        ms = [self.base.elapsed_time(event) for event in self.events[: self.used]]
        taken = self.base_ns + np.rint(np.array(ms, np.float64) * 1e6).astype(np.int64)
        # Anew each time: a float32 of milliseconds tells microseconds apart for some seconds only.
        self._start()
        return taken

    def _start(self) -> None:
        """Read both clocks at one moment."""
        torch.cuda.synchronize()
        self.base = torch.cuda.Event(enable_timing=True)
        self.base.record()
        self.base.synchronize()
        self.base_ns, self.used = time.perf_counter_ns(), 0
