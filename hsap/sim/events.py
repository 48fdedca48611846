"""Events: the loop that runs streams against the clock, one event after another; see `hsap.sim.clock` for its rules.

An activity is a rank's work or a message; it has a place in the queue while it goes on: a rank until its work is done,
a message until its bytes have left and then until it has arrived. When something starts or stops, whatever shares with
it goes on at another speed, and its place in the queue changes. The order of events at one moment doesn't matter: no
time passes between them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hsap.loops import inner, loop
from hsap.sim.share import of_cores, of_each_way

# Counting references to so many arrays at every call would take six times as long.
_loop, _inner = loop(allocates=False), inner(allocates=False)
_of_cores, _of_each_way = _inner(of_cores), _inner(of_each_way)

TIMED, LAUNCH, WAIT, EXCHANGE = range(4)
"""What an instruction is to the clock: all that only take time are alike."""


class State(NamedTuple):
    """Everything the loop reads and writes; records are laid out by `hsap.sim.clock.tick`.

    code, ranks, rounds, wires: a record per instruction, rank, round of a rank, message. touching: messages by round.
    cards: int64 [num_cards, 2], messages that leave and that arrive by a card. wanted: int64 [num_nodes, 2], who wants
    cores: ranks that work, ends of messages that flow. queue: activities as a heap, int64 [ranks + messages]; activity
    r is rank r's work, ranks + i message i. place: each activity's place in the queue, -1 for none. due: when it is
    over. size: int64 [1], of the queue. is_shared: whether a message's speed can depend on others.
    """

    code: np.ndarray
    ranks: np.ndarray
    rounds: np.ndarray
    wires: np.ndarray
    touching: np.ndarray
    cards: np.ndarray
    wanted: np.ndarray
    queue: np.ndarray
    place: np.ndarray
    due: np.ndarray
    size: np.ndarray
    is_shared: bool
    duplex: float
    comm_share: float
    cores: float
    comm_cores: float


@_loop
def run(s):
    """Run all streams to their end, or until nothing more can happen."""
    num_ranks = len(s.ranks)
    for rank in range(num_ranks):
        _advance(s, rank, 0.0)
    while s.size[0]:
        activity = s.queue[0]
        now = s.due[activity]
        _take(s)
        if activity < num_ranks:
            s.ranks[activity].working = False
            _advance(s, activity, now)
        elif s.wires[activity - num_ranks].flowing:
            _sent(s, activity - num_ranks, now)
        else:
            wire = s.wires[activity - num_ranks]
            wire.arrived = now
            for g in (wire.src, wire.dst):
                s.rounds[g].left -= 1
                if s.rounds[g].left == 0:
                    s.rounds[g].over = now
                    _finish(s, s.rounds[g].rank, now)


@_inner
def _advance(s, rank, now):
    """Run a rank's compute stream until its work takes time, it has to wait, or it ends."""
    me = s.ranks[rank]
    i = me.at
    while i < me.stop:
        kind, g = s.code[i].kind, s.code[i].round
        if not me.begun:
            me.begun = True
            s.code[i].start = now
            if s.code[i].seconds > 0:
                me.at, me.left, me.since, me.working = i, s.code[i].seconds, now, True
                break
        if not me.has_worked:
            me.has_worked = True
            s.code[i].worked = now
            if kind in (LAUNCH, EXCHANGE):
                s.rounds[g].launched = now
                _communicate(s, rank, now)
        if kind in (WAIT, EXCHANGE) and (g < 0 or me.current <= g):
            break
        s.code[i].end = now
        me.begun = me.has_worked = False
        i += 1
    me.at = i
    if me.working != me.counted:
        me.counted = me.working
        s.wanted[me.node, 0] += 1 if me.working else -1
        if s.cores < np.inf:
            _refresh(s, rank, now)
    if me.working:
        me.speed = 0.0
        _set_pace(s, rank, now)


@_inner
def _communicate(s, rank, now):
    """Begin a rank's rounds as far as they are launched and the ones before them over."""
    me = s.ranks[rank]
    while me.current < me.stop_round and s.rounds[me.current].launched >= 0:
        mine = s.rounds[me.current]
        if mine.began < 0:
            mine.began = mine.over = now
            me.busy = mine.left > 0
            for at in range(mine.touching, mine.touching_stop):
                _allow(s, s.touching[at], now)
        if mine.left > 0:
            break
        me.current += 1
    if s.comm_share > 0 and me.working:
        _set_pace(s, rank, now)


@_inner
def _finish(s, rank, now):
    """Go on from a rank's round that is over: with the next one, and with the stream if it waits for that."""
    me = s.ranks[rank]
    before = me.current
    me.busy = False
    _communicate(s, rank, now)
    if me.has_worked and before <= s.code[me.at].round < me.current:
        _advance(s, rank, now)


@_inner
def _allow(s, i, now):
    """Let a message start as far as one of its needs goes; start it if that was the last."""
    wire = s.wires[i]
    wire.needs -= 1
    if wire.needs == 0:
        wire.sent = wire.since = now
        wire.left = wire.transfer_s
        _flow(s, i, True, now)
        _set_pace(s, len(s.ranks) + i, now)


@_inner
def _sent(s, i, now):
    """End a message's flow: its ports go to the next ones, and it arrives a latency later."""
    _flow(s, i, False, now)
    wire = s.wires[i]
    if wire.out_next >= 0:
        _allow(s, wire.out_next, now)
    if wire.in_next >= 0:
        _allow(s, wire.in_next, now)
    _put(s, len(s.ranks) + i, now + wire.latency_s)


@_inner
def _flow(s, i, starts, now):
    """Take or give back what a message's bytes keep busy, and let others go on at their new speed."""
    wire = s.wires[i]
    a, b = s.rounds[wire.src].rank, s.rounds[wire.dst].rank
    step = 1 if starts else -1
    wire.flowing = starts
    s.ranks[a].sending[wire.crosses] = i if starts else -1
    s.ranks[b].receiving[wire.crosses] = i if starts else -1
    if wire.crosses:
        s.cards[s.ranks[a].card, 0] += step
        s.cards[s.ranks[b].card, 1] += step
    s.wanted[s.ranks[a].node, 1] += step
    s.wanted[s.ranks[b].node, 1] += step
    if s.is_shared:
        _refresh(s, a, now)
        _refresh(s, b, now)


@_inner
def _refresh(s, rank, now):
    """Let whatever shares with a rank go on at the speed it now has."""
    num_ranks = len(s.ranks)
    for other in range(s.ranks[rank].first_touched, s.ranks[rank].stop_touched):
        if s.ranks[other].working and s.cores < np.inf:
            _set_pace(s, other, now)
        for crosses in range(2):
            if s.ranks[other].sending[crosses] >= 0:
                _set_pace(s, num_ranks + s.ranks[other].sending[crosses], now)
            if s.ranks[other].receiving[crosses] >= 0:
                _set_pace(s, num_ranks + s.ranks[other].receiving[crosses], now)


@_inner
def _set_pace(s, activity, now):
    """Give an activity its speed from now on, and its place in the queue."""
    num_ranks = len(s.ranks)
    if activity < num_ranks:
        me = s.ranks[activity]
        speed = _host_speed(s, activity)
        if me.busy:
            speed *= 1.0 - s.comm_share
        if speed != me.speed:
            me.left -= (now - me.since) * me.speed
            me.since, me.speed = now, speed
            _put(s, activity, now + max(me.left, 0.0) / speed)
    else:
        wire = s.wires[activity - num_ranks]
        speed = _message_speed(s, activity - num_ranks)
        if speed != wire.speed:
            wire.left -= (now - wire.since) * wire.speed
            wire.since, wire.speed = now, speed
            _put(s, activity, now + max(wire.left, 0.0) / speed)


@_inner
def _host_speed(s, rank):
    """Speed of everything on a rank's host, of 1."""
    node = s.ranks[rank].node
    return _of_cores(s.cores, s.wanted[node, 0] + s.comm_cores * s.wanted[node, 1])


@_inner
def _message_speed(s, i):
    """Speed of a message, of 1: the slower of its ends."""
    wire = s.wires[i]
    a, b = s.rounds[wire.src].rank, s.rounds[wire.dst].rank
    if wire.crosses:
        out, back = s.ranks[a].card, s.ranks[b].card
        speed = 1.0 / max(s.cards[out, 0], s.cards[back, 1])
        both = s.cards[out, 1] > 0 or s.cards[back, 0] > 0
    else:
        speed = 1.0
        both = s.ranks[a].receiving[0] >= 0 or s.ranks[b].sending[0] >= 0
    if both:
        speed *= _of_each_way(s.duplex)
    return speed * min(_host_speed(s, a), _host_speed(s, b))


@_inner
def _put(s, activity, due):
    """Put an activity into the queue, or move it to where it belongs now."""
    s.due[activity] = due
    at = s.place[activity]
    if at < 0:
        at = s.size[0]
        s.size[0] += 1
    while at > 0 and _before(s, activity, s.queue[(at - 1) // 2]):
        above = (at - 1) // 2
        s.queue[at] = s.queue[above]
        s.place[s.queue[at]] = at
        at = above
    _sink(s, activity, at)


@_inner
def _take(s):
    """Take the first activity out of the queue."""
    s.place[s.queue[0]] = -1
    s.size[0] -= 1
    if s.size[0]:
        _sink(s, s.queue[s.size[0]], 0)


@_inner
def _sink(s, activity, at):
    """Put an activity at a place of the queue or below it."""
    while 2 * at + 1 < s.size[0]:
        below = 2 * at + 1
        if below + 1 < s.size[0] and _before(s, s.queue[below + 1], s.queue[below]):
            below += 1
        if not _before(s, s.queue[below], activity):
            break
        s.queue[at] = s.queue[below]
        s.place[s.queue[at]] = at
        at = below
    s.queue[at] = activity
    s.place[activity] = at


@_inner
def _before(s, one, other):
    """Tell whether an activity is over before another; at one moment, by number."""
    return s.due[one] < s.due[other] or (s.due[one] == s.due[other] and one < other)
