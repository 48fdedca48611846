"""The jobs of a sweep: each in fresh processes, one after the other, and one table at the end."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hsap.steps import METRICS, read_steps
from hsap.train import flags
from hsap.train.processes import without_launcher


@dataclass(frozen=True, slots=True)
class Job:
    """A finished job and what its metrics say; None where the job never got so far. tokens_per_s: median over steps."""

    topology: str
    planner: str
    loss: float | None
    eval_loss: float | None
    tokens_per_s: float | None
    exit_code: int


def run_job(topology: str, planner: str, arguments: Sequence[str], out: Path) -> Job:
    """Run this very script once more with a job's arguments, wait for it, and read DIR/metrics.jsonl."""
    environment = {**without_launcher(os.environ), flags.OUT: str(out)}
    environment.pop("HYDRA_FULL_ERROR", None)
    done = subprocess.run([sys.executable, os.path.abspath(sys.argv[0]), *arguments], env=environment, check=False)
    # A process ended by a signal has a negative code here; a shell's spelling keeps it between 1 and 255.
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
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
    )


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
