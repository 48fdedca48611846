"""Settings of the guard: what is looked at in every step, and what is done then."""

from __future__ import annotations

from dataclasses import dataclass

from hsap.keys import choice, integer, number


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """What is done where a loss or a gradient isn't finite, or leaps, and where ranks hang or end.

    non_finite, on_spike: stop ends the run; skip leaves the update out on all ranks; dump writes the step down, to be
    replayed, and ends the run; warn says so and goes on. spike: how many deviations above the median of the last
    `spike_window` steps the loss, or the logarithm of the gradient's norm, may lie; None: isn't looked at. max_skips:
    so many updates in a row may be left out; one more ends the run.

    timeout_s: nobody may move for so long, start_timeout_s: until the first step is through; None: for ever. report_s:
    a rank that waits so long is told of. restarts: how often ranks that HSAP starts go on after a failure.
    """

    non_finite: str = choice("stop", "skip", "dump", default="stop")
    spike: float | None = number("a number above 0, like 6", lambda v: v > 0, optional=True, default=None)
    on_spike: str = choice("warn", "stop", "skip", "dump", default="warn")
    spike_window: int = integer(8, default=128)
    max_skips: int = integer(1, default=5)

    timeout_s: float | None = number(
        "a number of at least 1, of seconds", lambda v: v >= 1, optional=True, default=600.0
    )
    start_timeout_s: float | None = number(
        "a number of at least 1, of seconds", lambda v: v >= 1, optional=True, default=1800.0
    )
    report_s: float = number("a number above 0, of seconds", lambda v: v > 0, default=60.0)
    restarts: int = integer(0, default=0)

    @property
    def dumps(self) -> bool:
        """Whether anything makes the run write a step down."""
        return "dump" in (self.non_finite, self.on_spike)


def check_guard(guard: GuardConfig, parallel: str) -> None:
    """Refuse, by ValueError, settings that do nothing together, or what isn't there."""
    if guard.spike is None and guard.on_spike != "warn":
        raise ValueError(
            f"guard.on_spike={guard.on_spike} with guard.spike=null does nothing: no leap is looked for; set "
            "guard.spike too, as in guard.spike=6, or leave guard.on_spike out"
        )
    if guard.dumps and parallel == "tsp":
        raise ValueError(
            "guard.non_finite=dump or guard.on_spike=dump with parallel=tsp: a step whose weights are sharded with its "
            "tokens can't be replayed; set stop or skip there, or parallel=sp"
        )
