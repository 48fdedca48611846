"""Children: processes that we start end with us."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


@contextmanager
def ended_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that what was begun is ended. For the main thread."""

    def leave(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however that ends; on Linux, which can."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def asks_to_end_with_us() -> Callable[[], object] | None:
    """Give what a child does first: ask the kernel for SIGTERM when we end, however that is; on Linux, which can."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # before the fork, after which a library can't safely be loaded
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
