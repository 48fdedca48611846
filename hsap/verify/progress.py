"""Progress: the streams finish, judged by rendezvous.

The judge is strict, as NCCL is: nothing is buffered, a rank has one group in flight at a time, tags don't count. Why
the rules here are enough: take the lowest round that isn't over. All its ranks have finished every group before it,
for groups start in rising order; none of them is stuck in a wait, for the rounds waited for are lower and so over; so
all of them start this round, and in it every send meets its receive in the same order at both ends. It ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hsap.ir.program import Op, Role
from hsap.ir.sort import order_of
from hsap.verify.stream import Found, Stream, at, same_rows


def _keys(s: Stream, index: np.ndarray) -> np.ndarray:
    """One number for (rank, round) of instructions."""
    return s.rank[index] << 31 | s.programs.round[index]


def rounds_ascend(s: Stream) -> Iterator[Found]:
    """Groups start in strictly rising rounds on every rank."""
    p = s.programs
    starts = s.where(Op.LAUNCH, Op.ALL_TO_ALL)
    keys = _keys(s, starts)
    bad = starts[1:][keys[1:] <= keys[:-1]]
    yield from at(bad, lambda i: f"round {int(p.round[i])} starts after a round that isn't lower")


def joined(s: Stream) -> Iterator[Found]:
    """Every transfer is followed by the launch of its round, and no launch is empty."""
    p = s.programs
    moved, launches = s.where(Op.SEND, Op.RECV), s.where(Op.LAUNCH)
    launch = _match(_keys(s, moved), _keys(s, launches), launches)
    bad = moved[launch <= moved]
    yield from at(bad, lambda i: f"{Op(p.op[i]).name} joins round {int(p.round[i])}, which isn't launched after it")
    used = np.zeros(len(p) + 1, bool)
    used[launch] = True
    yield from at(launches[~used[launches]], lambda i: f"round {int(p.round[i])} is launched without a transfer")


def waited(s: Stream) -> Iterator[Found]:
    """Every launch has one wait, after it, and every wait a launch."""
    p = s.programs
    launches, waits = s.where(Op.LAUNCH), s.where(Op.WAIT)
    keys, wait_keys = _keys(s, launches), _keys(s, waits)
    bad = launches[_match(keys, wait_keys, waits) <= launches]
    yield from at(bad, lambda i: f"no wait for round {int(p.round[i])} follows its launch")
    bad = waits[_match(wait_keys, keys, launches) < 0]
    yield from at(bad, lambda i: f"waits for round {int(p.round[i])}, which this rank never launches")
    order = order_of(wait_keys)
    again = order[1:][wait_keys[order][1:] == wait_keys[order][:-1]]
    yield from at(waits[again], lambda i: f"waits again for round {int(p.round[i])}")


def _match(keys: np.ndarray, among: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Value of the (first) entry of `among` that equals each key, -1 where there is none."""
    if not len(among):
        return np.full(len(keys), -1)
    order = order_of(among)
    among, value = among[order], value[order]
    place = np.minimum(np.searchsorted(among, keys), len(among) - 1)
    return np.where(among[place] == keys, value[place], -1)


def paired(s: Stream) -> Iterator[Found]:
    """The sends and receives of a round meet: same rows, heads and role, in the same order at both ends."""
    p, num_ranks = s.programs, s.plan.num_ranks
    sends, receives = s.where(Op.SEND), s.where(Op.RECV)

    def ordered(index: np.ndarray, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys = (src * num_ranks + dst).astype(np.int64) << 31 | p.round[index]
        order = order_of(keys)
        return keys[order], index[order]

    send_keys, sends = ordered(sends, s.rank[sends], p.peer[sends])
    receive_keys, receives = ordered(receives, p.peer[receives].astype(np.int64), s.rank[receives])
    n = min(len(sends), len(receives))
    if len(sends) == len(receives) and np.array_equal(send_keys, receive_keys):
        same = p.role[sends] == p.role[receives]
        for table in (p.rows, p.heads):
            same &= same_rows(table.take(sends, axis=0), table.take(receives, axis=0))
        say = "sends {} of spans {} to rank {}, which expects something else at this place of round {}"
        yield from at(
            sends[~same],
            lambda i: say.format(Role(p.role[i]).name.lower(), p.rows[i], int(p.peer[i]), int(p.round[i])),
        )
        return
    first = int(np.argmax(np.append(send_keys[:n] != receive_keys[:n], True)))
    lone_send = first < len(sends) and (first == len(receives) or send_keys[first] < receive_keys[first])
    if lone_send:
        i = int(sends[first])
        say = f"sends {Role(p.role[i]).name.lower()} to rank {int(p.peer[i])}, which never receives it"
    else:
        i = int(receives[first])
        say = f"awaits {Role(p.role[i]).name.lower()} from rank {int(p.peer[i])}, which never sends it"
    yield Found(f"{say} in round {int(p.round[i])}", i)


def collective(s: Stream) -> Iterator[Found]:
    """All ranks of an intra group run the same AllToAlls: same round, same role."""
    p, intra = s.programs, s.plan.topology.intra_sp
    index = s.where(Op.ALL_TO_ALL)
    if not len(index):
        return
    borders = np.searchsorted(s.rank[index], np.arange(s.plan.num_ranks + 1)).tolist()
    rounds, roles = p.round[index], p.role[index]
    for rank in range(s.plan.num_ranks):
        first = rank - rank % intra
        mine, other = slice(borders[rank], borders[rank + 1]), slice(borders[first], borders[first + 1])
        if not np.array_equal(rounds[mine], rounds[other]) or not np.array_equal(roles[mine], roles[other]):
            at_ = int(index[mine][0]) if mine.stop > mine.start else None
            yield Found(f"its AllToAlls differ from those of rank {first}, of the same intra group", at_, rank)


RULES = (rounds_ascend, joined, waited, paired, collective)
