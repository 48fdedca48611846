"""Clock: seconds of work that a device does while the host goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

from tests.gpu.single import finish

WARM_RUNS = 3


def median_seconds(steps: Sequence[Callable], device: str, runs: int) -> list[float]:
    """Median seconds of steps that follow each other, each given what the one before it gave."""
    times: list[list[float]] = [[] for _ in steps]
    for run in range(WARM_RUNS + runs):
        given = ()
        for step, spent in zip(steps, times):
            finish(device)
            start = time.perf_counter()
            given = (step(*given),)
            finish(device)
            if run >= WARM_RUNS:
                spent.append(time.perf_counter() - start)
    return [median(spent) for spent in times]
