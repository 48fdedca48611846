"""Starting: train.py in processes forked from one that already has torch and DeepSpeed, so that it takes seconds.

The process that starts the ranks is forked from one that has imported everything, and its ranks from itself. All else
is as it is: torch's agent, sessions, signals, exit codes.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tests.train.worlds import fork

_CLONE_NEWNS = 0x00020000
_TICK_S = 0.02


class Forked:
    """A process of ours as `subprocess.Popen` would show it."""

    def __init__(self, process: multiprocessing.Process) -> None:
        self.process, self.pid = process, process.pid

    @classmethod
    def start(
        cls, program: str, arguments: list[str], environment: dict[str, str], told: Path, memory: Path | None = None
    ) -> Forked:
        """Run the main function of a module, which runs train.py's.

        told: where it speaks. memory: the folder that it sees as /dev/shm; None: as it is.
        """
        return cls(fork(_starter, program, arguments, environment, str(told), memory and str(memory)))

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode


class _Child:
    """A rank, as the agent that started it sees it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(_TICK_S)
        return self.returncode


def _starter(program: str, arguments: list[str], environment: dict[str, str], told: str, memory: str | None) -> None:
    import tests.train.forked  # noqa: F401

    # As in a fresh interpreter: what makes a semaphore takes its name away at once.
    multiprocessing.set_start_method("fork", force=True)
    handle = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)
    if memory is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", memory, "/dev/shm"], check=True)
    os.environ.clear()
    os.environ.update(environment)
    module = importlib.import_module(program)
    sys.argv = [module.__file__, *arguments]
    _fork_ranks(module)
    _run(module)


def _run(program: ModuleType) -> NoReturn:
    """Do what the interpreter does with train.py, and end as it would."""
    try:
        program.main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork_ranks(program: ModuleType) -> None:
    """Have torch's agent fork ranks where it would start an interpreter."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    def start(_: SubprocessHandler, arguments: tuple, environment: dict[str, str]) -> _Child:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return _Child(pid)
        _become_rank(program, [str(one) for one in arguments], environment)

    SubprocessHandler._popen = start


def _become_rank(program: ModuleType, command: list[str], environment: dict[str, str]) -> NoReturn:
    """In the fork: what a fresh interpreter would find."""
    from hydra.core.global_hydra import GlobalHydra

    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    logging.disable(logging.NOTSET)
    GlobalHydra.instance().clear()
    os.environ.clear()
    os.environ.update(environment)
    at = next(i for i, word in enumerate(command) if word == program.__file__)
    sys.argv = command[at:]
    _run(program)
