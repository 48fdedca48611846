"""Together: changes in several places at once that fit each other, so that nothing seems wrong with any one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from hsap.ir.effects import partners
from hsap.ir.program import Buffers, Op, Programs, Space, typed
from tests.mutation.mutants import Random, in_order, of, pick, with_buffer, with_column


def _pairs(p: Programs) -> np.ndarray:
    """Sends and the receives they meet: int64 [n, 2]."""
    partner = partners(p)
    sends = np.flatnonzero((p.op == Op.SEND) & (partner >= 0))
    return np.stack([sends, partner[sends]], axis=1)


def _two(random: Random, table: np.ndarray) -> np.ndarray | None:
    return table[random.choice(len(table), 2, replace=False)] if len(table) > 1 else None


def _exchanged(p: Programs, names, a, b) -> Programs:
    """Let entries a and b of some columns change places."""
    for name in names:
        table = getattr(p, name)
        p = with_column(p, name, np.r_[a, b], table[np.r_[b, a]])
    return p


def messages_exchange_rows(random, plan, p):
    """Two messages carry each other's rows, at both ends."""
    two = _two(random, _pairs(p))
    return None if two is None else _exchanged(p, ("rows",), two[0], two[1])


def messages_exchange_rounds(random, plan, p):
    two = _two(random, _pairs(p))
    return None if two is None else _exchanged(p, ("round",), two[0], two[1])


def messages_exchange_peers(random, plan, p):
    """Two messages of one rank go to each other's peers, which await the rows that come."""
    pairs = _pairs(p)
    one = pick(random, np.arange(len(pairs)))
    if one is None:
        return None
    end = random.integers(2)  # of one sender, or of one receiver
    like = np.flatnonzero((p.rank[pairs[:, end]] == p.rank[pairs[one, end]]) & (np.arange(len(pairs)) != one))
    other = pick(random, like)
    if other is None:
        return None
    (a, b), (c, d) = pairs[one], pairs[other]
    if end:
        (a, b), (c, d) = (b, a), (d, c)
    p = _exchanged(p, ("peer",), [a], [c])
    return _exchanged(p, ("rows", "heads", "round", "role"), [b], [d])


def messages_exchange_sources(random, plan, p):
    """Two messages of one rank are read from, or written to, each other's buffers."""
    one = pick(random, of(p, Op.SEND, Op.RECV))
    if one is None:
        return None
    alike = (p.op == p.op[one]) & (p.rank == p.rank[one]) & (np.arange(len(p)) != one)
    other = pick(random, np.flatnonzero(alike))
    return None if other is None else _exchanged(p, ("buf",), [one], [other])


def message_is_lost(random, plan, p):
    """A send and its receive are left out, and the launches and waits of rounds that are empty then."""
    pairs = _pairs(p)
    one = pick(random, np.arange(len(pairs)))
    if one is None:
        return None
    gone = list(pairs[one])
    for i in pairs[one]:
        mine = (p.rank == p.rank[i]) & (p.round == p.round[i])
        if (mine & np.isin(p.op, (Op.SEND, Op.RECV))).sum() == 1:
            gone += np.flatnonzero(mine).tolist()
    return _deleted(p, gone)


def message_comes_twice(random, plan, p):
    pairs = _pairs(p)
    one = pick(random, np.arange(len(pairs)))
    return None if one is None else _inserted(p, sorted(pairs[one] + 1), sorted(pairs[one]))


def message_changes_round(random, plan, p):
    """A send and its receive join another round that both ranks have."""
    pairs = _pairs(p)
    one = pick(random, np.arange(len(pairs)))
    if one is None:
        return None
    a, b = pairs[one]
    rounds = np.intersect1d(p.round[p.rank == p.rank[a]], p.round[p.rank == p.rank[b]])
    return with_column(p, "round", [a, b], random.choice(rounds))


def message_is_cut(random, plan, p):
    """A message carries one span less, at both ends, at its beginning or its end."""
    pairs = _pairs(p)
    one = pick(random, np.arange(len(pairs)))
    if one is None:
        return None
    end = random.integers(2)
    return with_column(p, "rows", (pairs[one], end), p.rows[pairs[one], end] + (1, -1)[end])


def rounds_change_places(random, plan, p):
    """Two rounds are exchanged on all ranks."""
    rounds = np.unique(p.round[p.round >= 0])
    if len(rounds) < 2:
        return None
    a, b = random.choice(rounds, 2, replace=False)
    return with_column(p, "round", slice(None), np.select([p.round == a, p.round == b], [b, a], p.round))


def rounds_get_other_numbers(random, plan, p):
    """Rounds keep their order and get larger numbers."""
    return with_column(p, "round", p.round >= 0, p.round[p.round >= 0] * 2 + random.integers(5))


def rounds_are_one(random, plan, p):
    """A round and the next are one, launched and waited for once."""
    rounds = np.unique(p.round[p.round >= 0])
    if len(rounds) < 2:
        return None
    i = random.integers(len(rounds) - 1)
    late = p.round == rounds[i + 1]
    gone = []
    for rank in range(p.num_ranks):
        for op in (Op.LAUNCH, Op.WAIT):
            mine = np.flatnonzero((p.rank == rank) & np.isin(p.round, rounds[i : i + 2]) & (p.op == op))
            gone += (mine[:-1] if op == Op.LAUNCH else mine[1:]).tolist()
    return _deleted(with_column(p, "round", late, rounds[i]), gone)


def offsets_change_places(random, plan, p):
    b = p.buffers
    one = pick(random, np.flatnonzero(b.space == Space.ARENA))
    if one is None:
        return None
    other = pick(random, np.flatnonzero((b.space == Space.ARENA) & (b.rank == b.rank[one])))
    return with_buffer(p, "offset", [one, other], b.offset[[other, one]])


def arena_is_shifted(random, plan, p):
    """All buffers of a rank, or those from one on, lie 256 bytes further on."""
    b, rank = p.buffers, random.integers(plan.num_ranks)
    mine = (b.rank == rank) & (b.space == Space.ARENA)
    if not mine.any():
        return None
    mine &= b.offset >= (0 if random.random() < 0.5 else random.choice(b.offset[mine]))
    return with_buffer(p, "offset", mine, b.offset[mine] + 256)


def buffers_change_places(random, plan, p):
    """Two buffers of the same kind are taken for each other, everywhere or from some instruction on."""
    b = p.buffers
    one = random.integers(len(b))
    alike = (b.rank == b.rank[one]) & (b.space == b.space[one]) & (b.acc == b.acc[one])
    if random.random() < 0.7:
        alike &= b.role == b.role[one]
    other = pick(random, np.flatnonzero(alike))
    since = p.offsets[b.rank[one]] if random.random() < 0.3 else random.integers(len(p))
    buf = p.buf.copy()
    late = np.arange(len(p))[:, None] >= since
    buf[late & (p.buf == one)], buf[late & (p.buf == other)] = other, one
    return replace(p, buf=buf)


def entries_of_buffers_change_places(random, plan, p):
    """Two rows of the buffer table are exchanged, and with them all that names them, or not."""
    b = p.buffers
    i = random.integers(len(b))
    j = pick(random, np.flatnonzero(b.rank == b.rank[i]))
    columns = {n: getattr(b, n).copy() for n in Buffers.__slots__ if n != "offsets"}
    for column in columns.values():
        column[[i, j]] = column[[j, i]]
    p = replace(p, buffers=replace(b, **columns))
    if random.random() < 0.5:
        return p
    return replace(p, buf=np.select([p.buf == i, p.buf == j], [j, i], p.buf).astype(np.int32))


def buffer_is_lost(random, plan, p):
    """A row of the buffer table is left out; what named it names the one behind it."""
    b, i = p.buffers, random.integers(len(p.buffers))
    columns = {n: np.delete(getattr(b, n), i, axis=0) for n in Buffers.__slots__ if n != "offsets"}
    table = replace(b, offsets=b.offsets - (b.offsets > i), **columns)
    return replace(p, buffers=table, buf=p.buf - (p.buf > i).astype(np.int32))


def buffer_is_there_twice(random, plan, p):
    """A row of the buffer table has a twin that some instruction takes for it, or none."""
    b, i = p.buffers, random.integers(len(p.buffers))
    columns = {n: np.insert(getattr(b, n), i, getattr(b, n)[i], axis=0) for n in Buffers.__slots__ if n != "offsets"}
    buf = p.buf + (p.buf > i).astype(np.int32)
    users = np.argwhere(buf == i)
    if len(users):
        buf[tuple(users[random.integers(len(users))])] += random.integers(2)
    return replace(p, buffers=replace(b, offsets=b.offsets + (b.offsets > i), **columns), buf=buf)


def streams_change_places(random, plan, p):
    """Two ranks do what the other should."""
    if plan.num_ranks < 2:
        return None
    a, b = sorted(random.choice(plan.num_ranks, 2, replace=False).tolist())
    return _ranks_in_order(p, [b if r == a else a if r == b else r for r in range(plan.num_ranks)])


def instruction_changes_rank(random, plan, p):
    """An instruction is another rank's, on the buffers that have the same numbers there."""
    i = random.integers(len(p))
    rank, to = int(p.rank[i]), int(random.integers(plan.num_ranks))
    if rank == to or p.offsets[to] == p.offsets[to + 1]:
        return None
    place = int(random.integers(p.offsets[to], p.offsets[to + 1]))
    buf = p.buf[i] + np.where(p.buf[i] >= 0, p.buffers.offsets[to] - p.buffers.offsets[rank], 0)
    p = with_column(p, "buf", i, buf)
    order = np.insert(np.delete(np.arange(len(p)), i), place - (place > i), i)
    ranks = np.bincount(np.delete(p.rank, i), minlength=plan.num_ranks)
    ranks[to] += 1
    return in_order(p, order, np.r_[0, np.cumsum(ranks)])


def kernels_exchange_slices(random, plan, p):
    """Two kernels attend each other's slices, on all ranks of their groups."""
    two = _two(random, np.unique(p.slices[of(p, Op.ATTEND, Op.ATTEND_GRAD)], axis=0))
    if two is None:
        return None
    a, b = ((p.slices == pair).all(axis=1) for pair in two)
    return with_column(with_column(p, "slices", a, two[1]), "slices", b, two[0])


def kernels_exchange_operands(random, plan, p):
    """Two kernels of a rank read each other's q, kv or do, or add to each other's accumulators."""
    one = pick(random, of(p, Op.ATTEND, Op.ATTEND_GRAD))
    if one is None:
        return None
    other = pick(random, np.flatnonzero((p.op == p.op[one]) & (p.rank == p.rank[one])))
    k = random.integers(3 if p.op[one] == Op.ATTEND else 5)
    return with_column(p, "buf", ([one, other], k), p.buf[[other, one], k])


def kernel_is_cut(random, plan, p):
    """A kernel becomes two: slices, or heads, up to somewhere and from there on, or one short, or one too many."""
    i = pick(random, of(p, Op.ATTEND, Op.ATTEND_GRAD))
    if i is None:
        return None
    slip = int(random.choice([0, 0, -1, 1]))
    lo, hi = p.slices[i].tolist()
    if random.random() < 0.5 and hi - lo > 1:
        at = int(random.integers(lo + 1, hi))
        same = np.flatnonzero((p.slices == p.slices[i]).all(axis=1))
        p = _inserted(p, same + 1, same)
        same += np.arange(len(same))
        return with_column(with_column(p, "slices", (same, 1), at), "slices", (same + 1, 0), at + slip)
    q0, q, kv0, kv = p.heads[i].tolist()
    if q < 2 or p.op[i] == Op.ATTEND_GRAD:
        return None
    p = _inserted(p, [i + 1], [i])
    p = with_column(p, "heads", i, [q0, 1, kv0, kv if kv == 1 else 1])
    return with_column(p, "heads", i + 1, [q0 + 1 + slip, q - 1, kv0 + (kv > 1), max(kv - 1, 1)])


def slice_changes_kernel(random, plan, p):
    """The first or last slice of a kernel is attended by the kernel whose range is beside it."""
    ranges = np.unique(p.slices[of(p, Op.ATTEND, Op.ATTEND_GRAD)], axis=0)
    if len(ranges) < 2:
        return None
    n = random.integers(len(ranges) - 1)
    a, b = ((p.slices == ranges[n + k]).all(axis=1) for k in range(2))
    border = ranges[n, 1] + random.choice([-1, 1])
    return with_column(with_column(p, "slices", (a, 1), border), "slices", (b, 0), border)


def fold_changes_target(random, plan, p):
    """A partial result goes into another accumulator, or into the result."""
    i = pick(random, of(p, Op.MERGE, Op.SUM, Op.COPY))
    if i is None:
        return None
    other = pick(random, np.flatnonzero(np.isin(p.op, (Op.MERGE, Op.SUM, Op.COPY)) & (p.rank == p.rank[i])))
    return with_column(with_column(p, "op", i, p.op[other]), "buf", (i, 1), p.buf[other, 1])


def all_to_alls_change_places(random, plan, p):
    """All ranks run two of their AllToAlls in each other's place."""
    two = _two(random, np.unique(p.round[of(p, Op.ALL_TO_ALL)]))
    if two is None:
        return None
    order = np.arange(len(p))
    for rank in range(plan.num_ranks):
        a, b = (np.flatnonzero((p.rank == rank) & (p.op == Op.ALL_TO_ALL) & (p.round == r)) for r in two)
        if len(a) == len(b) == 1:
            order[[a[0], b[0]]] = order[[b[0], a[0]]]
    rounds = np.select([p.round == two[0], p.round == two[1]], [two[1], two[0]], p.round)
    return in_order(with_column(p, "round", slice(None), rounds), order)


def exchange_is_lost(random, plan, p):
    """An AllToAll is left out on all ranks of a group."""
    i = pick(random, of(p, Op.ALL_TO_ALL))
    if i is None:
        return None
    group = p.rank // plan.topology.intra_sp
    return _deleted(p, (p.op == Op.ALL_TO_ALL) & (p.round == p.round[i]) & (group == group[i]))


def _deleted(p: Programs, which) -> Programs:
    kept = np.ones(len(p), bool)
    kept[which] = False
    counts = np.bincount(p.rank[kept], minlength=p.num_ranks)
    return in_order(p, np.flatnonzero(kept), np.r_[0, np.cumsum(counts)])


def _inserted(p: Programs, places, which) -> Programs:
    """Put copies of instructions behind others: of which[n] before what is at places[n], ascending."""
    counts = np.bincount(np.r_[p.rank, p.rank[which]], minlength=p.num_ranks)
    return in_order(p, np.insert(np.arange(len(p)), places, which), np.r_[0, np.cumsum(counts)])


def _ranks_in_order(p: Programs, ranks: list[int]) -> Programs:
    """Give each rank another's stream and buffers."""

    def rows(offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = np.diff(offsets)[ranks]
        return np.concatenate([np.arange(offsets[r], offsets[r + 1]) for r in ranks]), np.r_[0, np.cumsum(counts)]

    order, offsets = rows(p.offsets)
    buffer_order, buffer_offsets = rows(p.buffers.offsets)
    columns = {n: getattr(p.buffers, n)[buffer_order] for n in Buffers.__slots__ if n != "offsets"}
    back = np.append(np.argsort(buffer_order), -1)
    changed = replace(p, buf=back[p.buf], buffers=typed(Buffers(buffer_offsets, **columns)))
    return in_order(changed, order, offsets)


PROGRAM_CHANGES: tuple[Callable, ...] = (
    messages_exchange_rows, messages_exchange_rounds, messages_exchange_peers, messages_exchange_sources,
    message_is_lost, message_comes_twice, message_changes_round, message_is_cut, rounds_change_places,
    rounds_get_other_numbers, rounds_are_one, offsets_change_places, arena_is_shifted, buffers_change_places,
    entries_of_buffers_change_places, buffer_is_lost, buffer_is_there_twice, streams_change_places,
    instruction_changes_rank, kernels_exchange_slices, kernels_exchange_operands, kernel_is_cut,
    slice_changes_kernel, fold_changes_target, all_to_alls_change_places, exchange_is_lost,
)  # fmt: skip
