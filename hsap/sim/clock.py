"""Clock: when every instruction, round and message starts and ends, given what each costs.

A rank has two lines that run side by side:

- the *compute stream* does its instructions in order. Send and Recv take no time there: they join their round. Launch
  hands the round to the communicator and goes on; Wait stops until that round is over. AllToAll reorders, launches its
  round and stops until it is over.
- the *communicator* does one round at a time, in the order of launching. A rank begins a round once it has launched it
  and its round before is over; it ends with the round's last message.

A message starts when both ends have begun its round (rendezvous: nothing is buffered) and its ports are free. A rank
has a port for sending and one for receiving on each kind of link, inside the node and between nodes; messages of a
round on one port go one after another. Its ports are taken while bytes flow; it arrives a latency later. These are the
rules of `hsap.verify`, so that a verified plan always ends.

The order on a port is fixed: nearest ranks upwards first (dst - src mod ranks), then as the sender lists them. A fixed
order makes every time a maximum of sums of costs: exact, independent of the order of evaluation, and never later where
a cost is lower. What it gives up: a message that could go may queue behind one whose other end isn't there yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.effects import Flows
from hsap.ir.program import Op, Programs
from hsap.ir.sort import order_of
from hsap.loops import inner, loop
from hsap.sim.cost import Messages

_TIMED, _LAUNCH, _WAIT, _EXCHANGE = range(4)
_KIND = np.full(len(Op), _TIMED, np.int8)
_KIND[[Op.LAUNCH, Op.WAIT, Op.ALL_TO_ALL]] = _LAUNCH, _WAIT, _EXCHANGE


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Seconds from the start of the stream, float64 [n] each, a value per instruction.

    start, end: on the compute stream; for Wait and AllToAll the end includes the standing still. comm_start, comm_end:
    on the communicator: of the message for Send and Recv, of the round for Launch and AllToAll, NaN for the others.
    """

    start: np.ndarray
    end: np.ndarray
    comm_start: np.ndarray
    comm_end: np.ndarray


def tick(programs: Programs, seconds: np.ndarray, carried: Flows, messages: Messages) -> Times:
    """Run all ranks' streams against the clock.

    seconds: float64 [n] of `compute_seconds`. carried, messages: `flows` of the programs and their prices.
    Takes time in proportion to instructions and messages. ValueError where the streams don't end, with a rank and an
    instruction that waits forever; they end for every verified plan.
    """
    n = len(programs)
    kind = _KIND[programs.op]
    launches = np.flatnonzero((kind == _LAUNCH) | (kind == _EXCHANGE))
    rounds = _Rounds(programs, launches)
    wires = _wires(programs, rounds, carried, messages)
    round_of = np.full(n, -1)
    round_of[launches] = np.arange(len(launches))
    waits = np.flatnonzero(kind == _WAIT)
    round_of[waits] = rounds.find(programs.rank[waits], programs.round[waits])
    first_round = np.searchsorted(launches, programs.offsets)
    code = _columns(n, kind=kind, round=round_of, seconds=seconds, start=0.0, end=0.0)
    ranks = _columns(
        programs.num_ranks, at=programs.offsets[:-1], stop=programs.offsets[1:], now=0.0, current=first_round[:-1],
        first_round=first_round[:-1], stop_round=first_round[1:],
    )  # fmt: skip
    in_rounds = _columns(
        len(launches), rank=programs.rank[launches], left=wires.left, launched=-1.0, began=-1.0, over=0.0,
        touching=wires.touching_from[:-1], touching_stop=wires.touching_from[1:],
    )  # fmt: skip
    # A message needs both ends to begin, and each message before it on a port to be sent.
    needs = np.full(len(wires.src), 2)
    for after in (wires.out_next, wires.in_next):
        needs[after[after >= 0]] += 1
    carried_by = _columns(
        len(needs), src=wires.src, dst=wires.dst, transfer_s=wires.transfer_s, latency_s=wires.latency_s, sent=0.0,
        arrived=0.0, needs=needs, out_next=wires.out_next, in_next=wires.in_next,
    )  # fmt: skip
    _run(code, ranks, in_rounds, carried_by, wires.touching, np.zeros(len(needs) + 1, np.int64))
    if stuck := np.flatnonzero(ranks["at"] < ranks["stop"]).tolist():
        _refuse(programs, stuck[0], int(ranks["at"][stuck[0]]))
    comm_start, comm_end = np.full(n, np.nan), np.full(n, np.nan)
    comm_start[launches], comm_end[launches] = in_rounds["began"], in_rounds["over"]
    for halves in (wires.send, wires.receive):
        mine = halves >= 0
        comm_start[halves[mine]], comm_end[halves[mine]] = carried_by["sent"][mine], carried_by["arrived"][mine]
    return Times(code["start"].copy(), code["end"].copy(), comm_start, comm_end)


def _refuse(programs: Programs, rank: int, index: int) -> None:
    op, round_ = Op(int(programs.op[index])), int(programs.round[index])
    raise ValueError(
        f"simulate: rank {rank} stands still forever at instruction {index - int(programs.offsets[rank])}, "
        f"{op.name.lower()} of round {round_}: a rank that the round needs never gets there; hsap.verify says what is "
        "wrong with the plan"
    )


class _Rounds:
    """Finds a rank's launch or AllToAll of a round; rounds of all ranks are numbered in instruction order."""

    def __init__(self, programs: Programs, launches: np.ndarray) -> None:
        self.keys = programs.rank[launches] << 31 | programs.round[launches]
        self.order = order_of(self.keys)
        self.keys = self.keys[self.order]

    def find(self, rank: np.ndarray, round_: np.ndarray) -> np.ndarray:
        """Number of the rank's round; -1 where it doesn't launch it: int64 [n]."""
        if not len(self.keys):
            return np.full(len(rank), -1)
        wanted = rank.astype(np.int64) << 31 | round_
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[place] == wanted, self.order[place], -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Wires:
    """Messages with their rounds at both ends, ordered as ports serve them: int64 [m] unless said.

    src, dst: rounds (of all ranks) at either end. out_next, in_next: the message that has the sender's, the receiver's
    port after this one; -1 for none. send, receive: instruction indices of the halves, -1 for AllToAlls. touching: the
    messages of round g at [touching_from[g], touching_from[g + 1]). left: messages a round needs, [num_rounds]; halves
    without another half count, so that such rounds never end.
    """

    src: np.ndarray
    dst: np.ndarray
    transfer_s: np.ndarray
    latency_s: np.ndarray
    out_next: np.ndarray
    in_next: np.ndarray
    send: np.ndarray
    receive: np.ndarray
    touching_from: np.ndarray
    touching: np.ndarray
    left: np.ndarray


def _wires(programs: Programs, rounds: _Rounds, carried: Flows, messages: Messages) -> _Wires:
    num_ranks, num_rounds = programs.num_ranks, len(rounds.keys)
    at_rank = programs.rank
    # In the order of ports: up from the nearest, so that everybody's exchange with everybody meets no busy port.
    order = order_of((carried.dst - carried.src) % num_ranks * num_ranks + carried.src)
    # A piece of an AllToAll without bytes isn't sent; an empty Send is, and its receive waits for it.
    order = order[(programs.op[carried.at[order]] == Op.SEND) | (carried.num_bytes[order] > 0)]
    at, dst_rank = carried.at[order], carried.dst[order]
    is_send = programs.op[at] == Op.SEND
    src = rounds.find(at_rank[at], programs.round[at])
    receive = np.full(len(at), -1)
    receive[is_send] = _receives(programs, at[is_send], dst_rank[is_send])
    met = ~is_send | (receive >= 0)
    dst = np.where(met, rounds.find(dst_rank, programs.round[at]), -1)
    halves = np.flatnonzero((programs.op == Op.SEND) | (programs.op == Op.RECV))
    joined = rounds.find(at_rank[halves], programs.round[halves])
    joined = np.concatenate([joined, src[~is_send], dst[~is_send]])
    left = np.bincount(joined[joined >= 0], minlength=num_rounds)
    kept = np.flatnonzero((src >= 0) & (dst >= 0))
    order, src, dst, at, is_send, receive = (x[kept] for x in (order, src, dst, at, is_send, receive))
    crosses = messages.crosses[order].astype(np.int64)
    touching = np.concatenate([src, dst])
    by_round = order_of(touching)
    return _Wires(
        src,
        dst,
        messages.transfer_s[order],
        messages.latency_s[order],
        _next_on(2 * src + crosses),
        _next_on(2 * dst + crosses),
        np.where(is_send, at, -1),
        receive,
        np.searchsorted(touching[by_round], np.arange(num_rounds + 1)),
        by_round % max(len(src), 1),
        left,
    )


def _receives(programs: Programs, sends: np.ndarray, dst: np.ndarray) -> np.ndarray:
    """Find the receive that each send meets: the same round, and the same place between the two ranks; -1 for none."""
    receives = np.flatnonzero(programs.op == Op.RECV)
    ranks = programs.num_ranks
    keys = (programs.rank[sends] * ranks + dst) << 31 | programs.round[sends]
    wanted = (programs.peer[receives].astype(np.int64) * ranks + programs.rank[receives]) << 31
    wanted |= programs.round[receives]
    by_key, by_wanted = order_of(keys), order_of(wanted)
    keys, wanted = keys[by_key], wanted[by_wanted]
    place = np.arange(len(keys)) - np.searchsorted(keys, keys) + np.searchsorted(wanted, keys)
    found = place < np.searchsorted(wanted, keys, side="right")
    out = np.full(len(sends), -1)
    out[by_key[found]] = receives[by_wanted[place[found]]]
    return out


def _next_on(port: np.ndarray) -> np.ndarray:
    """Message that each message's port serves after it, -1 for the last: int64 [m]. port: in the order of serving."""
    out = np.full(len(port), -1)
    order = order_of(port)
    follows = np.flatnonzero(port[order][1:] == port[order][:-1])
    out[order[follows]] = order[follows + 1]
    return out


def _columns(n: int, **columns) -> np.ndarray:
    """Lay columns side by side, a record per row: loops then pass few arrays, and what belongs together is near."""
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    out = np.empty(n, [(name, column.dtype) for name, column in arrays.items()])
    for name, column in arrays.items():
        out[name] = column
    return out


@loop
def _run(code, ranks, rounds, wires, touching, ready):
    """Run ranks and messages in any order that their needs allow; times don't depend on which.

    code, ranks, rounds, wires: records, see `tick`. touching: see `_Wires`. ready: messages whose needs are met, behind
    their number.
    """
    for rank in range(len(ranks)):
        _advance(code, ranks, rounds, wires, touching, ready, rank)
        while ready[0]:
            i = ready[ready[0]]
            ready[0] -= 1
            free = wires[i].sent + wires[i].transfer_s
            arrived = free + wires[i].latency_s
            wires[i].arrived = arrived
            if wires[i].out_next >= 0:
                _allow(wires, ready, wires[i].out_next, free)
            if wires[i].in_next >= 0:
                _allow(wires, ready, wires[i].in_next, free)
            for g in (wires[i].src, wires[i].dst):
                rounds[g].over = max(rounds[g].over, arrived)
                rounds[g].left -= 1
                if rounds[g].left == 0:
                    _finish(code, ranks, rounds, wires, touching, ready, rounds[g].rank)


@inner
def _finish(code, ranks, rounds, wires, touching, ready, rank):
    """Go on from a rank's round that is over: with the next one, and with the stream if it waits for that."""
    before, here = ranks[rank].current, ranks[rank].at
    _communicate(ranks, rounds, wires, touching, ready, rank)
    if here < ranks[rank].stop and before <= code[here].round < ranks[rank].current:
        _advance(code, ranks, rounds, wires, touching, ready, rank)


@inner
def _allow(wires, ready, i, when):
    """Let a message start at `when` as far as one of its needs goes; queue it if that was the last."""
    wires[i].sent = max(wires[i].sent, when)
    wires[i].needs -= 1
    if wires[i].needs == 0:
        ready[0] += 1
        ready[ready[0]] = i


@inner
def _communicate(ranks, rounds, wires, touching, ready, rank):
    """Begin a rank's rounds as far as they are launched and the ones before them over."""
    g = ranks[rank].current
    while g < ranks[rank].stop_round and rounds[g].launched >= 0:
        if rounds[g].began < 0:
            began = rounds[g].launched
            if g > ranks[rank].first_round:
                began = max(began, rounds[g - 1].over)
            rounds[g].began = began
            rounds[g].over = began
            for place in range(rounds[g].touching, rounds[g].touching_stop):
                _allow(wires, ready, touching[place], began)
        if rounds[g].left > 0:
            break
        g += 1
    ranks[rank].current = g


@inner
def _advance(code, ranks, rounds, wires, touching, ready, rank):
    """Run a rank's compute stream until its end or until it has to wait."""
    i, t = ranks[rank].at, ranks[rank].now
    while i < ranks[rank].stop:
        kind, g = code[i].kind, code[i].round
        fresh = kind == _LAUNCH or (kind == _EXCHANGE and rounds[g].launched < 0)
        if kind != _EXCHANGE or fresh:
            code[i].start = t
            t += code[i].seconds
        if fresh:
            rounds[g].launched = t
            _communicate(ranks, rounds, wires, touching, ready, rank)
        if kind in (_WAIT, _EXCHANGE):
            if g < 0 or ranks[rank].current <= g:
                break
            t = max(t, rounds[g].over)
        code[i].end = t
        i += 1
    ranks[rank].at, ranks[rank].now = i, t
