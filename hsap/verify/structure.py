"""Structure: every number of a stream means something, taken alone.

Rules come in stages; a stage may index by what the stages before it (`placement` is the first) have checked. The other
families of rules only run on streams whose structure is sound. Rules on buffers are in `held`, those on AllToAll in
`resharded`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hsap.ir.effects import NUM_OPERANDS
from hsap.ir.program import Op, Role, Space
from hsap.ir.sort import distinct
from hsap.loops import loop
from hsap.verify import held
from hsap.verify.columns import (
    ACC,
    BUF,
    HEADS,
    OP,
    PEER,
    RANK,
    ROLE,
    ROUND,
    ROWS,
    SLICES,
    SPACE,
    heads_inside,
    heads_sound,
    plain,
    rows_inside,
    same,
)
from hsap.verify.resharded import resharded
from hsap.verify.stream import Found, Stream, at, at_buffers

_OPS = (
    (Op.SEND, Op.RECV, Op.LAUNCH, Op.WAIT, Op.ATTEND, Op.MERGE, Op.COPY, Op.ALL_TO_ALL),
    (Op.SEND, Op.RECV, Op.LAUNCH, Op.WAIT, Op.ATTEND_GRAD, Op.SUM, Op.COPY, Op.ALL_TO_ALL),
)
_MOVES = (Op.SEND, Op.RECV, Op.COPY, Op.MERGE, Op.SUM)
_ROUNDED = (Op.SEND, Op.RECV, Op.LAUNCH, Op.WAIT, Op.ALL_TO_ALL)


def _is_one_of(ops: tuple[Op, ...]) -> np.ndarray:
    """Table over all ops, to be indexed by op."""
    return np.isin(np.arange(len(Op)), ops)


_IN_DIRECTION = tuple(_is_one_of(ops) for ops in _OPS)
_IS_ROUNDED = _is_one_of(_ROUNDED)
_NAMES_ROLE = _is_one_of((*_MOVES, Op.ALL_TO_ALL))

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
    p = s.programs
    why, bad = np.zeros(len(p), np.uint8), np.zeros(len(p.buffers), bool)
    _unknown(s.code, s.held, _IN_DIRECTION[s.direction], _IS_ROUNDED, why, bad)
    if not why.any() and not bad.any():
        return
    yield from at(np.flatnonzero(why & 1), lambda i: f"op {int(p.op[i])} doesn't exist in this direction")
    yield from at(np.flatnonzero(why & 2), lambda i: f"role {int(p.role[i])} doesn't exist")
    yield from at_buffers(s, np.flatnonzero(bad), lambda i: "a buffer's role, space or accumulator flag doesn't exist")
    yield from at(np.flatnonzero(why & 4), lambda i: f"round {int(p.round[i])} must not be negative")


@loop
def _unknown(code, held, in_direction, is_rounded, why, bad):
    """Judge every enumeration: adds to why [n] 1 op, 2 role, 4 round; sets whether a buffer is bad [num_buffers].

    in_direction, is_rounded: tables over all ops.
    """
    for i in range(len(why)):
        op, role = code[OP, i], code[ROLE, i]
        exists = 0 <= op < len(in_direction)
        if not exists or not in_direction[op]:
            why[i] |= 1
        if role < -1 or role > Role.DKV:
            why[i] |= 2
        if exists and is_rounded[op] and code[ROUND, i] < 0:
            why[i] |= 4
    for b in range(len(bad)):
        role, space = held[ROLE, b], held[SPACE, b]
        bad[b] = role < -1 or role > Role.DKV or space < 0 or space > Space.ARENA or held[ACC, b] > 1


def operands(s: Stream) -> Iterator[Found]:
    """Operands are buffers of the instruction's own rank."""
    p = s.programs
    foreign = np.zeros(len(p), bool)
    _foreign(s.code, plain(s.buffers.offsets), NUM_OPERANDS, foreign)
    yield from at(
        np.flatnonzero(foreign), lambda i: f"{Op(p.op[i]).name} names a buffer that isn't rank {int(s.rank[i])}'s"
    )


@loop
def _foreign(code, offsets, num_operands, foreign):
    """Mark instructions that name a buffer of another rank or none; needs known ops."""
    for i in range(len(foreign)):
        rank = code[RANK, i]
        for k in range(num_operands[code[OP, i]]):
            foreign[i] |= code[BUF + k, i] < offsets[rank] or code[BUF + k, i] >= offsets[rank + 1]


def peers(s: Stream) -> Iterator[Found]:
    """Transfers go to another rank of the same intra column."""
    p = s.programs
    astray = np.zeros(len(p), bool)
    _astray(s.code, s.plan.num_ranks, s.plan.topology.intra_sp, astray)
    yield from at(
        np.flatnonzero(astray), lambda i: f"peer {int(p.peer[i])} isn't another rank of the same intra column"
    )


@loop
def _astray(code, num_ranks, intra, astray):
    """Mark transfers whose peer isn't another rank of their column."""
    for i in range(len(astray)):
        if code[OP, i] == Op.SEND or code[OP, i] == Op.RECV:
            peer, rank = code[PEER, i], code[RANK, i]
            astray[i] = peer < 0 or peer >= num_ranks or peer == rank or peer % intra != rank % intra


def kinds(s: Stream) -> Iterator[Found]:
    """Operands have the role, space and precision that the op works on; the instruction's role is theirs."""
    i, operand = _misfit(s.code, s.held, NUM_OPERANDS, _NAMES_ROLE, _ALLOWED_TABLE)
    if operand >= 0:
        op, buffer = Op(s.programs.op[i]), int(s.code[BUF + operand, i])
        yield Found(f"operand {operand} of {op.name} can't be {s.describe(buffer)}", i)


@loop
def _misfit(code, held, num_operands, names_role, allowed):
    """First instruction and operand that don't go together, operand -1 if all do; needs `enumerations`, `operands`."""
    for i in range(code.shape[1]):
        op = code[OP, i]
        for k in range(num_operands[op]):
            buffer = code[BUF + k, i]
            role = held[ROLE, buffer]
            fits = allowed[op, k, role + 1, held[SPACE, buffer], held[ACC, buffer]]
            if not fits or (names_role[op] and k < 2 and role != code[ROLE, i]):
                return i, k
    return 0, -1


def moved_rows(s: Stream) -> Iterator[Found]:
    """Rows and heads that are moved or folded lie in both buffers; transfers take all heads that their buffer has."""
    p = s.programs
    say = "{} moves spans {} and heads {}, which its buffers don't both have in this form"
    why = np.zeros(len(p), np.uint8)
    _outside(s.code, s.held, s.shares, s.plan.problem.heads.group, why)
    for kind in (1, 2) if why.any() else ():
        yield from at(np.flatnonzero(why == kind), lambda i: say.format(Op(p.op[i]).name, p.rows[i], p.heads[i]))


@loop
def _outside(code, held, shares, group, why):
    """Moves beyond their buffers: sets why [n] to 1 for transfers, 2 within a rank; needs `operands`.

    A transfer is one piece of memory: all heads of its buffer's rows, which lie side by side.
    """
    for i in range(len(why)):
        op, source = code[OP, i], code[BUF, i]
        if op == Op.SEND or op == Op.RECV:
            if not rows_inside(code, i, held, source) or not same(code, i, held, source, HEADS, 4):
                why[i] = 1
        elif op == Op.COPY or op == Op.MERGE or op == Op.SUM:
            sound = heads_sound(code, i, shares[code[RANK, i] % len(shares)], group)
            for k in range(2):
                buffer = code[BUF + k, i]
                sound &= rows_inside(code, i, held, buffer) and heads_inside(code, i, held, buffer)
            why[i] = 0 if sound else 2


def attended(s: Stream) -> Iterator[Found]:
    """Attended slices exist, and their queries, keys and heads lie in the buffers that are read and added to."""
    p = s.programs
    bounds = np.zeros((4, len(s.slices)), np.int64)
    if not _block_bounds(s.code, *s.slice_spans, bounds, np.zeros(len(s.slices), np.int64)):
        yield from _no_blocks(s)
        return
    num_operands = 3 if s.direction == 0 else 5
    beyond = np.zeros(len(p), bool)
    _beyond(s.code, s.held, bounds, s.shares, s.plan.problem.heads.group, num_operands, beyond)
    say = "slices {} for heads {} leave the rows or heads of the buffers"
    yield from at(np.flatnonzero(beyond), lambda i: say.format(p.slices[i], p.heads[i]))


def _no_blocks(s: Stream) -> Iterator[Found]:
    """Say which ranges of slices aren't in the table or overlap each other."""
    p, num_slices = s.programs, len(s.slices)
    index = s.where(Op.ATTEND, Op.ATTEND_GRAD)
    first, stop = p.slices.take(index, axis=0).astype(np.int64).T
    bad = (first < 0) | (first >= stop) | (stop > num_slices)
    if bad.any():
        yield from at(index[bad], lambda i: f"slices {p.slices[i]} aren't a range of the {num_slices} slices")
        return
    ranges, which = distinct_ranges(first, stop, num_slices)
    overlap = np.flatnonzero(ranges[1:, 0] < ranges[:-1, 1])
    # Blocks are attended whole; without this rule a file could ask for any number of slice visits.
    bad = index[which == overlap[0] + 1]
    yield from at(bad, lambda i: f"slices {p.slices[i]} overlap another instruction's without being the same")


@loop
def _block_bounds(code, query_spans, key_spans, bounds, stop_at):
    """Fill `bounds` [4, num_slices]: least and greatest span of queries and of keys of each block, at its first slice.

    A block is a range of slices that is attended; gives whether none leaves the table or overlaps another one.
    stop_at: zeros [num_slices].
    """
    num_slices = len(query_spans)
    for i in range(code.shape[1]):
        if code[OP, i] == Op.ATTEND or code[OP, i] == Op.ATTEND_GRAD:
            first, stop = code[SLICES, i], code[SLICES + 1, i]
            if first < 0 or first >= stop or stop > num_slices or (stop_at[first] and stop_at[first] != stop):
                return False
            stop_at[first] = stop
    reach = 0
    for first in range(num_slices):
        if stop_at[first]:
            if first < reach:
                return False
            reach = stop_at[first]
            least_q, least_k = query_spans[first], key_spans[first]
            most_q, most_k = least_q, least_k
            for i in range(first + 1, reach):
                least_q, most_q = min(least_q, query_spans[i]), max(most_q, query_spans[i])
                least_k, most_k = min(least_k, key_spans[i]), max(most_k, key_spans[i])
            bounds[0, first], bounds[1, first], bounds[2, first], bounds[3, first] = least_q, most_q, least_k, most_k
    return True


@loop
def _beyond(code, held, bounds, shares, group, num_operands, beyond):
    """Mark instructions that attend what isn't in their buffers; needs sound `bounds`, `operands`."""
    for i in range(len(beyond)):
        if code[OP, i] == Op.ATTEND or code[OP, i] == Op.ATTEND_GRAD:
            sound = heads_sound(code, i, shares[code[RANK, i] % len(shares)], group)
            for k in range(num_operands):
                buffer, side = code[BUF + k, i], 2 if k == 1 or k == 4 else 0  # kv and dkv are on the keys' side
                low, high = bounds[side, code[SLICES, i]], bounds[side + 1, code[SLICES, i]]
                sound &= low >= held[ROWS, buffer] and high < held[ROWS + 1, buffer]
                sound &= heads_inside(code, i, held, buffer)
            beyond[i] = not sound


def distinct_ranges(first: np.ndarray, stop: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the distinct ranges in order and which of them each one is: (int64 [m, 2], int64 [n])."""
    keys, which = distinct(first * (total + 1) + stop)
    return np.stack(np.divmod(keys, total + 1), axis=1), which


STAGES = (
    (enumerations,),
    (operands, peers),
    (kinds, held.ends),
    (held.held,),
    (held.sizes, moved_rows, attended, resharded),
)
OPERANDS_STAGE = 1
"""Stage after which every operand is a buffer, so that touches can be listed."""
