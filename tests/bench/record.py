"""Record: results of benches as dated lines of JSON, with what they were measured on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
VERSIONS = ("torch", "numpy", "numba", "deepspeed")


def append(bench: str, result: dict, folder: Path | None = None) -> Path:
    """Append one line to <bench>.jsonl of the folder (None: results) and give its path.

    Date, commit, machine and versions come first, then the result's own keys.
    """
    folder = folder or FOLDER
    path = folder / f"{bench}.jsonl"
    line = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "commit": commit(), **machine(), **result}
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return path


def machine() -> dict:
    """What benches run on."""
    versions = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    return {"machine": {"cpu": _cpu(), "cores": cores, "load": load, "system": platform.system()}, "versions": versions}


def commit() -> str | None:
    """The commit that is measured, with a plus where the working tree differs from it; None outside a repository."""
    try:
        told = [
            subprocess.run(["git", *words], cwd=FOLDER.parent, capture_output=True, text=True, check=True).stdout
            for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return told[0].strip() + ("+" if told[1].strip() else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
