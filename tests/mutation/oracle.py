"""Oracle: runs a plan on a model machine and says whether it gives the right answer. Independent of `hsap.verify`.

Attention becomes multilinear forms over Z/2^64, which tell apart every way to miss, repeat or misplace a pair. A rank
has one arena of 8-byte cells that buffers truly share by their offsets; cells never written are poison. Transfers are
judged by rendezvous: nothing is buffered, a rank has one group in flight, operations of a pair of ranks meet in order.
Data moves either as early or as late as a real machine might. Plans must be of fp64, so that every element is a cell.
"""

from __future__ import annotations

import itertools

import numpy as np

from hsap.ir.program import OPERANDS, Access, Op, Role, Space
from hsap.ir.reshard import reshard
from hsap.ir.slice import dense
from tests.mutation.cells import POISON, Cells, Wrong, backward, forward, row_index

PARTIAL = (Role.O, Role.DQ, Role.DKV)
BROKEN = (Wrong, IndexError, ValueError, KeyError, OverflowError, TypeError)
"""What running a wrong plan may raise: the model's own verdict, or Python's on a number that makes no sense."""


TIMINGS = ((False, False), (True, False), (True, True))
"""(late, backwards): when data moves, and whether the last ranks run ahead of the first."""


def failure(plan, base=None) -> str | None:
    """Say what goes wrong when the plan is run, under any of the timings tried; None if nothing does.

    base: a plan known to be right, whose programs needn't be run again where `plan` shares them and all else.
    """
    shared = base is not None and plan.slices is base.slices and plan.spans is base.spans
    shared = shared and plan.rank_rows is base.rank_rows and plan.column_rows is base.column_rows
    for mask, direction in itertools.product(range(len(plan.programs)), (0, 1)):
        if shared and plan.programs[mask][direction] is base.programs[mask][direction]:
            continue
        for late, backwards in TIMINGS:
            try:
                Machine(plan, mask, direction, late, backwards).run()
            except BROKEN as error:
                return f"mask {mask} direction {direction} late {late} backwards {backwards}: {error!r}"
    return None


def _values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1 << 63, shape, np.uint64)


class Machine:
    """All ranks of one program. late: data moves when somebody waits for it, else as soon as both ends are there."""

    def __init__(self, plan, mask: int, direction: int, late: bool, backwards: bool) -> None:
        self.plan, self.direction, self.late, self.heads = plan, direction, late, plan.problem.heads
        self.programs, self.table = plan.programs[mask][direction], plan.slices[mask]
        self.cells = Cells(plan, mask, direction)
        self.b, self.intra, self.num_ranks = self.cells.b, self.cells.intra, plan.num_ranks
        n, h, g = plan.problem.layout.num_tokens, self.heads.num_q_heads, self.heads.num_kv_heads
        self.group = np.arange(h) // self.heads.group
        self.truth = {Role.Q: _values(1, n, h, 1), Role.KV: _values(2, n, g, 2), Role.DO: _values(3, n, h, 3)}
        self.visible = dense(plan.problem.slices(mask), n).astype(np.uint64)
        self.order = range(self.num_ranks)[:: -1 if backwards else 1]
        self.at, self.stop = self.programs.offsets[:-1].tolist(), self.programs.offsets[1:].tolist()
        self.joined = [{} for _ in range(self.num_ranks)]  # round -> transfers that wait for its launch
        self.queue = [[] for _ in range(self.num_ranks)]  # (round, [transfer, whether done]) in launch order
        self.launched = [set() for _ in range(self.num_ranks)]
        self.over = [set() for _ in range(self.num_ranks)]  # rounds
        self.exchanged = set()  # instructions

    def run(self) -> None:
        """Run to the end; Wrong where it doesn't get there or the results are not the truth."""
        self._fill()
        moving = True
        while moving:
            moving = False
            for rank in self.order:
                while self.at[rank] < self.stop[rank] and self._step(rank):
                    self.at[rank] += 1
                    moving = True
                    if not self.late:
                        self._advance()
            moving |= self._advance()
        if self.at != self.stop or any(self.queue):
            raise Wrong(f"stuck at {self.at}")
        self._compare()

    def _fill(self) -> None:
        wanted = (Role.Q, Role.KV, Role.DO) if self.direction else (Role.Q, Role.KV)
        for b, role in self._complete(Space.INPUT, wanted):
            self.cells.store(b, self.truth[role][self.cells.home_rows(b)][:, self.cells.home_heads(b)])

    def _complete(self, space: Space, roles) -> list[tuple[int, Role]]:
        """List the buffers of a space; every rank must have each role once, with its home's rows and heads."""
        found = [(b, Role(int(self.b.role[b]))) for b in np.flatnonzero(self.b.space == space).tolist()]
        have = sorted((self.cells.rank_of(b), int(role)) for b, role in found)
        if have != sorted(itertools.product(range(self.num_ranks), [int(role) for role in roles])):
            raise Wrong(f"{space.name} buffers")
        for b, _ in found:
            if not np.array_equal(self.cells.rows(b), self.cells.home_rows(b)):
                raise Wrong(f"rows of {space.name}")
            heads = self.cells.home_heads(b)
            share = self.heads.shares(self.intra)[self.cells.rank_of(b) % self.intra]
            first, count = (share.kv_first, share.kv_count) if self.cells.is_kv(b) else (share.q_first, share.q_count)
            if self.cells.outer(b):
                first, count = 0, self.heads.num_kv_heads if self.cells.is_kv(b) else self.heads.num_q_heads
            if heads != slice(first, first + count):
                raise Wrong(f"heads of {space.name}")
        return found

    def _compare(self) -> None:
        q, kv = self.truth[Role.Q], self.truth[Role.KV]
        if self.direction == 0:
            results = {Role.O: forward(self.visible, q, kv[:, self.group])}
        else:
            dq, per_head = backward(self.visible, q, kv[:, self.group], self.truth[Role.DO])
            dkv = np.zeros_like(kv)
            np.add.at(dkv, (slice(None), self.group), per_head)
            results = {Role.DQ: dq, Role.DKV: dkv}
        kept = {Role.Q: q, Role.KV: kv} if self.direction == 0 and self.intra > 1 else {}
        for space, truth in ((Space.OUTPUT, results), (Space.KEPT, kept)):
            for b, role in self._complete(space, truth):
                wanted = truth[role][self.cells.home_rows(b)][:, self.cells.home_heads(b)]
                if not np.array_equal(self.cells.load(b), wanted):
                    raise Wrong(f"wrong {role.name} on rank {self.cells.rank_of(b)}")

    def _step(self, rank: int) -> bool:
        """Execute the rank's next instruction; False where it must wait."""
        i = self.at[rank]
        x = self.programs.instruction(i)
        for b, access in zip(x.buf, OPERANDS[x.op]):
            if not self.b.offsets[rank] <= b < self.b.offsets[rank + 1]:
                raise Wrong("another rank's buffer")
            if access == Access.WRITE and (self.b.space[b] == Space.INPUT or self.b.acc[b]):
                raise Wrong("an input or an accumulator is overwritten")
            if access == Access.ADD and not self.b.acc[b]:
                raise Wrong("not an accumulator")
            if self.b.role[b] != Role.NONE:
                self.cells.begin(b)
        match x.op:
            case Op.SEND | Op.RECV:
                self._join(rank, x)
            case Op.LAUNCH:
                self._launch(rank, x.round)
            case Op.WAIT:
                if x.round not in self.launched[rank]:
                    raise Wrong("waits for what isn't launched")
                self._advance()
                return x.round in self.over[rank]
            case Op.ALL_TO_ALL:
                return self._all_to_all(rank, x)
            case Op.ATTEND | Op.ATTEND_GRAD:
                self._attend(rank, x)
            case Op.MERGE | Op.SUM | Op.COPY:
                self._fold(x)
        return True

    def _join(self, rank: int, x) -> None:
        b = x.buf[0]
        if not 0 <= x.peer < self.num_ranks or x.peer == rank or x.peer % self.intra != rank % self.intra:
            raise Wrong("peer")
        if x.round in self.launched[rank] or self.b.acc[b] or self.b.role[b] != x.role:
            raise Wrong("joins a round that has started, or has no such data")
        if tuple(self.b.heads[b].tolist()) != (x.heads.q_first, x.heads.q_count, x.heads.kv_first, x.heads.kv_count):
            raise Wrong("heads that aren't one piece of memory")
        self.joined[rank].setdefault(x.round, []).append(x)

    def _launch(self, rank: int, round: int) -> None:
        if round in self.launched[rank] or round not in self.joined[rank]:
            raise Wrong("launched twice or without a transfer")
        self.launched[rank].add(round)
        group = [[x, False] for x in self.joined[rank].pop(round)]
        for x, _ in group:
            if x.op == Op.RECV:  # its cells may change from now on
                self.cells.put(x.buf[0], x.rows, x.heads, POISON)
        self.queue[rank].append((round, group))

    def _fold(self, x) -> None:
        source, target = x.buf
        roles = {Op.MERGE: (Role.O,), Op.SUM: (Role.DQ, Role.DKV), Op.COPY: tuple(Role)[1:]}[x.op]
        if not self.b.role[source] == self.b.role[target] == x.role or x.role not in roles:
            raise Wrong("roles")
        part = self.cells.get(source, x.rows, x.heads)
        if x.op != Op.COPY:
            part = part + self.cells.get(target, x.rows, x.heads)
        self.cells.put(target, x.rows, x.heads, part)

    def _advance(self) -> bool:
        """Let operations at the fronts of the ranks' groups meet; returns whether anything did."""
        any_met, met = False, True
        while met:
            met = False
            for rank in range(self.num_ranks):
                for entry in self.queue[rank][0][1] if self.queue[rank] else ():
                    met |= entry[0].op == Op.SEND and self._meet(rank, entry)
                if self.queue[rank] and all(done for _, done in self.queue[rank][0][1]):
                    self.over[rank].add(self.queue[rank].pop(0)[0])
                    met = True
            any_met |= met
        return any_met

    def _meet(self, rank: int, entry) -> bool:
        x, done = entry
        if done or not self.queue[x.peer]:
            return False

        def open_of(at: int, op: Op, peer: int) -> list:
            return [e for e in self.queue[at][0][1] if not e[1] and e[0].op == op and e[0].peer == peer]

        theirs = open_of(x.peer, Op.RECV, rank)
        if open_of(rank, Op.SEND, x.peer)[0] is not entry or not theirs:
            return False
        y = theirs[0][0]
        values = self.cells.get(x.buf[0], x.rows, x.heads)
        if values.shape != self.cells.get(y.buf[0], y.rows, y.heads).shape or (x.role in PARTIAL) != (
            y.role in PARTIAL
        ):
            raise Wrong("what is sent isn't as large as what is expected")
        self.cells.put(y.buf[0], y.rows, y.heads, values)
        entry[1] = theirs[0][1] = True
        return True

    def _all_to_all(self, rank: int, x) -> bool:
        if self.at[rank] in self.exchanged:
            return True
        self._advance()
        first = rank - rank % self.intra
        peers = range(first, first + self.intra)
        if any(self.queue[p] or self.at[p] >= self.stop[p] or self.at[p] in self.exchanged for p in peers):
            return False
        together = [self.programs.instruction(self.at[p]) for p in peers]
        if any(y.op != Op.ALL_TO_ALL for y in together):
            return False
        for y in together:
            for b in y.buf[:2]:
                self.cells.begin(b)
        self._exchange(first, x.role, together)
        self.exchanged.update(self.at[p] for p in peers)
        return True

    def _exchange(self, first: int, role: Role, together) -> None:
        """Move an AllToAll's values, after checking that each buffer is what the exchange takes it for."""
        tokens = [len(self.cells.tokens[first + j]) for j in range(self.intra)]
        column = np.concatenate(self.cells.tokens[first : first + self.intra])
        shares = self.heads.shares(self.intra)
        outward = bool(self.b.space[together[0].buf[1]] != Space.OUTPUT)
        for j, y in enumerate(together):
            source, target, scratch = y.buf
            own, mine = (source, target) if outward else (target, source)
            ends = y.role == role == self.b.role[source] == self.b.role[target] and self.b.role[scratch] == Role.NONE
            ends &= self.b.space[own] == (Space.INPUT if outward else Space.OUTPUT) and self.cells.outer(own)
            ends &= bool(self.b.acc[mine]) != outward and self.b.space[mine] in (Space.KEPT, Space.ARENA)
            ends &= np.array_equal(self.cells.rows(own), self.cells.tokens[first + j])
            ends &= np.array_equal(self.cells.rows(mine), column)
            whole = [0, self.heads.num_q_heads, 0, self.heads.num_kv_heads]
            ends &= self.b.heads[own].tolist() == whole
            ends &= self.b.heads[mine].tolist() == [0, shares[j].q_count, 0, shares[j].kv_count]
            if not ends:
                raise Wrong("AllToAll buffers")
            size = reshard(role, outward, self.heads, self.plan.precision, tokens, j).scratch_bytes
            self.cells.ruin(scratch, size)
        parts = [self.cells.load(y.buf[0]) for y in together]
        for j, y in enumerate(together):
            target = y.buf[1]
            heads, start = self.cells.home_heads(target), sum(tokens[:j])
            out = np.zeros_like(self.cells.load(target))
            for i, y_i in enumerate(together):
                begin = sum(tokens[:i])
                if outward:
                    out[begin : begin + tokens[i]] = parts[i][:, heads]
                else:
                    out[:, self.cells.home_heads(y_i.buf[0])] += parts[i][start : start + tokens[j]]
            self.cells.store(target, out)

    def _attend(self, rank: int, x) -> None:
        lo, hi = x.slices
        roles = (Role.Q, Role.KV, Role.O) if self.direction == 0 else (Role.Q, Role.KV, Role.DO, Role.DQ, Role.DKV)
        same = [int(self.b.role[b]) for b in x.buf] == list(roles)
        index = self.programs.index[lo:hi]
        same &= 0 <= lo <= hi <= len(self.programs.index) and index.min(initial=0) >= 0
        if not same or (x.op == Op.ATTEND_GRAD) != bool(self.direction):
            raise Wrong("slices or roles")
        count = dense(self.table[index], self.plan.problem.layout.num_tokens).astype(np.uint64)
        sides = np.flatnonzero(count.any(axis=1)), np.flatnonzero(count.any(axis=0))
        place = {
            role: (
                b,
                row_index(self.cells.rows(b), sides[role in (Role.KV, Role.DKV)]),
                self.cells.head_range(b, x.heads),
            )
            for b, role in zip(x.buf, roles)
        }

        def pick(role: Role) -> np.ndarray:
            b, rows, heads = place[role]
            return self.cells.load(b)[rows][:, heads]

        def add(role: Role, values: np.ndarray) -> None:
            b, rows, heads = place[role]
            whole = self.cells.load(b)
            whole[rows, heads] += values
            self.cells.store(b, whole)

        share = self.heads.shares(self.intra)[rank % self.intra]
        of_kv = (share.q_first + x.heads.q_first + np.arange(x.heads.q_count)) // self.heads.group
        of_kv -= share.kv_first + x.heads.kv_first
        if len(of_kv) and not 0 <= of_kv.min() <= of_kv.max() < x.heads.kv_count:
            raise Wrong("query heads without their KV heads")
        pairs, kv = count[np.ix_(*sides)], pick(Role.KV)
        if self.direction == 0:
            add(Role.O, forward(pairs, pick(Role.Q), kv[:, of_kv]))
            return
        dq, per_head = backward(pairs, pick(Role.Q), kv[:, of_kv], pick(Role.DO))
        dkv = np.zeros_like(kv)
        np.add.at(dkv, (slice(None), of_kv), per_head)
        add(Role.DQ, dq)
        add(Role.DKV, dkv)
