"""Processes: what the system knows of one, how it ended, and whether memory ran out."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

GONE = "gone"
"""State of a process that has ended, reaped or not."""


@dataclass(frozen=True, slots=True)
class Person:
    """Who a rank is.

    machine: equal on processes that see each other's numbers. born: when it began, in the kernel's ticks. path, index:
    where its position lies in shared memory.
    """

    host: str
    machine: str
    pid: int
    born: int
    path: str
    index: int

    @classmethod
    def here(cls, path: str, index: int) -> Person:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, born(pid), path, index)

    def to_json(self) -> dict:
        """As JSON values."""
        return asdict(self)

    def state(self) -> str:
        """The kernel's letter for what it does (R runs, S sleeps, D waits for a disk, T stopped), or GONE."""
        found = _stat(self.pid)
        if found is None or int(found[19]) != self.born or found[0] in "ZXx":
            return GONE
        return found[0]

    def kill(self) -> None:
        """End it at once, if it is still the same process."""
        if self.state() != GONE:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


def born(pid: int) -> int:
    """When a process began, in ticks since the machine did; 0 where that can't be known."""
    found = _stat(pid)
    return 0 if found is None else int(found[19])


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat behind the name, which may hold anything; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _machine() -> str:
    """The running kernel and the namespace of process numbers; the host's name where there are no such."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def oom_kills() -> int:
    """How many processes the kernel has killed in our control group because its memory ran out; 0 if it doesn't say."""
    with suppress(OSError, ValueError):
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        # Of version 2 the line is 0::/PATH, of version 1 N:memory:/PATH; in a container the path may be the host's.
        of_two = [path for number, names, path in (line.split(":", 2) for line in groups) if number == "0"]
        of_one = [path for _, names, path in (line.split(":", 2) for line in groups) if names == "memory"]
        candidates = [f"/sys/fs/cgroup/memory{path}/memory.oom_control" for path in (*of_one, "")]
        candidates += [f"/sys/fs/cgroup{path}/memory.events" for path in (*of_two, "")]
        for path in map(Path, candidates):
            if path.is_file():
                lines = dict(line.split()[:2] for line in path.read_text(encoding="utf-8").splitlines())
                return int(lines.get("oom_kill", 0))
    return 0


def ending(number: int, kills: int) -> str:
    """Say which signal ended a process. kills: how many the kernel's out-of-memory killer has ended since the start."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = str(number)
    if number != signal.SIGKILL:
        return f"was ended by signal {name}"
    if kills > 0:
        return f"was ended by signal {name}: memory ran out, and the kernel's out-of-memory killer ended {kills} here"
    return f"was ended by signal {name}, which is what the kernel's out-of-memory killer sends (dmesg tells), or a user"
