"""Telling: of many sights one message, which names first the rank that all wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hsap.position import Wait
from hsap.train.hang.sight import Sight

_SHOWN = 6


class Fault(Enum):
    """What is wrong with the ranks at fault; the value is what to do about it."""

    ENDED = "the system's log may say why (an out-of-memory kill is in dmesg)"
    SILENT = "see to the process and its host"
    WORKS = "its stacks are in OUT/hang-rankR.txt"
    BEHIND = "stacks of these ranks are in OUT/hang-rankR.txt"
    STORE = "see to that process, its host and the network between"
    CIRCLE = "see to the network between the hosts of these ranks"


@dataclass(frozen=True, slots=True)
class Blame:
    """Which ranks the others wait for, and why."""

    fault: Fault
    ranks: tuple[int, ...]


def blame(sights: Sequence[Sight], silent_after_s: float) -> Blame:
    """Find the ranks at fault: those that have ended, else those that don't answer, else those that wait for nobody,
    else those furthest behind; where all are equally far, they wait in a circle."""

    def ranks(some: Sequence[Sight]) -> tuple[int, ...]:
        return tuple(sight.rank for sight in some)

    there = [sight for sight in sights if not sight.left]
    if ended := [sight for sight in there if sight.ended()]:
        return Blame(Fault.ENDED, ranks(ended))
    if silent := [sight for sight in there if sight.silent_s > silent_after_s]:
        return Blame(Fault.SILENT, ranks(silent))
    if works := [sight for sight in there if sight.wait == Wait.NOTHING]:
        first = min(sight.order for sight in works)
        # Between attention's streams it can't be seen whether a rank works or waits: the hindmost has the blame.
        return Blame(Fault.WORKS, ranks([s for s in works if s.code is not None or s.order == first]))
    if not there:
        return Blame(Fault.CIRCLE, ())
    first = min(sight.order for sight in there)
    behind = [sight for sight in there if sight.order == first]
    pairs = {sight.rank: sight.peer for sight in there if sight.wait in (Wait.RECV, Wait.SEND, Wait.PLAN)}
    circle = tuple(rank for rank in pairs if _comes_back(rank, pairs))
    if len(behind) < len(there) and not circle:
        return Blame(Fault.BEHIND, ranks(behind))
    return Blame(Fault.CIRCLE, circle or ranks(there))


def _comes_back(rank: int, pairs: dict[int, int]) -> bool:
    """Whether, going from each rank to the one it waits for, one comes back."""
    at = rank
    for _ in pairs:
        at = pairs.get(at, -1)
        if at == rank:
            return True
    return False


def stands(sights: Sequence[Sight], found: Blame) -> str:
    """Who is at fault, all of them, and who waits, some of them, without saying what follows."""
    at_fault = set(found.ranks)
    others = [sight for sight in sights if not sight.left]
    if found.fault == Fault.CIRCLE:
        # Nobody is at fault alone: there may be a thousand lines of such ranks.
        parts = ["all wait for one another: what they sent is lost on its way, or never left"]
        others.sort(key=lambda sight: sight.rank not in at_fault)
    else:
        told = _grouped([(sight.name, _fault(sight, found.fault)) for sight in sights if sight.rank in at_fault])
        parts = [line for line, _ in told]
        others = [sight for sight in others if sight.rank not in at_fault]
    waiting = _grouped([(f"rank {sight.rank}", _other(sight)) for sight in others])
    parts += [line for line, _ in waiting[:_SHOWN]]
    if more := sum(num_ranks for _, num_ranks in waiting[_SHOWN:]):
        parts.append(f"and {more} more rank{'s' if more > 1 else ''}")
    return "; ".join(parts)


def _grouped(told: Sequence[tuple[str, str]]) -> list[tuple[str, int]]:
    """Lines of several ranks, those that say the same as one; and of how many ranks each is."""
    by_text: dict[str, list[str]] = {}
    for name, text in told:
        by_text.setdefault(text, []).append(name)
    lines = []
    for text, names in by_text.items():
        bare = all(name.removeprefix("rank ").isdigit() for name in names)
        if bare and len(names) > 1:
            numbers = _listed([int(name.removeprefix("rank ")) for name in names])
            lines.append((f"each of ranks {numbers} {text}", len(names)))
        else:
            lines.append((f"{' and '.join(names)} {text}", len(names)))
    return lines


def _listed(ranks: Sequence[int]) -> str:
    """Numbers in ascending order, as people list them: "0 to 498 and 500"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _fault(sight: Sight, fault: Fault) -> str:
    match fault:
        case Fault.ENDED:
            return f"has ended without a word, last seen {sight.where}"
        case Fault.SILENT:
            return f"{_silence(sight)}, last seen {sight.where}"
        case Fault.WORKS:
            return f"is {sight.where} for {sight.still_s:.0f} s"
        case Fault.BEHIND | Fault.CIRCLE | Fault.STORE:
            return f"is furthest behind: it {_other(sight)}"


def _silence(sight: Sight) -> str:
    """What is known of a process that doesn't answer."""
    known = f"hasn't answered for {sight.silent_s:.0f} s"
    match sight.state:
        case "T" | "t":
            return f"is stopped (kill -CONT {sight.person.pid} would let it go on) and {known}"
        case "D":
            return f"{known}, its process waits for a disk or a network file system"
        case "":
            return f"{known}: it is stopped, or its host or the network to it is lost"
    return f"{known}, though its process is there (state {sight.state}): some code in it holds Python's lock"


def _other(sight: Sight) -> str:
    return f"{sight.waits or 'is ' + sight.where} for {sight.still_s:.0f} s"


def moving(waiter: Sight, sights: Sequence[Sight]) -> str:
    """One line on a rank that waits long: for whom, and what that one does."""
    by_rank = {sight.rank: sight for sight in sights}
    peer = by_rank.get(waiter.peer) if waiter.wait in (Wait.RECV, Wait.SEND, Wait.PLAN) else None
    if peer is None:
        others = [sight for sight in sights if sight.rank != waiter.rank and not sight.left]
        peer = min(others, key=lambda sight: sight.order, default=None)
    line = f"rank {waiter.rank} {_other(waiter)}"
    if peer is None or peer.rank == waiter.rank:
        return line
    told = _fault(peer, Fault.SILENT) if peer.state in ("T", "t") else _other(peer)
    return f"{line}; rank {peer.rank} (pid {peer.person.pid} on {peer.person.host}) {told}"
