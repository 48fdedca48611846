"""Tables: changes of slices and placement that all that points at them follows, so that they may even be right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.ir.plan import Plan
from hsap.ir.program import Op, Programs
from hsap.ir.slice import shrink
from tests.mutation.mutants import Random, in_order, pick, with_program


def _with_index(p: Programs, mapping: list[list[int]]) -> Programs:
    """Let each entry of the index become some entries; ranges of instructions follow."""
    parts = [mapping[i] for i in p.index.tolist()]
    ends = np.r_[0, np.cumsum([len(part) for part in parts])]
    attends = np.isin(p.op, (Op.ATTEND, Op.ATTEND_GRAD))
    slices = p.slices.copy()
    slices[attends] = ends[slices[attends]]
    return replace(p, index=np.array([i for part in parts for i in part], np.int32), slices=slices)


def _remapped(plan: Plan, mask: int, table: np.ndarray, mapping: list[list[int]]) -> Plan:
    for direction in range(2):
        plan = with_program(plan, mask, direction, _with_index(plan.programs[mask][direction], mapping))
    return replace(plan, slices=(*plan.slices[:mask], table, *plan.slices[mask + 1 :]))


def _any_slice(random: Random, plan: Plan) -> tuple[int, int] | None:
    mask = int(random.integers(len(plan.slices)))
    return (mask, int(random.integers(len(plan.slices[mask])))) if len(plan.slices[mask]) else None


def slice_is_cut(random: Random, plan: Plan) -> Plan | None:
    """A slice becomes two, cut along a row, a key or a diagonal, with no pair lost or doubled, or with some."""
    found = _any_slice(random, plan)
    if found is None:
        return None
    mask, i = found
    table, side = plan.slices[mask], int(random.integers(3))
    low, high = table[i, 2 * side : 2 * side + 2].tolist()
    if high - low < 1:
        return None
    at, slip = int(random.integers(low + 1, high + 1)), int(random.choice([0, 0, 0, -1, 1]))
    parts = np.stack([table[i], table[i]])
    parts[0, 2 * side + 1], parts[1, 2 * side] = at - (side == 2), at + slip
    parts, _ = shrink(parts)
    if len(parts) != 2:
        return None
    mapping = [[j] for j in range(len(table))]
    mapping[i] = [i, len(table)]
    return _remapped(plan, mask, np.concatenate([table[:i], parts[:1], table[i + 1 :], parts[1:]]), mapping)


def slices_are_turned(random: Random, plan: Plan) -> Plan | None:
    """Two slices change places in the table, and in the index, or not there."""
    found = _any_slice(random, plan)
    if found is None:
        return None
    mask, i = found
    table = plan.slices[mask].copy()
    j = int(random.integers(len(table)))
    table[[i, j]] = table[[j, i]]
    mapping = [[k] for k in range(len(table))]
    if random.random() < 0.5:
        mapping[i], mapping[j] = mapping[j], mapping[i]
    return _remapped(plan, mask, table, mapping)


def slice_is_lost(random: Random, plan: Plan) -> Plan | None:
    """A slice is left out of the table and of the index; kernels without any are left as they are."""
    found = _any_slice(random, plan)
    if found is None:
        return None
    mask, i = found
    mapping = [[j - (j > i)] if j != i else [] for j in range(len(plan.slices[mask]))]
    return _remapped(plan, mask, np.delete(plan.slices[mask], i, axis=0), mapping)


def slice_is_there_twice(random: Random, plan: Plan) -> Plan | None:
    """A slice is there twice and attended twice."""
    found = _any_slice(random, plan)
    if found is None:
        return None
    mask, i = found
    table = plan.slices[mask]
    mapping = [[j] for j in range(len(table))]
    mapping[i] = [i, len(table)]
    return _remapped(plan, mask, np.concatenate([table, table[i : i + 1]]), mapping)


def index_is_turned(random: Random, plan: Plan) -> Plan | None:
    """A kernel attends its slices in another order."""
    mask, direction = random.integers(len(plan.programs)), random.integers(2)
    p = plan.programs[mask][direction]
    many = pick(random, np.flatnonzero(p.slices[:, 1] - p.slices[:, 0] > 1))
    if many is None:
        return None
    lo, hi = p.slices[many]
    index = p.index.copy()
    index[lo:hi] = index[lo:hi][::-1]
    return with_program(plan, mask, direction, replace(p, index=index))


def masks_exchange(random: Random, plan: Plan) -> Plan | None:
    """Two masks have each other's slices or programs, or the two directions do."""
    if len(plan.programs) < 2 or random.random() < 0.5:
        mask = random.integers(len(plan.programs))
        pairs = list(plan.programs)
        pairs[mask] = pairs[mask][::-1]
        return replace(plan, programs=tuple(pairs))
    if random.random() < 0.5:
        return replace(plan, slices=plan.slices[::-1])
    return replace(plan, programs=plan.programs[::-1])


def gathered_spans_are_turned(random: Random, plan: Plan) -> Plan | None:
    """Two spans behind those of shards and ranks change places: the order in which somebody gathers rows."""
    behind = max(len(plan.shards.spans), int(plan.rank_rows.max(initial=0)))
    if len(plan.spans) - behind < 2:
        return None
    i, j = behind + random.choice(len(plan.spans) - behind, 2, replace=False)
    spans = plan.spans.copy()
    spans[[i, j]] = spans[[j, i]]
    return replace(plan, spans=spans)


def gathered_span_is_another(random: Random, plan: Plan) -> Plan | None:
    """A span behind those of shards and ranks becomes another of the shards'."""
    behind = max(len(plan.shards.spans), int(plan.rank_rows.max(initial=0)))
    if len(plan.spans) == behind:
        return None
    spans = plan.spans.copy()
    spans[random.integers(behind, len(spans))] = spans[random.integers(len(plan.shards.spans))]
    return replace(plan, spans=spans)


def shards_are_turned(random: Random, plan: Plan) -> Plan | None:
    """Two spans of shards change places, in both tables, and so where their rows live."""
    n = len(plan.shards.spans)
    if n < 2:
        return None
    i, j = random.choice(n, 2, replace=False)
    spans, own = plan.spans.copy(), plan.shards.spans.copy()
    spans[[i, j]], own[[i, j]] = spans[[j, i]], own[[j, i]]
    return replace(plan, spans=spans, shards=replace(plan.shards, spans=own))


def border_moves(random: Random, plan: Plan) -> Plan | None:
    """A token goes from a span to the one behind it, wherever either of them stands."""
    own = plan.shards.spans
    if not len(own):
        return None
    at, by = int(random.choice(own[:, 1])), int(random.choice([-1, 1]))
    spans, shards = plan.spans.copy(), own.copy()
    spans[spans == at] += by
    shards[shards == at] += by
    return replace(plan, spans=spans, shards=replace(plan.shards, spans=shards))


def rank_border_moves(random: Random, plan: Plan) -> Plan | None:
    """A rank's rows reach one span further, and its neighbour's begin one later."""
    if plan.num_ranks < 2:
        return None
    rank, by = int(random.integers(plan.num_ranks - 1)), int(random.choice([-1, 1]))
    rows, columns = plan.rank_rows.copy(), plan.column_rows.copy()
    rows[rank, 1] += by
    rows[rank + 1, 0] += by
    if plan.topology.intra_sp == 1:
        columns[rank, 1] += by
        columns[rank + 1, 0] += by
    return replace(plan, rank_rows=rows, column_rows=columns)


def stream_is_cut_short(random: Random, plan: Plan) -> Plan | None:
    """A rank's stream ends early."""
    mask, direction = random.integers(len(plan.programs)), random.integers(2)
    p = plan.programs[mask][direction]
    rank = random.integers(plan.num_ranks)
    lo, hi = p.offsets[rank : rank + 2]
    if hi == lo:
        return None
    stop = int(random.integers(lo, hi))
    order = np.r_[np.arange(stop), np.arange(hi, len(p))]
    offsets = p.offsets - np.where(np.arange(len(p.offsets)) > rank, hi - stop, 0)
    return with_program(plan, mask, direction, in_order(p, order, offsets))


PLAN_CHANGES = (
    slice_is_cut, slices_are_turned, slice_is_lost, slice_is_there_twice, index_is_turned, masks_exchange,
    gathered_spans_are_turned, gathered_span_is_another, shards_are_turned, border_moves, rank_border_moves,
    stream_is_cut_short,
)  # fmt: skip
