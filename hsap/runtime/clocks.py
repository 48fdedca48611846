"""Clocks: how far a rank's host clock is from that of its group's first rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hsap.runtime.transport import Transport

EXCHANGES = 8


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """offset_ns: added to a rank's clock it gives the first rank's, give or take error_ns."""

    offset_ns: int
    error_ns: int


def clock_offset(
    transport: Transport,
    rank: int,
    num_ranks: int,
    device: torch.device | str = "cpu",
    now_ns: Callable[[], int] = time.perf_counter_ns,
) -> ClockOffset:
    """Compare the clocks of a group. Collective over it; nothing else may be on its way.

    Each rank in turn asks the first one for the time, a few times; the quickest answer counts, as if it had been read
    half-way (Cristian, Probabilistic clock synchronization, 1989). The error is at most half of that exchange: some 50
    µs over gloo inside a machine, the network's latency between machines; clocks that drift apart by the usual 10 µs a
    second add to it later. An offset smaller than its error counts as none: ranks of one host read one clock.
    """
    if rank == 0:
        for peer in range(1, num_ranks):
            for _ in range(EXCHANGES):
                _receive(transport, peer, device)
                _send(transport, peer, now_ns(), device)
        return ClockOffset(0, 0)
    quickest: tuple[int, int] | None = None
    for _ in range(EXCHANGES):
        asked_ns = now_ns()
        _send(transport, 0, 0, device)
        theirs_ns = _receive(transport, 0, device)
        took_ns = now_ns() - asked_ns
        if quickest is None or took_ns < quickest[0]:
            quickest = took_ns, theirs_ns - (asked_ns + took_ns // 2)
    assert quickest is not None
    took_ns, offset_ns = quickest
    error_ns = took_ns // 2 + 1
    return ClockOffset(offset_ns if abs(offset_ns) > error_ns else 0, error_ns)


def _send(transport: Transport, peer: int, value: int, device: torch.device | str) -> None:
    transport.launch(0, [(peer, torch.tensor([value], dtype=torch.int64, device=device))], [])
    transport.wait(0)


def _receive(transport: Transport, peer: int, device: torch.device | str) -> int:
    into = torch.empty(1, dtype=torch.int64, device=device)
    transport.launch(0, [], [(peer, into)])
    transport.wait(0)
    return int(into)  # waits for the device
