"""Told: what a rank says when it ends, on stderr and where the launcher looks for it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAM = "train.py"
"""Whose messages these are, where no other program's are told."""
_CLOSED = r"Connection (was likely )?(closed|reset)|Broken pipe|pair closure"


def is_echo(error: BaseException) -> bool:
    """Whether an error only says that another rank has gone: that one, or the launcher, knows why."""
    return isinstance(error, RuntimeError) and re.search(_CLOSED, str(error)) is not None


@contextmanager
def written(path: Path) -> Iterator[None]:
    """While a file of the run is written, say what is wrong with it or its disk as a ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path} can't be written ({error.strerror}); make room, or set out= to a folder that can be written to; "
            "if checkpoints were saved, resume=true goes on from the newest"
        ) from error


def remark(text: str) -> None:
    """Say something of a run that goes on, above its progress bar and not in the same line."""
    from tqdm import tqdm

    tqdm.write(f"hsap: {text}", file=sys.stderr)
    sys.stderr.flush()


def tell(text: str, rank: int, final: bool = False, amid: bool = False, program: str = PROGRAM) -> None:
    """Say a message of a program's and leave it for the launcher.

    final: trying again would end the same way. amid: training has begun, and its progress bar may stand in the line.
    Who calls it ends the process next, so it raises nothing where a message can't be written.
    """
    prefix = ("\n" if amid else "") + (f"{program}: " if rank == 0 else f"{program}: rank {rank}: ")
    say(f"{prefix}{text}")
    leave_word(text, final)


def say(text: str) -> None:
    """Print on stderr, behind what stdout still has, as far as they can be written: a log's disk may be full, a pipe's
    reader gone, either closed from the start."""
    with suppress(OSError):
        print(end="", flush=True)  # stdout may be None
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def leave_word(text: str, final: bool = False) -> None:
    """Leave the message where torch's agent, started by the user, looks for it, so that its report shows it last."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time())), "final": final}
        with suppress(OSError):  # a full disk: it is said on stderr all the same
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
