"""Found: what a search gives: priced ways of running a job, and why the others aren't among them."""

from __future__ import annotations

from dataclasses import dataclass

from hsap.tune.choices import Refusals
from hsap.tune.job import Job
from hsap.tune.setting import Setting


@dataclass(frozen=True, slots=True)
class Row:
    """One way of running the job, priced.

    step_s, tokens_per_s of the whole job; tflops a rank. memory: bytes of the fullest rank by item. clock: priced by
    the event clock. others: what the next best planner of this shape takes, (name, seconds), None without one.
    """

    setting: Setting
    step_s: float
    tokens_per_s: float
    tflops: float
    attention_s: float
    memory: dict[str, float]
    arena_multiple: float
    clock: bool = False
    others: tuple[str, float] | None = None

    @property
    def needs_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return sum(self.memory.values())


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a search: rows from fast to slow, what fell out and why, and how many shapes were bounded away."""

    job: Job
    rows: list[Row]
    refusals: Refusals
    bounded: int
