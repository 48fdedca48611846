import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hsap.steps import read_steps
from hsap.train.sweep import Job, exit_code, run_through, table
from tests.parity import REPOSITORY


def test_the_table_shows_every_job_and_what_is_unknown():
    jobs = [Job("8x1", "sap", 3.25, 3.5, 12345.6, 0), Job("4x2", "a_long_planner", None, None, None, 137)]
    head, rule, first, second = table(jobs).splitlines()
    assert head.split() == ["topology", "planner", "loss", "eval", "loss", "tokens/s", "exit", "code"]
    assert set(rule) == {"-", " "}
    assert first.split() == ["8x1", "sap", "3.2500", "3.5000", "12,346", "0"]
    assert second.split() == ["4x2", "a_long_planner", "-", "-", "-", "137"]
    assert len({len(line) for line in (head, rule, first, second)}) == 1


@pytest.mark.parametrize(("codes", "told"), [([], 0), ([0, 0], 0), ([0, 3, 1], 3)])
def test_the_first_failure_is_the_exit_code(codes, told):
    assert exit_code([Job("1x1", "sap", None, None, None, code) for code in codes]) == told


def test_metrics_survive_a_missing_file_and_a_line_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert [*read_steps(path)] == []
    path.write_text(json.dumps({"step": 1, "loss": None}) + "\n" + '{"step": 2, "lo')
    assert [*read_steps(path)] == [{"step": 1, "loss": None}]
    path.write_bytes(b'{"step": 1}\n{"st\xff\n\n[2]\n' + b"[" * 100_000 + b'\n{"step": 3}\n')
    assert [*read_steps(path)] == [{"step": 1}, {"step": 3}]


HEARS = """
import os, signal, sys, time
heard = []
signal.signal(int(sys.argv[1]), lambda *_: heard.append(1))
open(sys.argv[2], "w").close()
end = time.monotonic() + float(sys.argv[3])
while not heard and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.3)
open(sys.argv[2], "w").write(str(len(heard)))
sys.exit(40 + len(heard) + (os.getsid(0) == os.getpid()))
"""


@pytest.fixture
def handler():
    """Sets how this process takes a signal, whatever it was started with: nohup and a shell's & have some ignored."""
    before = {}

    def take(number, how):
        before[number] = signal.signal(number, how)

    yield take
    for number, how in before.items():
        signal.signal(number, how)


def signalled(tmp_path, number, patience_s):
    def interrupt():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    command = [sys.executable, "-c", HEARS, str(int(number)), str(tmp_path / "ready"), str(patience_s)]
    return run_through(command, os.environ)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_sweep_reaches_its_job_once_and_is_told_when_that_has_ended(tmp_path, handler, number):
    handler(number, signal.SIG_DFL)
    assert signalled(tmp_path, number, 60) == (42, number)
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_signal_that_is_ignored_as_under_nohup_reaches_no_job(tmp_path, handler):
    handler(signal.SIGHUP, signal.SIG_IGN)
    assert signalled(tmp_path, signal.SIGHUP, 0.5) == (41, 0)


def test_a_sweep_that_is_killed_has_its_job_save_and_end(tmp_path):
    ready = tmp_path / "ready"
    job = [sys.executable, "-c", HEARS, str(int(signal.SIGTERM)), str(ready), "60"]
    starting = f"import os; from hsap.train.sweep import run_through; run_through({job!r}, os.environ)"
    sweep = subprocess.Popen([sys.executable, "-c", starting], cwd=REPOSITORY)
    while not ready.exists():
        time.sleep(0.01)
    sweep.kill()
    sweep.wait()
    end = time.monotonic() + 30
    while ready.read_text() != "1" and time.monotonic() < end:
        time.sleep(0.05)
    assert ready.read_text() == "1"


def test_a_job_that_a_signal_ended_has_a_shell_s_code():
    assert run_through([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], os.environ) == (137, 0)
