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
from hsap.loops import loop
from hsap.verify.columns import HEADS, OP, PEER, RANK, ROLE, ROUND, ROWS, plain
from hsap.verify.fingerprint import random_sums
from hsap.verify.stream import Found, Stream, at


def rounds_ascend(s: Stream) -> Iterator[Found]:
    """Groups start in strictly rising rounds on every rank."""
    falling = np.zeros(len(s.programs), bool)
    _falling(s.code, falling)
    yield from at(
        np.flatnonzero(falling), lambda i: f"round {int(s.programs.round[i])} starts after a round that isn't lower"
    )


@loop
def _falling(code, falling):
    """Mark groups that start in a round that isn't above their rank's last one."""
    rank, last = -1, -1
    for i in range(len(falling)):
        if code[OP, i] == Op.LAUNCH or code[OP, i] == Op.ALL_TO_ALL:
            falling[i] = code[RANK, i] == rank and code[ROUND, i] <= last
            rank, last = code[RANK, i], code[ROUND, i]


def joined(s: Stream) -> Iterator[Found]:
    """Every transfer is followed by the launch of its round, and no launch is empty."""
    p = s.programs
    rounds, num_rounds = _few_rounds(s)
    why = np.zeros(len(p), np.uint8)
    _unlaunched(s.code, plain(p.offsets), rounds, np.full(num_rounds, -1), np.zeros(len(p), bool), why)
    if not why.any():
        return
    say = "{} joins round {}, which isn't launched after it"
    yield from at(np.flatnonzero(why == 1), lambda i: say.format(Op(p.op[i]).name, int(p.round[i])))
    bad = np.flatnonzero(why == 2)
    yield from at(bad, lambda i: f"round {int(p.round[i])} is launched without a transfer")


@loop
def _unlaunched(code, offsets, rounds, launch, used, why):
    """Judge transfers and launches: sets why [n] to 1 for a transfer without a launch after it, 2 for an empty launch.

    The first launch of a round counts. launch: -1 for each round. used: False [n].
    """
    # An entry of `launch` below `start` is another rank's.
    for rank in range(len(offsets) - 1):
        start, stop = offsets[rank], offsets[rank + 1]
        for i in range(start, stop):
            if code[OP, i] == Op.LAUNCH and launch[rounds[i]] < start:
                launch[rounds[i]] = i
        for i in range(start, stop):
            if code[OP, i] == Op.SEND or code[OP, i] == Op.RECV:
                its = launch[rounds[i]]
                if its <= i:
                    why[i] = 1
                if its >= start:
                    used[its] = True
        for i in range(start, stop):
            if code[OP, i] == Op.LAUNCH and not used[i]:
                why[i] = 2


def waited(s: Stream) -> Iterator[Found]:
    """Every launch has one wait, after it, and every wait a launch."""
    p = s.programs
    rounds, num_rounds = _few_rounds(s)
    why = np.zeros(len(p), np.uint8)
    _unawaited(s.code, plain(p.offsets), rounds, np.full(num_rounds, -1), np.full(num_rounds, -1), why)
    if not why.any():
        return
    bad = np.flatnonzero(why & 1)
    yield from at(bad, lambda i: f"no wait for round {int(p.round[i])} follows its launch")
    bad = np.flatnonzero(why & 2)
    yield from at(bad, lambda i: f"waits for round {int(p.round[i])}, which this rank never launches")
    yield from at(np.flatnonzero(why & 4), lambda i: f"waits again for round {int(p.round[i])}")


@loop
def _unawaited(code, offsets, rounds, launch, wait, why):
    """Judge launches and waits: adds to why [n] 1 for no wait after a launch, 2 a wait without a launch, 4 again.

    The first launch and the first wait of a round count. launch, wait: -1 for each round.
    """
    # Entries of `launch` and `wait` below `start` are another rank's.
    for rank in range(len(offsets) - 1):
        start, stop = offsets[rank], offsets[rank + 1]
        for i in range(start, stop):
            if code[OP, i] == Op.LAUNCH and launch[rounds[i]] < start:
                launch[rounds[i]] = i
            elif code[OP, i] == Op.WAIT and wait[rounds[i]] < start:
                wait[rounds[i]] = i
            elif code[OP, i] == Op.WAIT:
                why[i] = 4
        for i in range(start, stop):
            if code[OP, i] == Op.LAUNCH and wait[rounds[i]] <= i:
                why[i] |= 1
            elif code[OP, i] == Op.WAIT and launch[rounds[i]] < start:
                why[i] |= 2


def _few_rounds(s: Stream) -> tuple[np.ndarray, int]:
    """Give rounds in numbers of the size of the stream, in the order of the rounds: (int64 [n], how many).

    Those of instructions that have no round mean nothing and may be negative. Needs `structure.enumerations`.
    """
    rounds = s.code[ROUND]
    most = int(rounds.max(initial=0))
    if most <= 4 * len(rounds) + 64:
        return rounds, most + 1
    rounds = np.unique(rounds, return_inverse=True)[1]
    return rounds, len(rounds)


def paired(s: Stream) -> Iterator[Found]:
    """The sends and receives of a round meet: same positions, heads and role, in the same order at both ends."""
    p, num_ranks = s.programs, s.plan.num_ranks
    sends, receives = s.where(Op.SEND), s.where(Op.RECV)
    rank, peer = s.code[RANK], s.code[PEER]
    rounds, num_rounds = _few_rounds(s)

    def ordered(index: np.ndarray, src: np.ndarray, dst: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys = (src[index] * num_ranks + dst[index]) * num_rounds + rounds[index]
        order = order_of(keys)
        return keys[order], index[order]

    send_keys, sends = ordered(sends, rank, peer)
    receive_keys, receives = ordered(receives, peer, rank)
    n = min(len(sends), len(receives))
    if len(sends) == len(receives) and np.array_equal(send_keys, receive_keys):
        differ = _other_rows(s, sends, receives)
        for row in (ROLE, *range(HEADS, HEADS + 4)):
            differ |= s.code[row][sends] != s.code[row][receives]
        say = "sends {} of spans {} to rank {}, which expects something else at this place of round {}"
        yield from at(
            sends[differ],
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


def _other_rows(s: Stream, sends: np.ndarray, receives: np.ndarray) -> np.ndarray:
    """Whether what is sent and what is awaited aren't the same token positions in the same order: bool [n].

    They may be two places of the span table. No span comes twice in a message, so that its first span and the set of
    its pairs of neighbours make up its order. Two sets are told apart by random weights a(x) b(y) of the pairs (x, y);
    as for `fingerprint`, wrong ones pass with a chance below 2^-57.
    """
    here, there = (s.code[ROWS : ROWS + 2, index] for index in (sends, receives))
    differ = (here != there).any(axis=0)
    index = np.flatnonzero(differ)
    if len(index):
        a, b = (np.diff(random_sums(len(s.plan.shards.spans))) for _ in range(2))
        pairs = np.append(np.uint64(0), np.cumsum(a[s.origin[:-1]] * b[s.origin[1:]]))
        (first, stop), (other, other_stop) = here[:, index], there[:, index]
        count = stop - first
        alike = (count == other_stop - other) & (count > 0)
        last, other_last = (np.where(alike, start + count - 1, 0) for start in (first, other))
        first, other = np.where(alike, first, 0), np.where(alike, other, 0)
        alike &= s.origin[first] == s.origin[other]
        differ[index] = ~alike | (pairs[last] - pairs[first] != pairs[other_last] - pairs[other])
        differ[index] &= (count > 0) | (other_stop > other)
    return differ


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
