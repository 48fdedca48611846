"""Pool: the processes of one rank that plan for it, so that planning doesn't take turns with training's Python.

They are fresh interpreters, never forks of a process in which torch has threads. Each is looked after by a thread here,
which sends it a shape, waits for the outcome, and replaces it if it dies.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from hsap.planning.compiling import PlanningSetup, Shape, failure

# Ctrl-C and SIGTERM go to all processes of a job; what the rank does about them may still need plans.
_PROGRAM = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.path[:] = json.loads(sys.argv[2]); "
    "from hsap.planning.worker import serve; serve(int(sys.argv[1]))"
)
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"),
    "1",
)
_GRACE_S = 5.0
"""Between the end of a worker's pipe and its own."""
CLOSED = "planning ends: the run does"
"""What whoever still waits for a plan is told."""


class Worker:
    """One planning process. Errors (`Died`): it ended, with how."""

    def __init__(self, setup: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            command = [sys.executable, "-c", _PROGRAM, str(end), json.dumps(sys.path)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(end,), env={**os.environ, **_ONE_THREAD}
            )
        self._connection = Connection(ours.detach())
        self._setup: bytes | None = setup

    def ask(self, shape: Shape) -> bytes:
        """Give the outcome of planning a shape."""
        try:
            if self._setup is not None:
                self._connection.send_bytes(self._setup)
                self._setup = None
            self._connection.send_bytes(shape.to_bytes())
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            try:
                code = self.process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:  # its end of the pipe is gone, or what came through it was no answer
                self.kill()
                raise Died("could no longer be talked to") from None
            raise Died(_ending(code)) from None

    def kill(self) -> None:
        """End it at once: it holds nothing that could be lost."""
        self.process.kill()
        self.process.wait()


class Died(Exception):
    """A worker ended by itself, or was ended from outside."""


class PlanPool:
    """`num_workers` processes that plan for one rank, several shapes at a time.

    A worker that dies is replaced, which is said on stderr; if planning the same shape ends the next one too, that is
    the outcome. `close` ends all workers at once. If it never comes to that, they end with this process.
    """

    def __init__(self, setup: PlanningSetup, num_workers: int) -> None:
        self._setup = setup.to_bytes()
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._workers = [Worker(self._setup) for _ in range(num_workers)]
        self._threads = [
            threading.Thread(target=self._look_after, args=(i,), name=f"hsap-planning-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Process numbers of the workers."""
        return [worker.process.pid for worker in self._workers]

    def submit(self, shape: Shape, then: Callable[[bytes], None] = lambda _: None) -> Future[bytes]:
        """Have a shape planned: its outcome, when there is one.

        then: given the outcome on a thread of the pool before the future has it; what it raises, the future raises.
        """
        future: Future[bytes] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(RuntimeError(CLOSED))
            else:
                self._tasks.put((future, shape, then))
        return future

    def close(self) -> None:
        """End the workers; RuntimeError for whoever waits for an outcome."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> PlanPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_after(self, index: int) -> None:
        while (task := self._tasks.get()) is not None:
            future, shape, then = task
            try:
                outcome = self._outcome(index, shape)
                then(outcome)
                future.set_result(outcome)
            except Exception as error:  # whoever waits must see whatever it was
                future.set_exception(error)

    def _outcome(self, index: int, shape: Shape) -> bytes:
        try:
            return self._workers[index].ask(shape)
        except Died as first:
            pid = self._replace(index)
            print(f"hsap: planning worker {pid} {first}; a new one takes its place", file=sys.stderr, flush=True)
        try:
            return self._workers[index].ask(shape)
        except Died as second:
            self._replace(index)
            return failure(
                f"the planning worker {second}, like the one before it, while planning {sum(shape.lengths):,} tokens "
                f"in {len(shape.lengths):,} documents. See above for what it said, and the system's log if it was "
                "killed: it may have run out of memory. data.workers=0 plans in the rank itself."
            )

    def _replace(self, index: int) -> int:
        """Start a worker in the place of one that died; gives the old one's process number."""
        with self._lock:
            if self._closed:
                raise RuntimeError(CLOSED)
            before = self._workers[index].process.pid
            self._workers[index] = Worker(self._setup)
        return before


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
