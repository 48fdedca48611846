"""Cases: every kind of fault at every moment where it can strike, and what must be said of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

TIMEOUT_S, START_TIMEOUT_S, LONG_S = 8.0, 40.0, 240.0
"""`guard.timeout_s` of the runs: how long no rank may move; `guard.start_timeout_s`, where tried, and elsewhere."""
ENDED_S, HUNG_S = 45.0, TIMEOUT_S + 45.0
"""Within these all must have ended, from the fault on: where a rank has ended, and where the others must find out."""
STEP, NUM_STEPS, SAVE_EVERY, EVAL_EVERY = 5, 14, 2, 3
"""The step from which on faults strike; the newest checkpoint is of the step before."""
AHEAD, AHEAD_STEP = ("loading", "planning"), 3
"""Moments of steps to come, up to eight ahead, and the step from which on they are struck."""
RANK = 2
NOT_YET = ("start", "reading", "joining")
"""Moments before the first step: these runs go on from a checkpoint, and go on again."""

EVERYWHERE = (
    *NOT_YET,
    *("loading", "planning", "forward", "all_to_all", "backward", "optimizer", "writing", "publishing", "evaluating"),
)
IN_BACKGROUND = ("train.save_in_background=true",)
ON_RANK_0 = ("publishing", "logging")
WORDS = {
    "start": "start-up",
    "reading": "start-up: reading data",
    "joining": "start-up: rendezvous",
    "loading": "data loading",
    "all_to_all": "all-to-all",
    "optimizer": "optimizer step",
    "writing": "checkpoint: a rank's file",
    "publishing": "checkpoint: making it the newest",
    "logging": "metrics",
    "evaluating": "evaluation",
}
KINDS = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP",
    "raise": "exception",
    "slow": "too slow",
    "late": "slow, within the limit",
    "disk": "full disk",
    "cut": "lost connection",
    "memory": "out of memory",
    "diverge": "other batch or plan",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A fault to be made. survives: the run must go on and end well. settings: more of train.py's."""

    kind: str
    moment: str
    rank: int = RANK
    survives: bool = False
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """A name for its folder."""
        return re.sub(r"\W+", "-", "-".join([self.kind, self.moment, *self.settings]))

    @property
    def where(self) -> str:
        """The moment in words."""
        return WORDS.get(self.moment, self.moment) + (f" ({', '.join(self.settings)})" if self.settings else "")

    @property
    def limit_s(self) -> float:
        if self.kind not in ("stop", "slow", "cut"):
            return ENDED_S
        return HUNG_S + (START_TIMEOUT_S if self.moment in NOT_YET else 0)

    @property
    def fault(self) -> dict:
        """What `inject.Fault` takes, but for the folder."""
        out = {"kind": self.kind, "moment": self.moment, "rank": self.rank}
        out["step"] = 0 if self.moment in NOT_YET else AHEAD_STEP if self.moment in AHEAD else STEP
        if self.moment == "all_to_all":
            out |= {"moment": "forward", "op": "all_to_all"}
        elif self.moment == "backward":
            out["op"] = "attend_grad"
        if self.kind == "late":
            out["seconds"] = TIMEOUT_S / 4
        return out

    @property
    def start_timeout_s(self) -> float:
        return START_TIMEOUT_S if self.moment in NOT_YET else LONG_S

    @property
    def saved(self) -> int:
        """The step whose checkpoint there must be."""
        if self.survives:
            return NUM_STEPS
        # In the background the checkpoint before may be the one that is struck.
        behind = SAVE_EVERY if self.settings == IN_BACKGROUND else 0
        return (AHEAD_STEP if self.moment in AHEAD else STEP) - 1 - behind

    @property
    def message(self) -> str:
        """A regular expression that the one message must match."""
        return _MESSAGES[self.kind](self)


def _hang(case: Case) -> str:
    if case.moment in NOT_YET:
        return rf"\d+ s .*(haven't come: {case.rank};|At fault: rank {case.rank} \(pid)"
    others = r"ranks? \d[\d, andto]* (each )?(waits|is) (at #\d+ \w+|for|in|at|\w+)"
    return rf"no rank has moved for \d+ s .*At fault: rank {case.rank} \(pid \d+.*; .*{others}"


def _ended(case: Case) -> str:
    """By who started the ranks, or by another rank, and where it was."""
    where = (
        "" if case.moment in NOT_YET else r".*(was|seen) (at|in|writing|waiting|between|comparing|computing|summing)\b"
    )
    return rf"rank {case.rank} (was ended by signal SIGKILL|\(pid \d+.*has ended without a word){where}"


_MESSAGES = {
    "kill": lambda case: _ended(case),
    "memory": lambda case: "(?=.*memory)" + _ended(case),
    "stop": _hang,
    "slow": _hang,
    "cut": lambda case: r"(no rank has moved for \d+ s .*ranks? \d+|haven't come: \d)",
    "raise": lambda case: (rf"rank {case.rank}\b.*" if case.rank else "") + "a bug that the bench has put here",
    "disk": lambda case: r"(No space left on device|File too large|Disk full)",
    "diverge": lambda case: r"don't hold the same: .*rank",
    "late": lambda case: "",
}


def _of_kind(kind: str, moments: tuple[str, ...]) -> list[Case]:
    return [Case(kind, moment, 0 if moment in ON_RANK_0 else RANK) for moment in moments]


CASES = (
    *_of_kind("kill", EVERYWHERE),
    *_of_kind("stop", EVERYWHERE),
    *_of_kind("raise", EVERYWHERE[1:]),  # before train.py's own code there is none to raise
    *_of_kind("slow", ("joining", "loading", "planning", "forward", "backward", "optimizer", "writing", "evaluating")),
    *_of_kind("cut", ("joining", "planning", "forward", "backward", "optimizer", "writing", "evaluating")),
    *_of_kind("memory", ("reading", "planning", "forward", "optimizer", "writing")),
    *_of_kind("disk", ("reading", "writing", "publishing", "logging")),
    Case("disk", "writing", settings=IN_BACKGROUND),
    Case("kill", "writing", settings=IN_BACKGROUND),
    *_of_kind("diverge", ("loading", "planning", "evaluating")),
    Case("late", "forward", survives=True),
    Case("late", "planning", survives=True),
    Case("kill", "forward", survives=True, settings=("guard.restarts=1",)),
    Case("stop", "backward", survives=True, settings=("guard.restarts=1",)),
)
QUICK = (Case("kill", "forward"), Case("stop", "backward"))
