"""Listings: the one rule for streams in the paper's bare spelling, of which perhaps only some ranks are printed.

What a listed rank sends to another listed one must be received there, as often and in the same order.
"""

from __future__ import annotations

from hsap.ir.listing import Line, Listing
from hsap.ir.program import Op
from hsap.ir.spelling import ROLES
from hsap.verify.report import Fault

RULE = "progress.paired"


def check_listing(listing: Listing) -> list[Fault]:
    """Find transfers between listed ranks whose partner doesn't do its half, or does it in another order."""
    halves: dict[tuple[int, int], tuple[list[Line], list[Line]]] = {}
    for rank, line in listing.transfers:
        pair = (rank, line.peer) if line.op == Op.SEND else (line.peer, rank)
        halves.setdefault(pair, ([], []))[line.op == Op.RECV].append(line)
    return [fault for pair, (sends, receives) in halves.items() for fault in _judge(*pair, sends, receives)]


def _judge(src: int, dst: int, sends: list[Line], receives: list[Line]) -> list[Fault]:
    """Compare what src sends dst with what dst awaits from src."""
    faults = _miscounted(src, dst, sends, receives)
    if faults:
        return faults
    for a, b in zip(sends, receives):
        if a.role != b.role:
            message = (
                f"sends {ROLES[a.role]} to rank {dst}, which at that place (its instruction {b.index}) awaits "
                f"{ROLES[b.role]}"
            )
            return [_fault(src, a.index, message)]
    return []


def _miscounted(src: int, dst: int, sends: list[Line], receives: list[Line]) -> list[Fault]:
    """Transfers of a role that one of the two ranks lists more often than the other."""
    faults = []
    for role, name in ROLES.items():
        out = [line.index for line in sends if line.role == role]
        into = [line.index for line in receives if line.role == role]
        for index in out[len(into) :]:
            times = f"which receives {name} from it only {len(into)}×" if into else "which never receives it"
            faults.append(_fault(src, index, f"sends {name} to rank {dst}, {times}"))
        for index in into[len(out) :]:
            times = f"which sends it {name} only {len(out)}×" if out else "which never sends it"
            faults.append(_fault(dst, index, f"awaits {name} from rank {src}, {times}"))
    return faults


def _fault(rank: int, index: int, message: str) -> Fault:
    return Fault(RULE, None, None, rank, index, message)
