"""Worker: a process that plans what its rank asks for and ends when the rank does, however that ends.

It loads no torch. Messages are bytes: the setup first, then shapes; to each comes its outcome, in order.
"""

from __future__ import annotations

import os
import queue
import threading
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from hsap.ir.layout import Layout
from hsap.planning.compiling import PlanningSetup, Shape


def serve(descriptor: int) -> NoReturn:
    """Answer what comes through a connection until its other end is closed."""
    connection = Connection(descriptor)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    setup = PlanningSetup.from_bytes(messages.get())
    setup.compile(Layout.from_lengths([]))  # loads the planner's code before the first plan is wanted
    while True:
        outcome = setup.outcome(Shape.from_bytes(messages.get()))
        try:
            connection.send_bytes(outcome)
        except OSError:
            os._exit(0)


def _read(connection: Connection, messages: queue.SimpleQueue[Any]) -> None:
    """Read on a thread of its own, so that the rank's end is noticed during a long plan too."""
    try:
        while True:
            messages.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
