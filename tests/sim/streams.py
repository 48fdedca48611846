"""Small streams written by hand, and a slow simulation of any streams to compare the clock with."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from decimal import Decimal, getcontext

import numpy as np

from hsap.ir.effects import Flows
from hsap.ir.program import NONE, Buffers, Op, Programs
from hsap.sim.cost import Messages
from hsap.sim.share import Shares

COUNT = itertools.count()
EMPTY = Buffers(np.zeros(1, int), *(np.zeros(0, int) for _ in range(3)), np.zeros((0, 2)), np.zeros((0, 4)),
                np.zeros(0), np.zeros(0))  # fmt: skip


def streams(*ranks: list[tuple]) -> tuple[Programs, np.ndarray, Flows, Messages]:
    """Arguments of `tick` for hand-written streams.

    An instruction is ("attend", seconds), ("send", peer, round, transfer seconds[, latency[, crosses]]),
    ("recv", peer, round), ("launch", round), ("wait", round) or ("all_to_all", round, seconds, {peer: transfer}).
    """
    op, peer, round_, seconds, carried = [], [], [], [], []
    offsets = [0]
    for rank, stream in enumerate(ranks):
        for name, *rest in stream:
            code = Op[name.upper()]
            op.append(code)
            moved = code in (Op.SEND, Op.RECV)
            peer.append(rest[0] if moved else NONE)
            round_.append(NONE if code == Op.ATTEND else rest[1 if moved else 0])
            seconds.append({Op.ATTEND: rest[0], Op.ALL_TO_ALL: rest[1:2]}.get(code, 0.0))
            if code == Op.SEND:
                carried.append((len(op) - 1, rank, rest[0], *rest[2:], *(0.0, False)[len(rest) - 3 :]))
            if code == Op.ALL_TO_ALL:
                seconds[-1] = rest[1]
                carried += [(len(op) - 1, rank, to, transfer, 0.0, False) for to, transfer in rest[2].items()]
        offsets.append(len(op))
    at, src, dst, transfer, latency, crosses = zip(*carried) if carried else ((),) * 6
    n = len(op)
    programs = Programs(
        np.array(offsets), np.array(op), np.full(n, -1), np.array(peer), np.array(round_), np.full((n, 5), NONE),
        np.full((n, 2), NONE), np.full((n, 2), NONE), np.zeros((n, 4), int), np.zeros(n, int), np.zeros(0, int), EMPTY,
    )  # fmt: skip
    columns = (np.array(column, np.int64) for column in (at, src, dst, [1] * len(at)))
    prices = Messages(np.array(crosses, bool), np.array(transfer, float), np.array(latency, float))
    return programs, np.array(seconds, float), Flows(*columns), prices


getcontext().prec = 40


class SlowClock:
    """The semantics of `hsap.sim.clock`'s and `hsap.sim.share`'s first words, from one event to the next.

    Nothing is kept: between any two events all speeds are worked out anew. In 40 digits, so that what differs is the
    other clock's rounding.
    """

    def __init__(
        self, programs: Programs, seconds, carried: Flows, prices: Messages, shares: Shares | None = None
    ) -> None:
        self.programs, self.seconds = programs, [Decimal(s) for s in seconds.tolist()]
        self.shares = shares or Shares.nothing(programs.num_ranks)
        n = len(programs)
        self.start, self.worked, self.end, self.comm_start, self.comm_end = (np.full(n, np.nan) for _ in range(5))
        self.now = Decimal(0)
        self.ranks = range(programs.num_ranks)
        self.working = {}  # rank: work that is left
        self.flowing = []  # messages whose bytes flow
        self.arriving = []  # (when, number, message)
        self.launched = [[] for _ in self.ranks]  # rounds in the order of launching: (round, instruction)
        self.begun, self.over = {}, set()  # (rank, round)
        self.open = defaultdict(int)  # messages that a rank's round still needs
        self.messages = self._messages(carried, prices)
        self.ports = defaultdict(list)
        served = lambda m: ((m["dst"] - m["src"]) % len(self.ranks), m["src"], m["at"])  # noqa: E731
        for message in sorted(self.messages, key=served):
            for port in message["ports"]:
                self.ports[port].append(message)

    def _messages(self, carried: Flows, prices: Messages) -> list[dict]:
        p, out, receives = self.programs, [], defaultdict(list)
        for i in np.flatnonzero(p.op == Op.RECV).tolist():
            receives[int(p.peer[i]), int(p.rank[i]), int(p.round[i])].append(i)
        rows = zip(carried.at.tolist(), carried.src.tolist(), carried.dst.tolist(), carried.num_bytes.tolist(),
                   prices.transfer_s.tolist(), prices.latency_s.tolist(), prices.crosses.tolist())  # fmt: skip
        for at, src, dst, num_bytes, transfer, latency, crosses in rows:
            round_, is_send = int(p.round[at]), p.op[at] == Op.SEND
            if not is_send and not num_bytes:
                continue
            ends = [(src, round_), (dst, round_)]
            halves = [at, receives[src, dst, round_].pop(0)] if is_send else []
            ports = [(src, round_, "out", crosses), (dst, round_, "in", crosses)]
            out.append({"at": at, "src": src, "dst": dst, "left": Decimal(transfer), "latency": Decimal(latency),
                        "ends": ends, "halves": halves, "ports": ports, "crosses": crosses,
                        "started": False})  # fmt: skip
            for end in ends:
                self.open[end] += 1
        return out

    def host_speed(self, node: int) -> Decimal:
        wanted = sum((Decimal(1) for rank in self.working if self.shares.node[rank] == node), Decimal(0))
        ends = [rank for message in self.flowing for rank in (message["src"], message["dst"])]
        wanted += Decimal(self.shares.comm_cores) * sum(self.shares.node[rank] == node for rank in ends)
        return Decimal(1) if wanted <= Decimal(self.shares.cores) else Decimal(self.shares.cores) / wanted

    def rank_speed(self, rank: int) -> Decimal:
        in_progress = any(key[0] == rank and key not in self.over for key in self.begun)
        own = 1 - Decimal(self.shares.comm_share) if in_progress else Decimal(1)
        return own * self.host_speed(self.shares.node[rank])

    def message_speed(self, message: dict) -> Decimal:
        """Shares of the two ends' links, the smaller one; half duplex and cores take theirs."""
        card, crosses = self.shares.card, message["crosses"]
        place = (lambda rank: card[rank]) if crosses else (lambda rank: rank)
        alike = [other for other in self.flowing if other["crosses"] == crosses]
        out, into = place(message["src"]), place(message["dst"])
        leave = sum(place(other["src"]) == out for other in alike)
        arrive = sum(place(other["dst"]) == into for other in alike)
        speed = Decimal(1) / max(leave, arrive)
        if any(place(other["dst"]) == out or place(other["src"]) == into for other in alike):
            speed *= Decimal(self.shares.duplex) / 2
        return speed * min(self.host_speed(self.shares.node[message[end]]) for end in ("src", "dst"))

    def run(self) -> SlowClock:
        self.waiting = {}
        self.programs_at = [self._stream(rank) for rank in self.ranks]
        for rank in self.ranks:
            self._resume(rank)
        while self.working or self.flowing or self.arriving:
            speeds = {rank: self.rank_speed(rank) for rank in self.working}
            paces = [self.message_speed(message) for message in self.flowing]
            ends = [(self.now + left / speeds[rank], 0, rank) for rank, left in self.working.items()]
            ends += [(self.now + m["left"] / pace, 1, i) for i, (m, pace) in enumerate(zip(self.flowing, paces))]
            ends += self.arriving[:1] and [(self.arriving[0][0], 2, 0)]
            when, kind, index = min(ends)
            passed, self.now = when - self.now, when
            for rank, speed in speeds.items():
                self.working[rank] -= passed * speed
            for message, pace in zip(self.flowing, paces):
                message["left"] -= passed * pace
            if kind == 0:
                del self.working[index]
                self._resume(index)
            elif kind == 1:
                self._sent(self.flowing.pop(index))
            else:
                self._arrived(heapq.heappop(self.arriving)[2])
        assert not self.waiting
        return self

    def _resume(self, rank: int) -> None:
        """Go on until the stream takes time or waits for a round."""
        for what in self.programs_at[rank]:
            if isinstance(what, Decimal):
                self.working[rank] = what
                return
            if what not in self.over:
                self.waiting[rank] = what
                return

    def _stream(self, rank: int):
        p = self.programs
        for i in range(int(p.offsets[rank]), int(p.offsets[rank + 1])):
            op, key = p.op[i], (rank, int(p.round[i]))
            self.start[i] = self.now
            if self.seconds[i]:
                yield self.seconds[i]
            self.worked[i] = self.now
            if op in (Op.LAUNCH, Op.ALL_TO_ALL):
                self.launched[rank].append((key, i))
                self._communicate(rank)
            if op in (Op.WAIT, Op.ALL_TO_ALL):
                yield key
            self.end[i] = self.now

    def _communicate(self, rank: int) -> None:
        for key, i in self.launched[rank]:
            if key not in self.begun:
                self.begun[key] = i
                self.comm_start[i] = self.now
                for port in [port for port in self.ports if port[:2] == key]:
                    self._serve(port)
                self._perhaps_over(key)
            if key not in self.over:
                return

    def _serve(self, port: tuple) -> None:
        message = next(iter(self.ports[port]), None)
        if message is None or message["started"] or any(end not in self.begun for end in message["ends"]):
            return
        if all(self.ports[p][0] is message for p in message["ports"]):
            message["started"] = True
            for half in message["halves"]:
                self.comm_start[half] = self.now
            self.flowing.append(message)

    def _sent(self, message: dict) -> None:
        heapq.heappush(self.arriving, (self.now + message["latency"], next(COUNT), message))
        for port in message["ports"]:
            self.ports[port].pop(0)
        for port in message["ports"]:
            self._serve(port)

    def _arrived(self, message: dict) -> None:
        for half in message["halves"]:
            self.comm_end[half] = self.now
        for end in message["ends"]:
            self.open[end] -= 1
            self._perhaps_over(end)

    def _perhaps_over(self, key: tuple) -> None:
        if key in self.begun and not self.open[key] and key not in self.over:
            self.over.add(key)
            self.comm_end[self.begun[key]] = self.now
            rank = key[0]
            self._communicate(rank)
            if self.waiting.get(rank) == key:
                del self.waiting[rank]
                self._resume(rank)
