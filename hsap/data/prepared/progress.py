"""Progress: how far preparing has come, for whoever waits for it."""

from __future__ import annotations

import sys
import time
from typing import Any

_EVERY_S = 5.0


class Progress:
    """A bar on a terminal, a line every few seconds elsewhere; on stderr, gone when it is done.

    Called with how many documents and tokens there are by now. what: that is being done, the beginning of each line.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None
        self._begin = self._told = time.monotonic()
        self._first: int | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, documents: int, tokens: int) -> None:
        if sys.stderr.isatty():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(unit=" tokens", unit_scale=True, initial=tokens, desc=self._what, leave=False)
            self._bar.set_postfix_str(f"{documents:,} documents", refresh=False)
            self._bar.update(tokens - self._bar.n)
            return
        now = time.monotonic()
        if self._first is None:
            self._first = tokens
            if documents:
                print(f"{self._what}: goes on behind {documents:,} documents, {tokens:,} tokens", file=sys.stderr)
        elif now - self._told >= _EVERY_S:
            self._told = now
            rate = (tokens - self._first) / (now - self._begin)
            print(f"{self._what}: {documents:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s", file=sys.stderr)
