"""Ranks of a bench end with it, whatever ends it."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsap.calibrate.processes import run_ranks
from tests.parity import REPOSITORY

pytestmark = pytest.mark.slow


def forever(rank):
    print(os.getpid(), flush=True)
    time.sleep(600)


def test_what_a_rank_says_comes_back_and_what_fails_is_told():
    assert run_ranks(2, divmod, 2) == [[0, 0], [0, 1]]
    with pytest.raises(RuntimeError, match="math domain error"):
        run_ranks(1, math.log)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_are_gone_when_the_bench_is(how, tmp_path):
    code = (
        # A shell's background jobs ignore an interrupt, and so would what they start.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from hsap.calibrate.processes import run_ranks\nfrom tests.calibrate.test_calibrate_processes import forever\n"
        "run_ranks(1, forever)"
    )
    where = {"cwd": REPOSITORY, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **where
    ) as bench:
        rank = int(bench.stdout.readline())
        bench.send_signal(how)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{rank}").exists()
    # A process that is killed outright can't tidy up; any other end leaves no file either.
    assert how == signal.SIGKILL or not list(tmp_path.iterdir())
