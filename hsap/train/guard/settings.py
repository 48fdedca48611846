"""Settings of the guard: what is looked at in every step, and what is done then."""

from __future__ import annotations

from dataclasses import dataclass

from hsap.keys import integer, number


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """What is done where ranks hang or end.

    timeout_s: nobody may move for so long, start_timeout_s: until the first step is through; None: for ever. report_s:
    a rank that waits so long is told of. restarts: how often ranks that HSAP starts go on after a failure.
    """

    timeout_s: float | None = number(
        "a number of at least 1, of seconds", lambda v: v >= 1, optional=True, default=600.0
    )
    start_timeout_s: float | None = number(
        "a number of at least 1, of seconds", lambda v: v >= 1, optional=True, default=1800.0
    )
    report_s: float = number("a number above 0, of seconds", lambda v: v > 0, default=60.0)
    restarts: int = integer(0, default=0)
