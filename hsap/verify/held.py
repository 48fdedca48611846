"""Held: rules on buffers, what they are for, what they hold and how large they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from hsap.ir.precision import ALIGNMENT, unit_bytes
from hsap.ir.program import KV_ROLES, NONE, Role, Space
from hsap.ir.schedule import DIRECTIONS, INPUTS, OUTPUTS
from hsap.ir.span import row_starts
from hsap.loops import loop
from hsap.verify.columns import ACC, HEADS, NUM_BYTES, OFFSET, RANK, ROLE, ROWS, SPACE, heads_sound, plain
from hsap.verify.stream import Found, Stream, at_buffers


def _roles(*roles: Role) -> np.ndarray:
    """Table over all roles, to be indexed by role + 1."""
    return np.isin(np.arange(len(Role)), [r + 1 for r in roles])


def _wanted(direction: str, resharded: bool) -> np.ndarray:
    """How many buffers of each space and role a rank has outside the arena: int64 [space, role + 1]."""
    kept = INPUTS["forward"] if resharded and direction == "forward" else ()
    return np.stack([_roles(*INPUTS[direction]), _roles(*OUTPUTS[direction]), _roles(*kept)]).astype(np.int64)


def _arena_roles(direction: str) -> np.ndarray:
    """Roles that a buffer of the arena may have: bool [role + 1, whether it is an accumulator]."""
    plain = _roles(Role.NONE, *INPUTS[direction], *OUTPUTS[direction])
    return np.stack([plain, _roles(*OUTPUTS[direction])], axis=1)


_WANTED = {(d, resharded): _wanted(d, resharded) for d in DIRECTIONS for resharded in (False, True)}
_ARENA = tuple(_arena_roles(d) for d in DIRECTIONS)
_IS_KV = _roles(*KV_ROLES)


def ends(s: Stream) -> Iterator[Found]:
    """Every rank has each input and output once, and keeps q and kv if heads are resharded."""
    wanted = _WANTED[DIRECTIONS[s.direction], s.plan.topology.intra_sp > 1]
    wrong, lonely = _miscounted(s.held, wanted, s.plan.num_ranks, _ARENA[s.direction])
    for space, rank in zip(Space, wrong.tolist()):
        if rank >= 0:
            names = ", ".join(Role(int(r) - 1).name.lower() for r in np.flatnonzero(wanted[space])) or "none"
            yield Found(f"a rank must have these {space.name} buffers and no others: {names}", rank=rank)
    yield from at_buffers(s, np.flatnonzero(lonely), lambda i: f"{s.describe(i)} has no place in this direction")


@loop
def _miscounted(
    held: np.ndarray, wanted: np.ndarray, num_ranks: int, arena_roles: Any
) -> tuple[np.ndarray, np.ndarray]:
    """First rank with a wrong number of ends in each space, or -1; and whether a buffer has no place: bool [n].

    Needs `enumerations`.
    """
    count = np.zeros((num_ranks, wanted.shape[0], wanted.shape[1]), np.int64)
    lonely = np.zeros(held.shape[1], np.bool_)
    for b in range(held.shape[1]):
        space, role, acc = held[SPACE, b], held[ROLE, b], held[ACC, b]
        if space == Space.ARENA:
            lonely[b] = not arena_roles[role + 1, acc]
        else:
            lonely[b] = acc == 1
            count[held[RANK, b], space, role + 1] += 1
    wrong = np.full(wanted.shape[0], -1)
    for space in range(len(wrong)):
        for rank in range(num_ranks - 1, -1, -1):
            for role in range(wanted.shape[1]):
                if count[rank, space, role] != wanted[space, role]:
                    wrong[space] = rank
    return wrong, lonely


def held(s: Stream) -> Iterator[Found]:
    """Buffers hold shards' spans, none twice, and heads of their column, ends just the rank's own, scratch none."""
    plan, heads = s.plan, s.plan.problem.heads
    all_heads = np.array(heads.all_heads, np.int64)
    misplaced = _misplaced(s.held, plain(plan.column_rows), plain(plan.rank_rows), s.shares, all_heads, heads.group,
                           distinct_from(s.origin, len(plan.shards.spans)), s.direction == 1)  # fmt: skip
    say, b = "{} can't hold rows {} and heads {} here", s.buffers
    yield from at_buffers(s, np.flatnonzero(misplaced), lambda i: say.format(s.describe(i), b.rows[i], b.heads[i]))


@loop
def distinct_from(origin: np.ndarray, num_spans: int) -> np.ndarray:
    """Least first span with which a range that ends before each span has no shards' span twice: int64 [n + 1].

    No range has a span that isn't a shard's. num_spans: of the shards.
    """
    least = np.zeros(len(origin) + 1, np.int64)
    behind = np.zeros(num_spans, np.int64)  # behind where each of them was last
    for i in range(len(origin)):
        if origin[i] < 0:
            least[i + 1] = i + 1
        else:
            least[i + 1] = max(least[i], behind[origin[i]])
            behind[origin[i]] = i + 1
    return least


@loop
def _misplaced(
    held: np.ndarray,
    column_rows: np.ndarray,
    rank_rows: np.ndarray,
    shares: Any,
    all_heads: Any,
    group: int,
    least: np.ndarray,
    backward: bool,
) -> np.ndarray:
    """Whether a buffer holds what it must not: bool [n]; needs `enumerations`. least: of `distinct_from`."""
    out = np.zeros(held.shape[1], np.bool_)
    intra = len(shares)
    for b in range(len(out)):
        role, space, rank = held[ROLE, b], held[SPACE, b], held[RANK, b]
        share = shares[rank % intra]
        outer = space == Space.INPUT or space == Space.OUTPUT
        if backward and (role == Role.Q or role == Role.KV):
            outer = False
        if role == Role.NONE:
            sound = _is(held, b, NONE, NONE, 0, 0, 0, 0)
        elif outer and intra > 1:
            h = all_heads
            sound = _is(held, b, rank_rows[rank, 0], rank_rows[rank, 1], h[0], h[1], h[2], h[3])
        elif space != Space.ARENA:
            rows = column_rows[rank // intra]
            sound = _is(held, b, rows[0], rows[1], 0, share[1], 0, share[3])
        else:
            first, stop = held[ROWS, b], held[ROWS + 1, b]
            sound = first >= 0 and first <= stop and stop < len(least) and heads_sound(held, b, share, group)
            sound = sound and (first == stop or first >= least[stop])
        out[b] = not sound
    return out


@loop
def _is(
    held: np.ndarray, b: int, first: int, stop: int, q_first: int, q_count: int, kv_first: int, kv_count: int
) -> bool:
    """Whether a buffer has just these rows and heads."""
    rows = held[ROWS, b] == first and held[ROWS + 1, b] == stop
    q = held[HEADS, b] == q_first and held[HEADS + 1, b] == q_count
    return rows and q and held[HEADS + 2, b] == kv_first and held[HEADS + 3, b] == kv_count


def sizes(s: Stream) -> Iterator[Found]:
    """A buffer's bytes are what its rows, heads and dtype take; offsets are there and aligned just in the arena."""
    b, plan = s.buffers, s.plan
    unit = unit_bytes(plan.precision, plan.problem.heads.head_dim)
    why, wanted = _misfits(s.held, row_starts(plan.spans), unit, _IS_KV)
    if not why.any():
        return
    say = "{} has {} bytes; its rows and heads take {}"
    bad = np.flatnonzero(why & 1)
    yield from at_buffers(s, bad, lambda i: say.format(s.describe(i), int(b.num_bytes[i]), int(wanted[i])))
    say = "scratch of {} bytes is impossible"
    yield from at_buffers(s, np.flatnonzero(why & 2), lambda i: say.format(int(b.num_bytes[i])))
    say = "{} has offset {}; arena buffers start on aligned bytes, others have none"
    yield from at_buffers(s, np.flatnonzero(why & 4), lambda i: say.format(s.describe(i), int(b.offset[i])))


@loop
def _misfits(held: np.ndarray, ends: np.ndarray, unit: np.ndarray, is_kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Judge bytes and offsets: (why [n], 1 bytes, 2 scratch, 4 offset; wanted bytes [n]); needs `enumerations`, `held`.

    ends: rows before each span. unit: of `unit_bytes`.
    """
    why, wanted = np.zeros(held.shape[1], np.uint8), np.zeros(held.shape[1], np.int64)
    for b in range(len(why)):
        role, space, acc = held[ROLE, b], held[SPACE, b], held[ACC, b]
        if role == Role.NONE:
            if held[NUM_BYTES, b] < 0 or held[NUM_BYTES, b] > 1 << 60:
                why[b] |= 2
        else:
            rows = ends[held[ROWS + 1, b]] - ends[held[ROWS, b]]
            row = unit[0, role + 1, space, acc] * (held[HEADS + 3, b] if is_kv[role + 1] else held[HEADS + 1, b])
            stat = unit[1, role + 1, space, acc] * held[HEADS + 1, b]
            wanted[b] = rows * row
            if stat > 0:
                wanted[b] = -(-wanted[b] // ALIGNMENT) * ALIGNMENT + rows * stat
            if held[NUM_BYTES, b] != wanted[b]:
                why[b] |= 1
        offset = held[OFFSET, b]
        if space == Space.ARENA:
            placed = offset >= 0 and offset <= 1 << 61 and offset % ALIGNMENT == 0
        else:
            placed = offset == NONE
        if not placed:
            why[b] |= 4
    return why, wanted
