"""Structure: every number of a stream means something, taken alone.

Rules come in stages; a stage may index by what the stages before it (`placement` is the first) have checked. The other
families of rules only run on streams whose structure is sound.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hsap.ir.heads import DTYPE_BYTES
from hsap.ir.precision import ALIGNMENT, aligned, buffer_bytes, row_bytes
from hsap.ir.program import KV_ROLES, NONE, OPERANDS, PARTIAL_ROLES, Op, Role, Space
from hsap.ir.schedule import INPUTS, OUTPUTS
from hsap.ir.sort import distinct
from hsap.ir.span import row_starts
from hsap.verify.stream import Found, Stream, at, at_buffers, same_rows

_NUM_OPERANDS = np.array([len(OPERANDS[op]) for op in Op])
_OPS = (
    (Op.SEND, Op.RECV, Op.LAUNCH, Op.WAIT, Op.ATTEND, Op.MERGE, Op.COPY, Op.ALL_TO_ALL),
    (Op.SEND, Op.RECV, Op.LAUNCH, Op.WAIT, Op.ATTEND_GRAD, Op.SUM, Op.COPY, Op.ALL_TO_ALL),
)
_MOVES = (Op.SEND, Op.RECV, Op.COPY, Op.MERGE, Op.SUM)
_ROUNDED = (Op.SEND, Op.RECV, Op.LAUNCH, Op.WAIT, Op.ALL_TO_ALL)


def _is_one_of(ops: tuple[Op, ...]) -> np.ndarray:
    """Table over all ops, to be indexed by the op column: several times faster than `np.isin`."""
    return np.isin(np.arange(len(Op)), ops)


_IN_DIRECTION = tuple(_is_one_of(ops) for ops in _OPS)
_IS_ROUNDED = _is_one_of(_ROUNDED)
_NAMES_ROLE = _is_one_of((*_MOVES, Op.ALL_TO_ALL))

_PIECES_AT_ONCE = 1 << 20
"""Messages of AllToAlls that are sized together; bounds the memory for a plan of absurdly many ranks."""

_DATA = (Role.Q, Role.KV, Role.O, Role.DO, Role.DQ, Role.DKV)
_ANYWHERE = (Space.INPUT, Space.KEPT, Space.ARENA)
_TARGET = (Space.OUTPUT, Space.KEPT, Space.ARENA)
_READ, _FOLD = (_ANYWHERE, (False,)), ((Space.ARENA,), (True,))
_PACKED = ((Space.ARENA,), (False,))
_ALLOWED: dict[Op, tuple] = {
    Op.SEND: ((_DATA, *_READ),),
    Op.RECV: ((_DATA, *_PACKED),),
    Op.ATTEND: (((Role.Q,), *_READ), ((Role.KV,), *_READ), ((Role.O,), *_FOLD)),
    Op.ATTEND_GRAD: (
        ((Role.Q,), *_READ),
        ((Role.KV,), *_READ),
        ((Role.DO,), *_READ),
        ((Role.DQ,), *_FOLD),
        ((Role.DKV,), *_FOLD),
    ),
    Op.MERGE: (((Role.O,), *_PACKED), ((Role.O,), *_FOLD)),
    Op.SUM: (((Role.DQ, Role.DKV), *_PACKED), ((Role.DQ, Role.DKV), *_FOLD)),
    Op.COPY: ((_DATA, _ANYWHERE, (False, True)), (_DATA, (Space.ARENA, Space.OUTPUT), (False,))),
    Op.ALL_TO_ALL: (
        (_DATA, (Space.INPUT, Space.ARENA), (False, True)),
        (_DATA, _TARGET, (False,)),
        ((Role.NONE,), *_PACKED),
    ),
}
"""Role, space and accumulator flag that each operand of an op may have."""


def _allowed_table() -> np.ndarray:
    table = np.zeros((len(Op), 5, len(Role), len(Space), 2), bool)
    for op, operands in _ALLOWED.items():
        for i, (roles, spaces, acc) in enumerate(operands):
            table[np.ix_([op], [i], [r + 1 for r in roles], spaces, [int(a) for a in acc])] = True
    return table


_ALLOWED_TABLE = _allowed_table()


def enumerations(s: Stream) -> Iterator[Found]:
    """Ops, roles, spaces are members of their enumerations; ops belong to the direction; rounds aren't negative."""
    p, b = s.programs, s.buffers
    in_range = (p.op >= 0) & (p.op < len(Op))
    op = np.where(in_range, p.op, 0)
    known = in_range & _IN_DIRECTION[s.direction][op]
    yield from at(np.flatnonzero(~known), lambda i: f"op {int(p.op[i])} doesn't exist in this direction")
    yield from at(np.flatnonzero((p.role < -1) | (p.role > Role.DKV)), lambda i: f"role {int(p.role[i])} doesn't exist")
    bad = (b.role < -1) | (b.role > Role.DKV) | (b.space < 0) | (b.space > Space.ARENA)
    # A bool column read from a file may hold bytes other than 0 and 1.
    bad |= b.acc.view(np.uint8) > 1
    yield from at_buffers(s, np.flatnonzero(bad), lambda i: "a buffer's role, space or accumulator flag doesn't exist")
    rounded = in_range & _IS_ROUNDED[op] & (p.round < 0)
    yield from at(np.flatnonzero(rounded), lambda i: f"round {int(p.round[i])} must not be negative")


def operands(s: Stream) -> Iterator[Found]:
    """Operands are buffers of the instruction's own rank."""
    p, b = s.programs, s.buffers
    first, stop, num_operands = b.offsets[s.rank], b.offsets[s.rank + 1], _NUM_OPERANDS[p.op]
    foreign = np.zeros(len(p), bool)
    for operand, buffer in enumerate(p.buf.T):
        foreign |= (operand < num_operands) & ((buffer < first) | (buffer >= stop))
    bad = np.flatnonzero(foreign)
    yield from at(bad, lambda i: f"{Op(p.op[i]).name} names a buffer that isn't rank {int(s.rank[i])}'s")


def peers(s: Stream) -> Iterator[Found]:
    """Transfers go to another rank of the same intra column."""
    p, intra = s.programs, s.plan.topology.intra_sp
    moved = s.where(Op.SEND, Op.RECV)
    peer, rank = p.peer[moved].astype(np.int64), s.rank[moved]
    bad = (peer < 0) | (peer >= s.plan.num_ranks) | (peer == rank) | (peer % intra != rank % intra)
    yield from at(moved[bad], lambda i: f"peer {int(p.peer[i])} isn't another rank of the same intra column")


def kinds(s: Stream) -> Iterator[Found]:
    """Operands have the role, space and precision that the op works on; the instruction's role is theirs."""
    p, b, t = s.programs, s.buffers, s.touched
    role = b.role[t.buffer]
    fits = _ALLOWED_TABLE[p.op[t.at], t.operand, role + 1, b.space[t.buffer], b.acc[t.buffer].astype(np.int8)]
    named = _NAMES_ROLE[p.op[t.at]] & (t.operand < 2)
    fits &= ~named | (role == p.role[t.at])
    bad = np.flatnonzero(~fits)[:1]
    for i in bad.tolist():
        op = Op(p.op[t.at[i]])
        yield Found(f"operand {int(t.operand[i])} of {op.name} can't be {s.describe(t.buffer[i])}", int(t.at[i]))


def ends(s: Stream) -> Iterator[Found]:
    """Every rank has each input and output once, and keeps q and kv if heads are resharded."""
    b, plan = s.buffers, s.plan
    resharded = plan.topology.intra_sp > 1
    direction = ("forward", "backward")[s.direction]
    kept = INPUTS["forward"] if resharded and s.direction == 0 else ()
    wanted = {Space.INPUT: INPUTS[direction], Space.OUTPUT: OUTPUTS[direction], Space.KEPT: kept}
    for space, roles in wanted.items():
        there = np.flatnonzero(b.space == space)
        count = np.zeros((plan.num_ranks, len(Role)), np.int64)
        np.add.at(count, (s.buffer_rank[there], b.role[there] + 1), 1)
        expected = np.isin(np.arange(len(Role)), [r + 1 for r in roles])
        wrong = np.flatnonzero((count != expected).any(axis=1))
        names = ", ".join(r.name.lower() for r in roles) or "none"
        for rank in wrong[:1].tolist():
            yield Found(f"a rank must have these {space.name} buffers and no others: {names}", rank=rank)
    lonely = (b.space == Space.ARENA) & ~_ARENA[s.direction][b.role + 1, b.acc.astype(np.int8)]
    lonely |= (b.space != Space.ARENA) & b.acc
    yield from at_buffers(s, np.flatnonzero(lonely), lambda i: f"{s.describe(i)} has no place in this direction")


def _arena_roles(direction: str) -> np.ndarray:
    table = np.zeros((len(Role), 2), bool)
    table[[r + 1 for r in (Role.NONE, *INPUTS[direction], *OUTPUTS[direction])], 0] = True
    table[[r + 1 for r in OUTPUTS[direction]], 1] = True
    return table


_ARENA = (_arena_roles("forward"), _arena_roles("backward"))


def held(s: Stream) -> Iterator[Found]:
    """Buffers hold a range of the shards' spans and heads of their column, ends just the rank's own, scratch none."""
    b, plan, intra = s.buffers, s.plan, s.plan.topology.intra_sp
    rows, scratch = b.rows, b.role == Role.NONE
    sound = (rows[:, 0] >= 0) & (rows[:, 0] <= rows[:, 1]) & (rows[:, 1] <= len(plan.shards.spans))
    sound &= heads_sound(s, b.heads, s.buffer_rank)
    outer = (b.space == Space.INPUT) | (b.space == Space.OUTPUT)
    if s.direction == 1:
        outer &= (b.role != Role.Q) & (b.role != Role.KV)
    p = plan.problem
    column = same_rows(rows, plan.column_rows.take(s.buffer_rank // intra, axis=0))
    column &= same_rows(b.heads, _whole_share(s, s.buffer_rank))
    own = same_rows(rows, plan.rank_rows.take(s.buffer_rank, axis=0)) & same_rows(b.heads, p.heads.all_heads)
    if intra > 1:
        sound = np.where(outer, own, sound)
    sound = np.where((b.space != Space.ARENA) & ~(outer & (intra > 1)), column, sound)
    sound = np.where(scratch, same_rows(rows, NONE) & same_rows(b.heads, 0), sound)
    bad = np.flatnonzero(~sound)
    yield from at_buffers(s, bad, lambda i: f"{s.describe(i)} can't hold rows {rows[i]} and heads {b.heads[i]} here")


def share_table(s: Stream) -> np.ndarray:
    """Head share of each intra index: int64 [intra_sp, 4], a `HeadRun` over all heads."""
    shares = s.plan.problem.heads.shares(s.plan.topology.intra_sp)
    return np.array(shares, np.int64)


def heads_sound(s: Stream, heads: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Whether heads numbered within a rank's column exist and its KV heads are those of its query heads."""
    group = s.plan.problem.heads.group
    share = share_table(s).take(rank % s.plan.topology.intra_sp, axis=0)
    q_first, q_count, kv_first, kv_count = heads.astype(np.int64).T
    first = q_first + share[:, 0]
    there = (q_first >= 0) & (q_count >= 0) & (q_first + q_count <= share[:, 1])
    there &= (kv_first >= 0) & (kv_count >= 0) & (kv_first + kv_count <= share[:, 3])
    paired = (kv_first + share[:, 2] == first // group) & (
        kv_first + kv_count + share[:, 2] == (first + q_count - 1) // group + 1
    )
    return there & np.where(q_count > 0, paired, kv_count == 0)


def sizes(s: Stream) -> Iterator[Found]:
    """A buffer's bytes are what its rows, heads and dtype take; offsets are there and aligned just in the arena."""
    b, plan = s.buffers, s.plan
    row, stat = row_bytes(plan.precision, b.role, b.space, b.acc, b.heads, plan.problem.heads.head_dim)
    ends = row_starts(plan.spans)
    scratch = b.role == Role.NONE
    first, stop = np.where(scratch, 0, b.rows.T)
    wanted = buffer_bytes(ends[stop] - ends[first], row, stat)
    bad = np.flatnonzero(~scratch & (b.num_bytes != wanted))
    say = "{} has {} bytes; its rows and heads take {}"
    yield from at_buffers(s, bad, lambda i: say.format(s.describe(i), int(b.num_bytes[i]), int(wanted[i])))
    free = scratch & ((b.num_bytes < 0) | (b.num_bytes > 1 << 60))
    yield from at_buffers(s, np.flatnonzero(free), lambda i: f"scratch of {int(b.num_bytes[i])} bytes is impossible")
    in_arena = b.space == Space.ARENA
    inside = (b.offset >= 0) & (b.offset <= 1 << 61) & (b.offset % ALIGNMENT == 0)
    placed = np.where(in_arena, inside, b.offset == NONE)
    say = "{} has offset {}; arena buffers start on aligned bytes, others have none"
    yield from at_buffers(s, np.flatnonzero(~placed), lambda i: say.format(s.describe(i), int(b.offset[i])))


def moved_rows(s: Stream) -> Iterator[Found]:
    """Rows and heads that are moved or folded lie in both buffers; transfers take all heads that their buffer has."""
    p, b = s.programs, s.buffers
    say = "{} moves spans {} and heads {}, which its buffers don't both have in this form"
    # A transfer is one piece of memory: all heads of its buffer's rows, which lie side by side.
    index = s.where(Op.SEND, Op.RECV)
    rows, heads, buffer = p.rows.take(index, axis=0), p.heads.take(index, axis=0), p.buf[index, 0]
    sound = _rows_inside(rows, b.rows.take(buffer, axis=0)) & same_rows(heads, b.heads.take(buffer, axis=0))
    yield from at(index[~sound], lambda i: say.format(Op(p.op[i]).name, p.rows[i], p.heads[i]))
    index = s.where(Op.COPY, Op.MERGE, Op.SUM)
    rows, heads = p.rows.take(index, axis=0), p.heads.take(index, axis=0).astype(np.int32)
    sound = heads_sound(s, heads, s.rank[index])
    for operand in (0, 1):
        buffer = p.buf[index, operand]
        sound &= _rows_inside(rows, b.rows.take(buffer, axis=0))
        sound &= heads_inside(heads, b.heads.take(buffer, axis=0).astype(np.int32))
    yield from at(index[~sound], lambda i: say.format(Op(p.op[i]).name, p.rows[i], p.heads[i]))


def _rows_inside(rows: np.ndarray, of: np.ndarray) -> np.ndarray:
    return (of[:, 0] <= rows[:, 0]) & (rows[:, 0] <= rows[:, 1]) & (rows[:, 1] <= of[:, 1])


def heads_inside(heads: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Whether head runs lie inside others, query and KV heads alike."""
    lower = (heads[:, 0] >= of[:, 0]) & (heads[:, 2] >= of[:, 2])
    upper = (heads[:, 0] + heads[:, 1] <= of[:, 0] + of[:, 1]) & (heads[:, 2] + heads[:, 3] <= of[:, 2] + of[:, 3])
    return lower & upper


def attended(s: Stream) -> Iterator[Found]:
    """Attended slices exist, and their queries, keys and heads lie in the buffers that are read and added to."""
    p, b, table = s.programs, s.buffers, s.slices
    index = s.where(Op.ATTEND, Op.ATTEND_GRAD)
    first, stop = p.slices.take(index, axis=0).astype(np.int64).T
    bad = (first < 0) | (first >= stop) | (stop > len(table))
    if bad.any():
        yield from at(index[bad], lambda i: f"slices {p.slices[i]} aren't a range of the {len(table)} slices")
        return
    ranges, which = distinct_ranges(first, stop, len(table))
    overlap = np.flatnonzero(ranges[1:, 0] < ranges[:-1, 1])
    if len(overlap):
        # Blocks are attended whole; without this rule a file could ask for any number of slice visits.
        bad = index[which == overlap[0] + 1]
        yield from at(bad, lambda i: f"slices {p.slices[i]} overlap another instruction's without being the same")
        return
    heads = p.heads.take(index, axis=0).astype(np.int32)
    sound = heads_sound(s, heads, s.rank[index])
    bounds = [_bounds(side, ranges) for side in s.slice_spans]
    query_side, num_operands = (True, False, True, True, False), 3 if s.direction == 0 else 5
    for operand in range(num_operands):
        buffer = p.buf[index, operand]
        low, high = bounds[0 if query_side[operand] else 1].take(which, axis=0).T
        sound &= (low >= b.rows[buffer, 0]) & (high < b.rows[buffer, 1])
        sound &= heads_inside(heads, b.heads.take(buffer, axis=0).astype(np.int32))
    say = "slices {} for heads {} leave the rows or heads of the buffers"
    yield from at(index[~sound], lambda i: say.format(p.slices[i], p.heads[i]))


def distinct_ranges(first: np.ndarray, stop: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the distinct ranges in order and which of them each one is: (int64 [m, 2], int64 [n])."""
    keys, which = distinct(first * (total + 1) + stop)
    return np.stack(np.divmod(keys, total + 1), axis=1), which


def _bounds(values: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """Least and greatest value within disjoint, non-empty, sorted ranges: int64 [m, 2]."""
    if not len(ranges):
        return np.zeros((0, 2), np.int64)
    borders = ranges.ravel()
    padded = np.append(values, values[-1:])  # a range may stop where the table does
    return np.stack([np.minimum.reduceat(padded, borders)[::2], np.maximum.reduceat(padded, borders)[::2]], axis=1)


def resharded(s: Stream) -> Iterator[Found]:
    """AllToAll turns the rank's own rows and all heads into the column's, or an accumulator back; scratch fits."""
    p, b, plan = s.programs, s.buffers, s.plan
    index = s.where(Op.ALL_TO_ALL)
    if not len(index):
        return
    if len(index) > len(Role) * plan.num_ranks:
        yield Found(f"{len(index)} ALL_TO_ALLs are more than there are inputs and outputs", int(index[-1]))
        return
    source, target, scratch = p.buf[index, :3].T
    outward = b.space[target] != Space.OUTPUT
    own, column = np.where(outward, source, target), np.where(outward, target, source)
    rank, intra = s.rank[index], plan.topology.intra_sp
    own_space = np.where(outward, Space.INPUT, Space.OUTPUT)
    sound = (intra > 1) & (b.space[own] == own_space) & ((b.space[source] == Space.INPUT) == outward)
    sound &= (b.acc[column] == ~outward) & same_rows(b.rows[own], plan.rank_rows[rank])
    sound &= same_rows(b.rows[column], plan.column_rows[rank // intra])
    share = _whole_share(s, rank)
    sound &= same_rows(b.heads[column], share) & same_rows(p.heads[index], share)
    sound &= same_rows(p.rows[index], b.rows[column])
    say = "ALL_TO_ALL from {} to {}: one must be the rank's own tensor, the other its column's"
    yield from at(index[~sound], lambda i: say.format(s.describe(p.buf[i, 0]), s.describe(p.buf[i, 1])))
    step = max(_PIECES_AT_ONCE // intra, 1)
    parts = [slice(i, i + step) for i in range(0, len(index), step)]
    wanted = np.concatenate([scratch_bytes(s, rank[i], p.role[index][i], outward[i]) for i in parts])
    bad = index[b.num_bytes[scratch] != wanted]
    yield from at(bad, lambda i: f"scratch has {int(b.num_bytes[p.buf[i, 2]])} bytes, not what the pieces take")


def _whole_share(s: Stream, rank: np.ndarray) -> np.ndarray:
    """Heads of each rank's column, numbered within it: int64 [n, 4]."""
    share = share_table(s)
    share[:, [0, 2]] = 0
    return share.take(rank % s.plan.topology.intra_sp, axis=0)


def scratch_bytes(s: Stream, rank: np.ndarray, role: np.ndarray, outward: np.ndarray) -> np.ndarray:
    """Scratch of AllToAlls in closed form: int64 [n].

    Outward: the rank's rows with each neighbour's heads. Back: each neighbour's rows with its own heads, and then its
    own rows with each neighbour's heads. What stays on the rank takes no scratch.
    """
    plan, intra = s.plan, s.plan.topology.intra_sp
    shares, tokens, home = share_table(s), plan.tokens_per_rank, rank - rank % intra
    dim, partial = plan.problem.heads.head_dim, np.isin(role, PARTIAL_ROLES)
    element = np.where(partial, DTYPE_BYTES[plan.precision.wire], DTYPE_BYTES[plan.precision.io])
    stats = (1 * (role == Role.O) + 2 * (role == Role.DO)) * DTYPE_BYTES[plan.precision.stat]
    is_kv = np.isin(role, KV_ROLES)

    def bytes_of(rows: np.ndarray, q_heads: np.ndarray, kv_heads: np.ndarray) -> np.ndarray:
        """Bytes of pieces with a row of the table for each AllToAll and a column for each neighbour."""
        elements = np.where(is_kv[:, None], 2 * kv_heads, q_heads) * dim * element[:, None]
        return aligned(rows * elements) + aligned(rows * q_heads * stats[:, None])

    mine = shares[rank % intra]
    by_heads = bytes_of(tokens[rank][:, None], shares[None, :, 1], shares[None, :, 3])
    by_rows = bytes_of(tokens[home[:, None] + np.arange(intra)], mine[:, 1:2], mine[:, 3:4])
    others = np.arange(intra) != (rank % intra)[:, None]
    return (others * (by_heads + np.where(outward[:, None], 0, by_rows))).sum(axis=1)


STAGES = ((enumerations,), (operands, peers), (kinds, ends), (held,), (sizes, moved_rows, attended, resharded))
OPERANDS_STAGE = 1
"""Stage after which every operand is a buffer, so that touches can be listed."""
