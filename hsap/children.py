"""Children: processes that we start end with us."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that what was begun is ended. For the main thread."""

    def leave(*_):
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
