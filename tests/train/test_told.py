"""Messages of a rank that ends: none that can't be written keeps it alive."""

import errno
import io
import os
import sys

import pytest

from hsap.train.hang.watch import Watch
from hsap.train.launch import fail
from hsap.train.told import leave_word


class Full(io.StringIO):
    """A log on a full disk."""

    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Ended(BaseException):
    pass


def end(code):
    raise Ended(code)


def leave():
    watch = object.__new__(Watch)
    watch.rank = 0
    watch._leave({"ranks": []})


@pytest.mark.parametrize("log", [Full, lambda: None], ids=["on a full disk", "closed"])
@pytest.mark.parametrize("ends", [lambda: fail(ValueError("why"), 0, 0.0), leave], ids=["an error", "a verdict"])
def test_a_rank_ends_where_nothing_can_be_said(monkeypatch, ends, log):
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(sys, "stdout", log())
    monkeypatch.setattr(sys, "stderr", log())
    with pytest.raises(Ended, match="1"):
        ends()


def test_word_for_the_launcher_that_can_not_be_left_is_none(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full")
    leave_word("why")
