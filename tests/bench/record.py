"""Record: what a bench found, kept as dated lines that say on which machine, with which versions, under which load."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "deepspeed", "numpy", "numba")


def record(name: str, figures: dict, found: dict | None = None, folder: Path = RESULTS) -> Path:
    """Append a dated line with machine and versions to `folder`/`name`.jsonl; gives that file.

    figures: JSON values; they stand in the line under the key `figures`. found: `conditions` before the bench began,
    whose load is not the bench's own (None: those of now).
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    line = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "bench": name}
    text = json.dumps(line | (found or conditions()) | {"figures": figures}, allow_nan=False)
    with path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    return path


def conditions() -> dict:
    """Say under what conditions something is measured now: commit, machine, load and versions."""
    return {
        "commit": _commit(),
        "machine": {
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpus": _gpus(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "load": [round(value, 2) for value in os.getloadavg()],
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def caption(found: dict, **more: object) -> str:
    """Put conditions into one line for a table's caption. more: a bench's own, as in ranks=8, threads_per_rank=1."""
    machine, versions = found["machine"], found["versions"]
    own = [f"{key.replace('_', ' ')} {value}" for key, value in more.items()]
    gpus = [", ".join(machine["gpus"])] if machine["gpus"] else []
    built = [f"{name} {number}" for name, number in versions.items() if number]
    load = f"load average {found['load'][0]:.1f}"
    return ", ".join([f"{machine['cores']} cores ({machine['cpu']})", *gpus, *own, load, *built])


def _commit() -> str | None:
    """The commit that is measured, with a + where other files than results differ; None outside a repository."""
    commit = _git("describe", "--always", "--abbrev=10", "--exclude=*")
    changed = _git("status", "--porcelain", "--", ":/", f":(exclude,top){RESULTS.relative_to(RESULTS.parents[2])}")
    return f"{commit}+" if commit and changed else commit


def _git(*arguments: str) -> str | None:
    """What git says of this repository; None for nothing."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
