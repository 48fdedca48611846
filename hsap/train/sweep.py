"""The jobs of a sweep: each in fresh processes, one after the other, and one table at the end."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hsap.children import asks_to_end_with_us
from hsap.steps import METRICS, read_steps
from hsap.train import flags
from hsap.train.processes import without_launcher
from hsap.train.stopping import SIGNALS

_PASSED = (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)
"""Signals that a sweep hands to its job: it is over with that one."""


@dataclass(frozen=True, slots=True)
class Job:
    """A finished job and what its metrics say; None where the job never got so far. tokens_per_s: median over steps.

    asked: the first signal that came to the sweep meanwhile, 0 for none.
    """

    topology: str
    planner: str
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    exit_code: int
    asked: int = 0


def run_job(topology: str, planner: str, arguments: Sequence[str], out: Path) -> Job:
    """Run this very script once more with a job's arguments, wait for it, and read DIR/metrics.jsonl."""
    environment = {**without_launcher(os.environ), flags.OUT: str(out)}
    environment.pop("HYDRA_FULL_ERROR", None)
    code, asked = run_through([sys.executable, os.path.abspath(sys.argv[0]), *arguments], environment)
    steps = [*read_steps(out / METRICS)]

    def values(key: str) -> list[float]:
        return [step[key] for step in steps if isinstance(step.get(key), (int, float))]

    losses, evals, rates = values("loss"), values("eval_loss"), values("tokens_per_s")
    return Job(
        topology,
        planner,
        loss=losses[-1] if losses else None,
        eval_loss=evals[-1] if evals else None,
        tokens_per_s=statistics.median(rates) if rates else None,
        exit_code=code,
        asked=asked,
    )


def run_through(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, int]:
    """Run a command to its end and pass signals on to it, which then finishes its step and saves it: the exit code, as
    a shell spells it, and the first signal, 0 for none."""
    asked: list[int] = []
    job: subprocess.Popen | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if job is not None:
            job.send_signal(number)

    # One that is ignored, as by nohup, stays so, here and in the job.
    before = {number: signal.getsignal(number) for number in _PASSED}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, pass_on)
    try:
        # A session of its own: a terminal's Ctrl-C would reach it once by itself and once more from here. Where this
        # process is killed, the job is asked to end by SIGTERM all the same.
        started = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=asks_to_end_with_us())
        early, job = [*asked], started
        for number in early:
            started.send_signal(number)
        code = started.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code, asked[0] if asked else 0


def table(jobs: Sequence[Job]) -> str:
    """Lay the jobs out as one table of plain text."""
    rows = [("topology", "planner", "loss", "eval loss", "tokens/s", "exit code")]
    for job in jobs:
        loss, eval_loss = ("-" if v is None else f"{v:.4f}" for v in (job.loss, job.eval_loss))
        rate = "-" if job.tokens_per_s is None else f"{job.tokens_per_s:,.0f}"
        rows.append((job.topology, job.planner, loss, eval_loss, rate, str(job.exit_code)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def exit_code(jobs: Sequence[Job]) -> int:
    """Give the first failing job's exit code, 0 where none failed."""
    return next((job.exit_code for job in jobs if job.exit_code), 0)
