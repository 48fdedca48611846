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
from hsap.verify.columns import HEADS, OP, PEER, RANK, ROLE, ROUND, ROWS, plain, same
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
def _falling(code: np.ndarray, falling: np.ndarray) -> None:
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
def _unlaunched(
    code: np.ndarray, offsets: np.ndarray, rounds: np.ndarray, launch: np.ndarray, used: np.ndarray, why: np.ndarray
) -> None:
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
def _unawaited(
    code: np.ndarray, offsets: np.ndarray, rounds: np.ndarray, launch: np.ndarray, wait: np.ndarray, why: np.ndarray
) -> None:
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
    """The sends and receives of a round meet: same positions, heads and role, in the same order at both ends.

    Pairs are found here and not by `effects.partners`: what runs on pairs mustn't be judged by the same code.
    """
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
        a, b = (random_sums(len(s.plan.shards.spans)) for _ in range(2))
        differ = _differ(s.code, sends, receives, s.origin, a, b)
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


@loop
def _differ(
    code: np.ndarray,
    sends: np.ndarray,
    receives: np.ndarray,
    origin: np.ndarray,
    sums_a: np.ndarray,
    sums_b: np.ndarray,
) -> np.ndarray:
    """Whether sends and receives aren't of one role, the same heads, positions and order: bool [n]; needs `structure`.

    Their rows may be two places of the span table. No span comes twice in a message, so that its first span and the set
    of its pairs of neighbours make up its order. Two sets are told apart by random weights a(x) b(y) of the pairs
    (x, y); as for `fingerprint`, wrong ones pass with a chance below 2^-57. sums_a, sums_b: of the weights before each.
    """
    pairs = np.zeros(len(origin), np.uint64)
    for i in range(1, len(origin)):
        x, y = origin[i - 1], origin[i]
        pairs[i] = pairs[i - 1]
        if x >= 0 and y >= 0:  # no message has a span that isn't a shard's
            pairs[i] += (sums_a[x + 1] - sums_a[x]) * (sums_b[y + 1] - sums_b[y])
    differ = np.zeros(len(sends), np.bool_)
    for n in range(len(sends)):
        i, j = sends[n], receives[n]
        first, stop, other, other_stop = code[ROWS, i], code[ROWS + 1, i], code[ROWS, j], code[ROWS + 1, j]
        if not same(code, i, code, j, ROWS, 2) and (stop > first or other_stop > other):
            alike = stop - first == other_stop - other and origin[first] == origin[other]
            differ[n] = not alike or pairs[stop - 1] - pairs[first] != pairs[other_stop - 1] - pairs[other]
        differ[n] |= not same(code, i, code, j, HEADS, 4) or code[ROLE, i] != code[ROLE, j]
    return differ


def collective(s: Stream) -> Iterator[Found]:
    """All ranks of an intra group run the same AllToAlls: same round, same role."""
    intra = s.plan.topology.intra_sp
    index = s.where(Op.ALL_TO_ALL)
    if not len(index):
        return
    borders = np.searchsorted(s.rank[index], np.arange(s.plan.num_ranks + 1))
    say = "its AllToAlls differ from those of rank {}, of the same intra group"
    for rank in np.flatnonzero(_other_exchanges(s.code, index, borders, intra)).tolist():
        at_ = int(index[borders[rank]]) if borders[rank] < borders[rank + 1] else None
        yield Found(say.format(rank - rank % intra), at_, rank)


@loop
def _other_exchanges(code: np.ndarray, index: np.ndarray, borders: np.ndarray, intra: int) -> np.ndarray:
    """Whether a rank's AllToAlls, index[borders[rank] : borders[rank + 1]], aren't those of its group's first rank."""
    differ = np.zeros(len(borders) - 1, np.bool_)
    for rank in range(len(differ)):
        mine, other = borders[rank], borders[rank - rank % intra]
        count = borders[rank + 1] - mine
        differ[rank] = count != borders[rank - rank % intra + 1] - other
        for k in range(0 if differ[rank] else count):
            i, j = index[mine + k], index[other + k]
            differ[rank] |= code[ROUND, i] != code[ROUND, j] or code[ROLE, i] != code[ROLE, j]
    return differ


RULES = (rounds_ascend, joined, waited, paired, collective)
