"""System: disk, memory and limits of this machine."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from hsap.doctor.report import FAILED, OK, WARNING, Line

_GIB = 1 << 30
DISK_BYTES, LITTLE_DISK_BYTES = _GIB, 20 * _GIB
"""Free space without which no run can be kept, and beneath which checkpoints may not fit: 16 bytes a parameter each."""
MEMORY_BYTES = 2 * _GIB
SHARED_BYTES = _GIB // 2
OPEN_FILES = 4096


def check_system(out: str) -> list[Line]:
    """Judge the disk that a run's folder would lie on, memory, shared memory and open files."""
    import psutil

    memory = psutil.virtual_memory()
    told = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    little = memory.available < MEMORY_BYTES
    lines = [
        disk(out),
        Line(
            "memory", WARNING if little else OK, told + (": a rank takes half a GiB before its model" if little else "")
        ),
    ]
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        told = f"{free / _GIB:.1f} GiB free in /dev/shm"
        advice = ": ranks of one machine talk through it; give the container more (docker: --shm-size, --ipc=host)"
        lines.append(
            Line("shared memory", OK if free >= SHARED_BYTES else WARNING, told + advice * (free < SHARED_BYTES))
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < min(OPEN_FILES, hard if hard > 0 else OPEN_FILES)
    told = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at a time"
    advice = f": connections to hundreds of ranks need more; ulimit -n {OPEN_FILES}"
    lines.append(Line("open files", WARNING if few else OK, told + (advice if few else "")))
    return lines


def disk(out: str) -> Line:
    """Judge the disk of a folder that is there or is to be made."""
    path = Path(out).absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Line(
            "disk", FAILED, f"{there} is no folder that can be written to; name another by --out (out= of train.py)"
        )
    free = shutil.disk_usage(there).free
    told = f"{free / _GIB:,.1f} GiB free at {there}"
    if free < DISK_BYTES:
        return Line("disk", FAILED, f"{told}: no checkpoint fits; make room, or name another folder by --out")
    if free < LITTLE_DISK_BYTES:
        return Line(
            "disk", WARNING, f"{told}: a checkpoint takes about 16 bytes a parameter, and train.keep of them stay"
        )
    return Line("disk", OK, told)
