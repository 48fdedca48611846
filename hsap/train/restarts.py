"""Restarts: ranks that a launcher starts again go on by themselves, from the newest good checkpoint of that job.

Only a job that is itself a restart goes on unasked, and only in the folder that its own earlier attempt has marked: a
first start never takes up another run's checkpoints. torchrun tells by TORCHELASTIC_RESTART_COUNT (`--max-restarts`),
SLURM by SLURM_RESTART_COUNT (`scontrol requeue`), HSAP by HSAP_RESTARTS (guard.restarts).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hsap.files import replace
from hsap.train import flags
from hsap.train.checkpoints.folder import CHECKPOINTS, LATEST, newest_good
from hsap.train.hang.processes import born
from hsap.train.told import written

MARK = "launched.json"
"""In the folder of a run: which job has written there."""


def is_restart(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started these ranks before."""
    return any(_count(environment, name) > 0 for name in (flags.RESTARTS, *_COUNTS))


def mark(out: str, environment: Mapping[str, str]) -> None:
    """Note which job writes to a run's folder; ValueError where that can't be written to."""
    path = Path(out) / MARK
    with written(path):
        replace(path, json.dumps(_job(environment)).encode())


def is_marked(out: str | Path, environment: Mapping[str, str]) -> bool:
    """Whether an earlier attempt of this very job has written to a folder."""
    try:
        was = json.loads((Path(out) / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    now = _job(environment)
    keys = [key for name, key in _COUNTS.items() if _count(environment, name) > 0]
    return isinstance(was, dict) and any(was.get(key) == now[key] for key in keys if now[key])


def earlier_out(environment: Mapping[str, str]) -> str | None:
    """The folder that an earlier attempt of this job has made for itself; None where there is none."""
    if not any(_count(environment, name) > 0 for name in _COUNTS):
        return None
    marked = [path.parent for path in Path("outputs").glob(f"*/{MARK}") if is_marked(path.parent, environment)]
    return str(max(marked, key=lambda path: (path / MARK).stat().st_mtime)) if marked else None


def go_on(out: str) -> bool:
    """Have `latest` name the newest good checkpoint of a run; False where there is none, and the run begins anew.

    ValueError where it can't be written.
    """
    home = Path(out) / CHECKPOINTS
    step = newest_good(home)
    if step is None:
        told = "no checkpoint is good, or there: the run begins anew"
    else:
        told = f"the run goes on from the checkpoint of step {step}"
        with suppress(OSError):
            named = (home / LATEST).read_text(encoding="utf-8", errors="replace").strip()
            if named != f"step{step}":
                told += f" ({named} is damaged)"
        with written(home / LATEST):
            replace(home / LATEST, f"step{step}".encode())
    print(f"hsap: restarted: {told}", file=sys.stderr, flush=True)
    return step is not None


_COUNTS = {"TORCHELASTIC_RESTART_COUNT": "launcher", "SLURM_RESTART_COUNT": "slurm"}
"""What tells of restarts, and what of a job stays the same then."""


def _count(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment.get(name, "0"))
    except ValueError:
        return 0


def _job(environment: Mapping[str, str]) -> dict[str, str]:
    """What tells this job from others. launcher: the process above, which torch's agent stays through its restarts."""
    parent = os.getppid()
    launcher = f"{environment.get('TORCHELASTIC_RUN_ID', '')}/{socket.gethostname()}/{parent}/{born(parent)}"
    return {"launcher": launcher, "slurm": environment.get("SLURM_JOB_ID", "")}
