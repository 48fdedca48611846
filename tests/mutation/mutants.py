"""Mutants: valid plans with one thing changed, each the kind of mistake that a compiler, a planner or a disk makes."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from hsap.ir.plan import Plan
from hsap.ir.program import Buffers, Op, Programs, Role, Space, typed

Random = np.random.Generator


def with_program(plan: Plan, mask: int, direction: int, programs: Programs) -> Plan:
    """Put a changed program into a plan."""
    pair = [*plan.programs[mask]]
    pair[direction] = programs
    return replace(plan, programs=(*plan.programs[:mask], tuple(pair), *plan.programs[mask + 1 :]))


def with_column(p: Programs, name: str, index, value) -> Programs:
    """Set entries of an instruction column."""
    column = getattr(p, name).copy()
    column[index] = value
    return replace(p, **{name: column})


def with_buffer(p: Programs, name: str, index, value) -> Programs:
    """Set entries of a buffer column."""
    column = getattr(p.buffers, name).copy()
    column[index] = value
    return replace(p, buffers=replace(p.buffers, **{name: column}))


def in_order(p: Programs, order: np.ndarray, offsets: np.ndarray | None = None) -> Programs:
    """Give the instructions picked by `order`, with new rank borders where their numbers change."""
    names = [f.name for f in fields(Programs) if f.name not in ("offsets", "index", "buffers")]
    columns = {name: getattr(p, name)[order] for name in names}
    return typed(replace(p, offsets=p.offsets if offsets is None else offsets, **columns))


def pick(random: Random, choices: np.ndarray) -> int | None:
    return int(random.choice(choices)) if len(choices) else None


def of(p: Programs, *ops: Op) -> np.ndarray:
    return np.flatnonzero(np.isin(p.op, ops))


def _without(p: Programs, i: int) -> Programs:
    return in_order(p, np.delete(np.arange(len(p)), i), p.offsets - (p.offsets > i))


def _moved(p: Programs, i: int, to: int) -> Programs:
    order = np.delete(np.arange(len(p)), i)
    return in_order(p, np.insert(order, to, i))


def drop(random, plan, p):
    return _without(p, pick(random, np.arange(len(p))))


def duplicate(random, plan, p):
    i = pick(random, np.arange(len(p)))
    lo, hi = p.offsets[p.rank[i]], p.offsets[p.rank[i] + 1]
    to = pick(random, np.arange(lo, hi + 1))
    return in_order(p, np.insert(np.arange(len(p)), to, i), p.offsets + (p.offsets > i))


def swap_neighbours(random, plan, p):
    i = pick(random, np.flatnonzero(p.rank[1:] == p.rank[:-1]))
    return None if i is None else _moved(p, i, i + 1)


def reorder(random, plan, p):
    i = pick(random, np.arange(len(p)))
    to = pick(random, np.arange(p.offsets[p.rank[i]], p.offsets[p.rank[i] + 1]))
    return _moved(p, i, to)


def retarget_peer(random, plan, p):
    i = pick(random, of(p, Op.SEND, Op.RECV))
    return None if i is None else with_column(p, "peer", i, random.integers(-1, plan.num_ranks + 1))


def retarget_buffer(random, plan, p):
    i, operand = pick(random, np.arange(len(p))), random.integers(5)
    if p.buf[i, operand] < 0:
        return None
    lo, hi = p.buffers.offsets[p.rank[i]], p.buffers.offsets[p.rank[i] + 1]
    like = np.flatnonzero(p.buffers.role[lo:hi] == p.buffers.role[p.buf[i, operand]]) + lo
    return with_column(p, "buf", (i, operand), pick(random, like if random.random() < 0.7 else np.arange(lo, hi)))


def resize_rows(random, plan, p):
    i = pick(random, np.flatnonzero(p.rows[:, 1] >= 0))
    return None if i is None else with_column(p, "rows", (i, random.integers(2)), random.integers(len(plan.spans) + 1))


def resize_buffer(random, plan, p):
    b = pick(random, np.arange(len(p.buffers)))
    name = random.choice(["rows", "num_bytes", "heads"])
    if name == "num_bytes":
        return with_buffer(p, name, b, p.buffers.num_bytes[b] + random.choice([-256, -8, 8, 256, -(1 << 60), 1 << 62]))
    return with_buffer(p, name, (b, random.integers(2)), random.integers(len(plan.spans) + 1))


def remove_wait(random, plan, p):
    i = pick(random, of(p, Op.WAIT))
    return None if i is None else _without(p, i)


def move_launch(random, plan, p):
    i = pick(random, of(p, Op.LAUNCH, Op.WAIT))
    if i is None:
        return None
    return _moved(p, i, pick(random, np.arange(p.offsets[p.rank[i]], p.offsets[p.rank[i] + 1])))


def reuse_slot(random, plan, p):
    b = p.buffers
    arena = np.flatnonzero((b.space == Space.ARENA) & (b.num_bytes > 0))
    one = pick(random, arena)
    if one is None:
        return None
    other = pick(random, arena[b.rank[arena] == b.rank[one]])
    return with_buffer(p, "offset", one, b.offset[other] + random.choice([0, 0, 256, 8, -256]))


def change_slices(random, plan, p):
    i = pick(random, of(p, Op.ATTEND, Op.ATTEND_GRAD))
    if i is None:
        return None
    if random.random() < 0.3:
        return with_column(p, "slices", i, p.slices[pick(random, of(p, Op.ATTEND, Op.ATTEND_GRAD))])
    return with_column(p, "slices", (i, random.integers(2)), p.slices[i, 0] + random.integers(-2, 4))


def change_index(random, plan, p):
    """Attend another slice, or two in each other's place."""
    if not len(p.index):
        return None
    index, i = p.index.copy(), random.integers(len(p.index))
    j = random.integers(len(index))
    match random.integers(3):
        case 0:
            index[i] = index[j]
        case 1:
            index[[i, j]] = index[[j, i]]
        case _:
            index[i] += random.choice([-1, 1])
    return replace(p, index=index)


def change_round(random, plan, p):
    i = pick(random, np.flatnonzero(p.round >= 0))
    return None if i is None else with_column(p, "round", i, p.round[i] + random.choice([-2, -1, 1, 2]))


def change_heads(random, plan, p):
    i = pick(random, np.arange(len(p)))
    k = random.integers(4)
    return with_column(p, "heads", (i, k), p.heads[i, k] + random.choice([-1, 1]))


def change_role(random, plan, p):
    if random.random() < 0.5:
        return with_column(p, "role", pick(random, np.arange(len(p))), random.integers(-1, len(Role)))
    return with_buffer(p, "role", pick(random, np.arange(len(p.buffers))), random.integers(-2, len(Role)))


def change_space(random, plan, p):
    b = pick(random, np.arange(len(p.buffers)))
    if random.random() < 0.5:
        return with_buffer(p, "acc", b, not p.buffers.acc[b])
    return with_buffer(p, "space", b, random.integers(0, 5))


def change_op(random, plan, p):
    return with_column(p, "op", pick(random, np.arange(len(p))), random.integers(0, len(Op) + 1))


def change_all_to_all(random, plan, p):
    i = pick(random, of(p, Op.ALL_TO_ALL))
    if i is None:
        return None
    match random.integers(4):
        case 0:
            return _without(p, i)
        case 1:
            return with_column(p, "round", i, p.round[i] + random.choice([-1, 1]))
        case 2:
            return with_column(p, "buf", (i, random.integers(3)), p.buf[i, random.integers(3)])
        case _:
            return _moved(p, i, pick(random, np.arange(p.offsets[p.rank[i]], p.offsets[p.rank[i] + 1])))


PROGRAM_MUTATIONS = (
    drop,
    duplicate,
    swap_neighbours,
    reorder,
    retarget_peer,
    retarget_buffer,
    resize_rows,
    resize_buffer,
    remove_wait,
    move_launch,
    reuse_slot,
    change_slices,
    change_index,
    change_round,
    change_heads,
    change_role,
    change_space,
    change_op,
    change_all_to_all,
)


def edit_slice(random: Random, plan: Plan) -> Plan | None:
    """Shrink, grow or shift a slice, or put another in its place."""
    m = random.integers(len(plan.slices))
    table = plan.slices[m].copy()
    if not len(table):
        return None
    i = random.integers(len(table))
    if random.random() < 0.3:
        table[i] = table[random.integers(len(table))]
    else:
        table[i, random.integers(6)] += random.choice([-1, 1])
    return replace(plan, slices=(*plan.slices[:m], table, *plan.slices[m + 1 :]))


def edit_placement(random: Random, plan: Plan) -> Plan | None:
    """Move a border of the placement."""
    name = random.choice(["spans", "column_rows", "rank_rows"])
    column = getattr(plan, name).copy()
    if not len(column):
        return None
    column[random.integers(len(column)), random.integers(2)] += random.choice([-1, 1])
    return replace(plan, **{name: column})


PLAN_MUTATIONS = (edit_slice, edit_placement)


def drop_one(plan: Plan, mask: int, direction: int, i: int) -> Plan:
    """Leave out one instruction, by its index over all ranks."""
    return with_program(plan, mask, direction, _without(plan.programs[mask][direction], i))


def corrupt(plan: Plan, seed: int) -> Plan:
    """Overwrite a few entries of any column with extreme numbers, or change a column's shape: a hostile file."""
    random = np.random.default_rng(seed)
    mask, direction = random.integers(len(plan.programs)), random.integers(2)
    programs = plan.programs[mask][direction]
    owner = [programs, programs.buffers, plan, plan.shards][random.integers(4)]
    names = [f.name for f in fields(owner) if isinstance(getattr(owner, f.name), np.ndarray)]
    name = random.choice(names)
    column = getattr(owner, name).copy()
    if random.random() < 0.15:
        column = [column[:-1], column[None], column.astype(np.float64), np.concatenate([column, column])][
            random.integers(4)
        ]
    elif column.size and column.dtype != np.bool_:
        limits = np.iinfo(column.dtype)
        extreme = [limits.min, limits.max, -1, 0, limits.max // 2, limits.min // 2, min(column.size, limits.max)]
        flat = column.reshape(-1)
        for _ in range(random.integers(1, 4)):
            flat[random.integers(len(flat))] = random.choice(np.array(extreme, column.dtype))
    elif column.size:
        column.view(np.uint8)[random.integers(len(column))] = 7
    if owner is plan:
        return replace(plan, **{name: column})
    changed = replace(owner, **{name: column})
    if owner is plan.shards:
        return replace(plan, shards=changed)
    if isinstance(owner, Buffers):
        changed = replace(programs, buffers=changed)
    return with_program(plan, mask, direction, changed)
