"""Loopback: what runs on one machine alone is reached from that machine alone.

torch's TCPStore listens on every address of a machine, whatever host it is given. Whoever reaches it may write what
ranks read, and what torch's elastic agent unpickles.
"""

from __future__ import annotations

import functools
import importlib
import ipaddress
import os
import socket
from contextlib import suppress
from typing import Any

INTERFACE = "GLOO_SOCKET_IFNAME"
_SERVING = (
    "torch.distributed",
    "torch.distributed.rendezvous",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
"""Modules of torch that make stores: of a rank, of the agent, and of the ranks that the agent starts."""


def keep_here() -> None:
    """Let stores that this process serves under a loopback address, and gloo, listen there; call it before either is.

    A run with a launcher of its own names its addresses itself and isn't touched.
    """
    for name in _SERVING:
        vars(importlib.import_module(name))["TCPStore"] = _store_class()
    interface = _loopback_interface()
    if interface is not None:
        os.environ.setdefault(INTERFACE, interface)


@functools.cache
def _store_class() -> type:
    """Make the class of stores, once: torch is imported by those alone who need it."""
    from torch.distributed import TCPStore

    class Store(TCPStore):
        """A TCPStore that listens on the one address that it is reached by, where that is a loopback address."""

        def __init__(
            self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *more: Any,
            **named: Any,
        ) -> None:  # fmt: skip
            if is_master and _is_loopback(host_name):
                # In use: by a store of this very process, which torch shares; or by another, of which it knows to tell.
                with suppress(OSError):
                    server = socket.create_server(("127.0.0.1", port))
                    port = server.getsockname()[1]
                    named["master_listen_fd"] = server.detach()
            super().__init__(host_name, port, world_size, is_master, *more, **named)

    return Store


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host) == ipaddress.ip_address("127.0.0.1")
    except ValueError:
        return False


def _loopback_interface() -> str | None:
    """Name of the loopback interface, None where it has another name than elsewhere."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
