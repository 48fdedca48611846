"""Worlds of ranks for tests: forked from a process that has imported everything, so that a run starts in a second.

The ranks are what `train.py` is under a launcher; their processes can be killed and signalled one by one.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forks import CONTEXT, preload

preload("tests.train.forked", "tests.train.worlds")
_LIMIT_S, _MANY_RUNS_S = 300.0, 1800.0

SMALL_MODEL = {
    "num_layers": 2,
    "hidden_dim": 32,
    "head_dim": 8,
    "ffn_dim": 48,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 2048,
}
"""Keys of `model` for runs whose steps should cost next to nothing."""


def fork(function: Callable, *arguments) -> multiprocessing.Process:
    """Call a module's function in a process that already has torch, DeepSpeed and the loop."""
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    return process


def run_world(num_ranks: int, runs: list[list[str]], folder: Path, train: Callable | None = None) -> None:
    """Train runs one after the other in one world as `tests.parity.run_world` does, whose ranks take seconds to start.

    train: a module's function that does, given the runs; None: `tests.parity.rank.main`.
    """
    World(folder, num_ranks, runs, train or _probed).finish(limit_s=_MANY_RUNS_S)


class World:
    """Ranks of one run, started when made. arguments: train.py's. folder: where what they say is kept.

    train: a module's function that trains, given arguments and the number of ranks; None: what train.py does.
    """

    def __init__(self, folder: Path, num_ranks: int, arguments: list, train: Callable | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._told = folder / f"told-{port}-{time.monotonic_ns()}"
        work = (train or _train, port, arguments, str(self._told))
        self.ranks = [fork(_rank, rank, num_ranks, *work) for rank in range(num_ranks)]

    @property
    def told(self) -> str:
        """What all ranks have said so far."""
        return self._told.read_text() if self._told.exists() else ""

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Return as soon as something is reached; fails where the run ends before."""
        end = time.monotonic() + _LIMIT_S
        while not reached():
            if not all(rank.is_alive() for rank in self.ranks) or time.monotonic() > end:
                # Ended between the two questions, perhaps by reaching it.
                if not reached():
                    self._fail()
                return
            time.sleep(0.002)

    def finish(self, code: int = 0, limit_s: float = _LIMIT_S) -> str:
        """Wait until the ranks have ended, all with this code; gives what they have said."""
        end = time.monotonic() + limit_s
        for rank in self.ranks:
            rank.join(max(end - time.monotonic(), 0.1))
        if any(rank.exitcode != code for rank in self.ranks):
            self._fail()
        return self.told

    def kill(self, order: random.Random) -> None:
        """SIGKILL to every rank, in an order of their own and up to some milliseconds apart."""
        for rank in order.sample(self.ranks, len(self.ranks)):
            rank.kill()
            time.sleep(order.choice((0, 0.02)))
        for rank in self.ranks:
            rank.join(_LIMIT_S)

    def _fail(self) -> None:
        codes = [rank.exitcode for rank in self.ranks]
        for rank in self.ranks:
            rank.kill()
        pytest.fail(f"exit codes {codes}: {self.told[-3000:]}")


def script(arguments: list[str], _: int) -> None:
    """Run a script as one rank, with its folder in the path."""
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")


def _train(arguments: list[str], num_ranks: int) -> None:
    from tests.train.forked import configure, run

    config = configure(arguments, num_ranks)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    run(config)


def _probed(runs: list[list[str]], _: int) -> None:
    from tests.parity.rank import main

    main(runs)


def _rank(rank: int, num_ranks: int, train: Callable, port: int, arguments: list, told: str) -> None:
    handle = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    try:
        train(arguments, num_ranks)
    except Exception as error:
        from hsap.train.launch import fail

        # Without tidying up, as a failed rank ends: others may wait for it.
        fail(error, rank, 0.0)
