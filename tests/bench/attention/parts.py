"""Parts: where a rank's CPU time goes, measured on the steps of a decoded stream."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace

from hsap.runtime.decode import Step
from hsap.runtime.machine import BACKWARD, FORWARD, Machine

PARTS = {
    "attend": "kernel",
    "attend_grad": "kernel",
    "merge": "fold",
    "sum": "fold",
    "copy": "fold",
    "empty": "fold",
    "launch": "launch",
    "wait": "wait",
    "all_to_all": "all_to_all",
}
"""What a step counts as, by the name of its instruction: `Decoded.names`."""


def watch(machine: Machine) -> dict[str, float]:
    """Make a machine's steps count their thread's CPU seconds; gives the sums by part, which grow as it runs.

    A step's seconds are all that it does on its own thread, the interpreter's few microseconds included.
    """
    spent: dict[str, float] = defaultdict(float)
    for direction in (FORWARD, BACKWARD):
        decoded = machine.decode(0, direction)
        steps = tuple(_timed(step, part_of(name), spent) for step, name in zip(decoded.steps, decoded.names))
        machine.decoded[0, direction] = replace(decoded, steps=steps)
    return spent


def part_of(name: str) -> str:
    """The part that a step counts as, from its name in `Decoded.names`."""
    words = name.split()
    return PARTS[words[1] if len(words) > 1 else words[0]]


def _timed(step: Step, part: str, spent: dict[str, float]) -> Step:
    def timed(views, transport):
        start = time.thread_time()
        done = step(views, transport)
        spent[part] += time.thread_time() - start
        return done

    return timed
