"""Prefetch: walk an iterator ahead of its consumer on a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

_POLL_S = 0.1


class Prefetch(Generic[Item]):
    """An iterator over `items` that keeps up to `depth` of them ready.

    depth 0 walks in the consumer's own thread. An exception of `items` comes out of `next`, after the items before it,
    and again at every later `next`. `close` (or leaving a `with` block) ends the thread; it waits for the item in work.
    """

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._items = items
        self._end: BaseException | None = None
        self._stop = threading.Event()
        if depth < 0:
            raise ValueError(f"data.lookahead={depth} is negative; set it to 0 (no background thread) or more")
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._thread: threading.Thread | None = None
        if depth:
            # The thread knows the queue but not this object, which can so be collected while the thread runs.
            arguments = (items, self._ready, self._stop)
            self._thread = threading.Thread(target=_fill, args=arguments, name="hsap-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._end is not None:
            raise self._end
        if self._thread is None:
            return next(self._items)
        item, end = self._ready.get()
        if end is not None:
            self._end = end
            raise end
        return item

    def close(self) -> None:
        """End the thread; a later `next` raises StopIteration."""
        self._stop.set()
        if self._end is None:
            self._end = StopIteration()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop.set()


def _fill(items: Iterator[Item], ready: queue.Queue[Any], stop: threading.Event) -> None:
    """Move items into the queue until they end, fail, or nobody wants them; the end itself is the last entry."""
    end: BaseException | None = None
    while end is None:
        item = None
        try:
            item = next(items)
        except BaseException as error:  # the consumer must see whatever it was, StopIteration included
            end = error
        while not stop.is_set():
            try:
                ready.put((item, end), timeout=_POLL_S)
                break
            except queue.Full:
                continue
        if stop.is_set():
            return
