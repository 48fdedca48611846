"""Runs in which a rank is stopped, killed or fails: all end, in time, and one message says who and where."""

import os
import re
import signal
import time

import pytest

from tests.parity import write_data
from tests.train.test_resume import settings
from tests.train.worlds import World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hangs")
    write_data(folder)
    return folder


def broken(folder, out, do, train=None):
    """A world of two ranks to whose second something is done after two steps; gives what they said, and how long."""
    arguments = settings(folder, out, "train.steps=9999", "train.save_every=0", "guard.timeout_s=3")
    world = World(folder, 2, arguments, train)
    metrics = folder / out / "metrics.jsonl"
    world.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    do(world.ranks[1].pid)
    begin = time.monotonic()
    for rank in world.ranks:
        rank.join(60)
    assert all(rank.exitcode not in (0, None) for rank in world.ranks)
    told = [line for line in world.told.splitlines() if line.startswith("train.py:")]
    assert ("a bug on one rank" in world.told) == (train is not None)
    assert len(told) == 1, world.told
    return told[0], time.monotonic() - begin


WHERE = r"(\(layer \d, (forward|backward), step \d+|\(step \d+\)|step \d+)"


def test_a_stopped_rank_ends_the_run_with_its_name_and_place(folder):
    told, _ = broken(folder, "stop", lambda pid: os.kill(pid, signal.SIGSTOP))
    assert "no rank has moved for" in told and "(guard.timeout_s=3)" in told
    found = re.search(r"At fault: rank 1 \(pid \d+ on [^)]+\) is stopped \(kill -CONT .*?last seen (.*?); rank 0", told)
    assert found and re.search(WHERE, found[1]), told
    assert re.search(r"rank 0 (waits|is) .*" + WHERE, told), told


def test_a_killed_rank_is_named_by_the_others_at_once(folder):
    told, took_s = broken(folder, "kill", lambda pid: os.kill(pid, signal.SIGKILL))
    assert re.search(r"At fault: rank 1 \(pid \d+ on [^)]+\) has ended without a word, last seen .*" + WHERE, told), (
        told
    )
    assert took_s < 30


def failing(arguments, num_ranks):
    """What train.py does, with a bug on the second rank once a file says so."""
    import hsap.train.updates
    from tests.train.worlds import _train

    check, flaw = hsap.train.updates.check_step, next(a for a in arguments if a.startswith("out="))[4:] + ".flaw"

    def check_or_fail(*given):
        if os.environ["RANK"] == "1" and os.path.exists(flaw):
            raise RuntimeError("a bug on one rank")
        check(*given)

    hsap.train.updates.check_step = check_or_fail
    _train(arguments, num_ranks)


def test_an_exception_on_one_rank_ends_all_with_its_reason_told_once(folder):
    told, took_s = broken(folder, "bug", lambda _: (folder / "bug.flaw").touch(), failing)
    assert told == "train.py: rank 1: Traceback (most recent call last):" and took_s < 30
