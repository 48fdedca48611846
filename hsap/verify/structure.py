"""Structure: every number of a stream means something, taken alone.

Rules come in stages; a stage may index by what the stages before it (`placement` is the first) have checked. The other
families of rules only run on streams whose structure is sound. Rules on buffers are in `held`, those on AllToAll in
`resharded`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
_ALLOWED: dict[Op, tuple[Any, ...]] = {
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
    why, bad = _unknown(s.code, s.held, _IN_DIRECTION[s.direction], _IS_ROUNDED)
    if not why.any() and not bad.any():
        return
    yield from at(np.flatnonzero(why & 1), lambda i: f"op {int(p.op[i])} doesn't exist in this direction")
    yield from at(np.flatnonzero(why & 2), lambda i: f"role {int(p.role[i])} doesn't exist")
    yield from at_buffers(s, np.flatnonzero(bad), lambda i: "a buffer's role, space or accumulator flag doesn't exist")
    yield from at(np.flatnonzero(why & 4), lambda i: f"round {int(p.round[i])} must not be negative")


@loop
def _unknown(code: np.ndarray, held: np.ndarray, in_direction: Any, is_rounded: Any) -> tuple[np.ndarray, np.ndarray]:
    """Judge every enumeration: (why [n], 1 op, 2 role, 4 round; whether a buffer is bad [num_buffers]).

    in_direction, is_rounded: tables over all ops.
    """
    why, bad = np.zeros(code.shape[1], np.uint8), np.zeros(held.shape[1], np.bool_)
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
    return why, bad


def operands(s: Stream) -> Iterator[Found]:
    """Operands are buffers of the instruction's own rank."""
    p = s.programs
    bad = np.flatnonzero(_foreign(s.code, plain(s.buffers.offsets), NUM_OPERANDS))
    yield from at(bad, lambda i: f"{Op(p.op[i]).name} names a buffer that isn't rank {int(s.rank[i])}'s")


@loop
def _foreign(code: np.ndarray, offsets: np.ndarray, num_operands: np.ndarray) -> np.ndarray:
    """Whether an instruction names a buffer of another rank or none; needs known ops: bool [n]."""
    foreign = np.zeros(code.shape[1], np.bool_)
    for i in range(len(foreign)):
        rank = code[RANK, i]
        for k in range(num_operands[code[OP, i]]):
            foreign[i] |= code[BUF + k, i] < offsets[rank] or code[BUF + k, i] >= offsets[rank + 1]
    return foreign


def peers(s: Stream) -> Iterator[Found]:
    """Transfers go to another rank of the same intra column."""
    p = s.programs
    bad = np.flatnonzero(_astray(s.code, s.plan.num_ranks, s.plan.topology.intra_sp))
    yield from at(bad, lambda i: f"peer {int(p.peer[i])} isn't another rank of the same intra column")


@loop
def _astray(code: np.ndarray, num_ranks: int, intra: int) -> np.ndarray:
    """Whether a transfer's peer isn't another rank of its column: bool [n]."""
    astray = np.zeros(code.shape[1], np.bool_)
    for i in range(len(astray)):
        if code[OP, i] == Op.SEND or code[OP, i] == Op.RECV:
            peer, rank = code[PEER, i], code[RANK, i]
            astray[i] = peer < 0 or peer >= num_ranks or peer == rank or peer % intra != rank % intra
    return astray


def kinds(s: Stream) -> Iterator[Found]:
    """Operands have the role, space and precision that the op works on; the instruction's role is theirs."""
    i, operand = _misfit(s.code, s.held, NUM_OPERANDS, _NAMES_ROLE, _ALLOWED_TABLE)
    if operand >= 0:
        op, buffer = Op(s.programs.op[i]), int(s.code[BUF + operand, i])
        yield Found(f"operand {operand} of {op.name} can't be {s.describe(buffer)}", i)


@loop
def _misfit(
    code: np.ndarray, held: np.ndarray, num_operands: np.ndarray, names_role: Any, allowed: Any
) -> tuple[int, int]:
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
    why = _outside(s.code, s.held, s.shares, s.plan.problem.heads.group)
    for kind in (1, 2) if why.any() else ():
        yield from at(np.flatnonzero(why == kind), lambda i: say.format(Op(p.op[i]).name, p.rows[i], p.heads[i]))


@loop
def _outside(code: np.ndarray, held: np.ndarray, shares: np.ndarray, group: int) -> np.ndarray:
    """Moves beyond their buffers: uint8 [n], 1 for transfers, 2 within a rank, else 0; needs `operands`.

    A transfer is one piece of memory: all heads of its buffer's rows, which lie side by side.
    """
    why = np.zeros(code.shape[1], np.uint8)
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
    return why


def attended(s: Stream) -> Iterator[Found]:
    """Attended slices exist, and their queries, keys and heads lie in the buffers that are read and added to."""
    p, num_slices = s.programs, len(s.slices)
    if s.index.min(initial=0) < 0 or s.index.max(initial=-1) >= num_slices:
        yield Found(f"the index of what is attended has entries that are none of the {num_slices} slices")
        return
    if not _apart(s.code, len(s.index), len(s.shares)):
        yield from _ranges_of_others(s)
        return
    beyond = _beyond(s.code, s.held, s.index, s.slice_spans, _occurrences(s.origin, len(s.plan.shards.spans)),
                     s.shares, s.plan.problem.heads.group, 3 if s.direction == 0 else 5)  # fmt: skip
    say = "slices {} for heads {} leave the rows or heads of the buffers"
    yield from at(np.flatnonzero(beyond), lambda i: say.format(p.slices[i], p.heads[i]))


def _ranges_of_others(s: Stream) -> Iterator[Found]:
    """Say which ranges aren't in the index, overlap each other or are of more than one intra group's instruction."""
    p, total = s.programs, len(s.index)
    index = s.where(Op.ATTEND, Op.ATTEND_GRAD)
    first, stop = p.slices.take(index, axis=0).astype(np.int64).T
    bad = (first < 0) | (first >= stop) | (stop > total)
    if bad.any():
        yield from at(index[bad], lambda i: f"slices {p.slices[i]} aren't a range of the index's {total}")
        return
    ranges, which = distinct_ranges(first, stop, total)
    overlap = np.flatnonzero(ranges[1:, 0] < ranges[:-1, 1])
    bad = index[np.isin(which, overlap[:1] + 1)]
    yield from at(bad, lambda i: f"slices {p.slices[i]} overlap another instruction's without being the same")
    order = np.argsort(which, kind="stable")
    index, which, rank = index[order], which[order], s.rank[index[order]]
    again = (which[1:] == which[:-1]) & (rank[1:] == rank[:-1])
    again |= (which[1:] == which[:-1]) & (rank[1:] // len(s.shares) != rank[:-1] // len(s.shares))
    yield from at(index[1:][again], lambda i: f"slices {p.slices[i]} are another instruction's too")


@loop
def _apart(code: np.ndarray, total: int, intra: int) -> bool:
    """Whether what is attended are ranges of the index, each of one instruction on the ranks of one intra group.

    Without this rule a file could ask for any number of slice visits. total: entries of the index.
    """
    stop_at, user = np.zeros(total + 1, np.int64), np.zeros(total + 1, np.int64)
    for i in range(code.shape[1]):
        if code[OP, i] == Op.ATTEND or code[OP, i] == Op.ATTEND_GRAD:
            first, stop, rank = code[SLICES, i], code[SLICES + 1, i], code[RANK, i]
            if first < 0 or first >= stop or stop > total:
                return False
            if stop_at[first]:
                shared = stop_at[first] == stop and user[first] < rank and user[first] // intra == rank // intra
                if not shared:
                    return False
            stop_at[first], user[first] = stop, rank
    reach = 0
    for first in range(total):
        if stop_at[first]:
            if first < reach:
                return False
            reach = stop_at[first]
    return True


@loop
def _occurrences(origin: np.ndarray, num_spans: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each of the shards' spans is in the span table, rising: (places, borders int64 [num_spans + 1])."""
    borders, free = np.zeros(num_spans + 1, np.int64), np.zeros(num_spans, np.int64)
    for i in range(len(origin)):
        if origin[i] >= 0:
            borders[origin[i] + 1] += 1
    for span in range(num_spans):
        free[span] = borders[span]
        borders[span + 1] += borders[span]
    places = np.empty(borders[num_spans], np.int64)
    for i in range(len(origin)):
        if origin[i] >= 0:
            places[free[origin[i]]] = i
            free[origin[i]] += 1
    return places, borders


@loop
def _beyond(
    code: np.ndarray,
    held: np.ndarray,
    index: np.ndarray,
    slice_spans: Any,
    occurrences: Any,
    shares: np.ndarray,
    group: int,
    num_operands: np.ndarray,
) -> np.ndarray:
    """Whether what is attended leaves its buffers: bool [n]; needs `operands`, `_apart` and sound `index`."""
    beyond = np.zeros(code.shape[1], np.bool_)
    for i in range(len(beyond)):
        if code[OP, i] == Op.ATTEND or code[OP, i] == Op.ATTEND_GRAD:
            sound = heads_sound(code, i, shares[code[RANK, i] % len(shares)], group)
            for k in range(num_operands):
                buffer, side = code[BUF + k, i], 1 if k == 1 or k == 4 else 0  # kv and dkv are on the keys' side
                sound &= heads_inside(code, i, held, buffer)
                like = code[BUF + (1 if k == 4 else 0), i]
                if k < 2 or held[ROWS, like] != held[ROWS, buffer] or held[ROWS + 1, like] != held[ROWS + 1, buffer]:
                    first, stop = held[ROWS, buffer], held[ROWS + 1, buffer]
                    begin, end = code[SLICES, i], code[SLICES + 1, i]
                    sound &= _has_all(first, stop, index, begin, end, slice_spans[side], occurrences[0], occurrences[1])
            beyond[i] = not sound
    return beyond


@loop
def _has_all(
    first: int,
    stop: int,
    index: np.ndarray,
    begin: int,
    end: int,
    span_of: np.ndarray,
    places: np.ndarray,
    borders: np.ndarray,
) -> bool:
    """Whether spans [first, stop) of the table have those of all slices at [begin, end) of the index."""
    before = -1
    for entry in range(begin, end):
        span = span_of[index[entry]]
        if span == before:
            continue
        if span < 0:
            return False
        low, high = borders[span], borders[span + 1]
        while low < high:
            middle = (low + high) // 2
            if places[middle] < first:
                low = middle + 1
            else:
                high = middle
        if low == borders[span + 1] or places[low] >= stop:
            return False
        before = span
    return True


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
