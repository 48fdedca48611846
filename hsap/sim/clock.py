"""Clock: when every instruction, round and message starts and ends, given what each costs.

A rank has two lines that run side by side:

- the *compute stream* does its instructions in order. Send and Recv take no time there: they join their round. Launch
  hands the round to the communicator and goes on; Wait stops until that round is over. AllToAll reorders, launches its
  round and stops until it is over.
- the *communicator* does one round at a time, in the order of launching. A rank begins a round once it has launched it
  and its round before is over; it ends with the round's last message.

A message starts when both ends have begun its round (rendezvous: nothing is buffered) and its ports are free. A rank
has a port for sending and one for receiving on each kind of link, inside the node and between nodes; messages of a
round on one port go one after another, nearest ranks upwards first (dst - src mod ranks), then as the sender lists
them. Its ports are taken while bytes flow; it arrives a latency later. These are the rules of `hsap.verify`, so that a
verified plan always ends.

What is shared slows down those who share it, at every moment (see `hsap.sim.share`): network cards, links that don't
do both directions at once, a device that also communicates, cores of a host.

Where a cluster shares nothing, every time is a maximum of sums of costs: exact, and never later where a cost is lower.
Where it shares, times are still exact for these rules, but a cheaper instruction may let two things meet that missed
each other before, so that single times, and by little the whole, may rise. What the fixed order of a port gives up: a
message that could go may queue behind one whose other end isn't there yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsap.ir.effects import Flows, partners
from hsap.ir.program import Op, Programs
from hsap.ir.sort import order_of
from hsap.sim import events
from hsap.sim.cost import Messages
from hsap.sim.share import Shares

_KIND = np.full(len(Op), events.TIMED, np.int8)
_KIND[[Op.LAUNCH, Op.WAIT, Op.ALL_TO_ALL]] = events.LAUNCH, events.WAIT, events.EXCHANGE


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Seconds from the start of the stream, float64 [n] each, a value per instruction.

    start, worked, end: on the compute stream; an instruction's own work is over when it has worked, and what Wait and
    AllToAll do then is stand still. comm_start, comm_end: on the communicator: of the message for Send and Recv, of the
    round for Launch and AllToAll, NaN for the others.
    """

    start: np.ndarray
    worked: np.ndarray
    end: np.ndarray
    comm_start: np.ndarray
    comm_end: np.ndarray


def tick(
    programs: Programs, seconds: np.ndarray, carried: Flows, messages: Messages, shares: Shares | None = None
) -> Times:
    """Run all ranks' streams against the clock.

    seconds: float64 [n] of `compute_seconds`. carried, messages: `flows` of the programs and their prices. shares: what
    ranks share (None: nothing). ValueError where the streams don't end, with a rank and an instruction that waits
    forever; they end for every verified plan.
    """
    n = len(programs)
    shares = Shares.nothing(programs.num_ranks) if shares is None else shares
    kind = _KIND[programs.op]
    launches = np.flatnonzero((kind == events.LAUNCH) | (kind == events.EXCHANGE))
    rounds = _Rounds(programs, launches)
    wires = _wires(programs, rounds, carried, messages)
    round_of = np.full(n, -1)
    round_of[launches] = np.arange(len(launches))
    waits = np.flatnonzero(kind == events.WAIT)
    round_of[waits] = rounds.find(programs.rank[waits], programs.round[waits])
    state = _state(programs, seconds, kind, round_of, launches, wires, shares)
    events.run(state)
    code, ranks = state.code, state.ranks
    if stuck := np.flatnonzero(ranks["at"] < ranks["stop"]).tolist():
        _refuse(programs, stuck[0], int(ranks["at"][stuck[0]]))
    comm_start, comm_end = np.full(n, np.nan), np.full(n, np.nan)
    comm_start[launches], comm_end[launches] = state.rounds["began"], state.rounds["over"]
    for halves in (wires.send, wires.receive):
        mine = halves >= 0
        comm_start[halves[mine]], comm_end[halves[mine]] = state.wires["sent"][mine], state.wires["arrived"][mine]
    return Times(code["start"].copy(), code["worked"].copy(), code["end"].copy(), comm_start, comm_end)


def _state(
    programs: Programs, seconds: np.ndarray, kind: np.ndarray, round_of: np.ndarray, launches: np.ndarray,
    wires: _Wires, shares: Shares,
) -> events.State:  # fmt: skip
    """Lay out what the loop runs on."""
    num_ranks, num_wires = programs.num_ranks, len(wires.src)
    first_round = np.searchsorted(launches, programs.offsets)
    first_touched, stop_touched = shares.touched()
    code = _columns(len(programs), kind=kind, round=round_of, seconds=seconds, start=0.0, worked=0.0, end=0.0)
    ranks = _columns(
        num_ranks, at=programs.offsets[:-1], stop=programs.offsets[1:], current=first_round[:-1],
        stop_round=first_round[1:], node=shares.node, card=shares.card, first_touched=first_touched,
        stop_touched=stop_touched, left=0.0, since=0.0, speed=0.0, begun=False, has_worked=False, working=False,
        counted=False, busy=False, sending=np.full((num_ranks, 2), -1), receiving=np.full((num_ranks, 2), -1),
    )  # fmt: skip
    in_rounds = _columns(
        len(launches), rank=programs.rank[launches], left=wires.left, launched=-1.0, began=-1.0, over=0.0,
        touching=wires.touching_from[:-1], touching_stop=wires.touching_from[1:],
    )  # fmt: skip
    # A message needs both ends to begin, and each message before it on a port to be sent.
    needs = np.full(num_wires, 2)
    for after in (wires.out_next, wires.in_next):
        needs[after[after >= 0]] += 1
    carried_by = _columns(
        num_wires, src=wires.src, dst=wires.dst, crosses=wires.crosses, transfer_s=wires.transfer_s,
        latency_s=wires.latency_s, sent=0.0, arrived=0.0, left=0.0, since=0.0, speed=0.0, flowing=False, needs=needs,
        out_next=wires.out_next, in_next=wires.in_next,
    )  # fmt: skip
    alone = np.array_equal(shares.card, shares.card[:1] + np.arange(num_ranks)) or not wires.crosses.any()
    return events.State(
        code, ranks, in_rounds, carried_by, wires.touching,
        np.zeros((int(shares.card.max(initial=-1)) + 1, 2), np.int64),
        np.zeros((int(shares.node.max(initial=-1)) + 1, 2), np.int64),
        np.zeros(num_ranks + num_wires, np.int64), np.full(num_ranks + num_wires, -1),
        np.zeros(num_ranks + num_wires), np.zeros(1, np.int64),
        not alone or shares.duplex < 2 or math.isfinite(shares.cores),
        shares.duplex, shares.comm_share, shares.cores, shares.comm_cores,
    )  # fmt: skip


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

    src, dst: rounds (of all ranks) at either end. crosses: 1 where a message leaves its node, else 0. out_next,
    in_next: the message that has the sender's, the receiver's port after this one; -1 for none. send, receive:
    instruction indices of the halves, -1 for AllToAlls. touching: the messages of round g at [touching_from[g],
    touching_from[g + 1]). left: messages a round needs, [num_rounds]; halves without another half count, so that such
    rounds never end.
    """

    src: np.ndarray
    dst: np.ndarray
    crosses: np.ndarray
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
    receive[is_send] = partners(programs)[at[is_send]]
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
        crosses,
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


def _next_on(port: np.ndarray) -> np.ndarray:
    """Message that each message's port serves after it, -1 for the last: int64 [m]. port: in the order of serving."""
    out = np.full(len(port), -1)
    order = order_of(port)
    follows = np.flatnonzero(port[order][1:] == port[order][:-1])
    out[order[follows]] = order[follows + 1]
    return out


def _columns(n: int, **columns: Any) -> np.ndarray:
    """Lay columns side by side, a record per row: loops then pass few arrays, and what belongs together is near."""
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    out = np.empty(n, [(name, column.dtype, column.shape[1:]) for name, column in arrays.items()])
    for name, column in arrays.items():
        out[name] = column
    return out
