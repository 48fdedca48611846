"""Profile: measured timelines of some steps, written into the run's folder for `hsap view`.

Every rank writes timeline-rank{r}.jsonl, a line for each execution of a stream, and the first rank of each SP group the
plans that were run; `hsap.view.measured` says what a line holds. All times are of the clock of the group's first rank,
so `host` is left out; `clock_offset_s` was added to get there, and `clock_error_s` is what it may be wrong by. They are
measured as the profile starts. Lines are written between steps, outside what a step is timed by.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hsap.ir.schedule import DIRECTIONS
from hsap.runtime.clocks import ClockOffset, clock_offset
from hsap.runtime.executor import Session
from hsap.runtime.record import Record, Recorder
from hsap.train.groups import ProfileConfig
from hsap.train.metrics import truncate
from hsap.train.told import written


class Profile:
    """One rank's recorder and what it writes.

    rank: of the job. group: index of the SP group. What an earlier run left beyond `resumed_step` is cut off.
    """

    def __init__(
        self, config: ProfileConfig, out: Path, session: Session, rank: int, group: int, resumed_step: int
    ) -> None:
        self.config, self.out, self.session, self.group = config, out, session, group
        self.path = out / f"timeline-rank{rank}.jsonl"
        with written(self.path):
            truncate(self.path, resumed_step)
        self._clock: ClockOffset | None = None
        self._recorder: Recorder | None = None

    def begin(self, step: int) -> None:
        """Record the step if it is wanted. Collective over the SP group."""
        if self.config.steps is None or not self.config.steps[0] <= step < self.config.steps[1]:
            return
        session = self.session
        if self._recorder is None:
            with written(self.path):
                self.out.mkdir(parents=True, exist_ok=True)
            self._recorder = Recorder(session.device, self.config.layers)
            self._clock = clock_offset(session.transport, session.rank, session.num_ranks, session.device)
        session.recorder = self._recorder

    def end(self, step: int, plans: Sequence[Any]) -> None:
        """Write what was recorded of the step."""
        recorder, self.session.recorder = self.session.recorder, None
        if recorder is None:
            return
        with written(self.path), self.path.open("a", encoding="utf-8") as file:
            for record in recorder.take():
                file.write(json.dumps(self._line(step, record)) + "\n")
        if self.session.rank == 0:
            for plan in plans:
                path = self.out / f"plan-{plan.hash[:16]}.plan"
                if not path.exists():
                    with written(path):
                        plan.save(path)

    def _line(self, step: int, record: Record) -> dict:
        clock = self._clock
        assert clock is not None, "a recorder comes with its clock"
        start_s, end_s = (np.round(times + clock.offset_ns / 1e9, 9).tolist() for times in record.times_s())
        return {
            "plan": record.plan.hash,
            "group": self.group,
            "rank": self.session.rank,
            "step": step,
            "micro": record.micro,
            "layer": record.layer,
            "mask": record.mask,
            "direction": DIRECTIONS[record.direction],
            "clock_offset_s": clock.offset_ns / 1e9,
            "clock_error_s": clock.error_ns / 1e9,
            "start_s": start_s,
            "end_s": end_s,
        }
