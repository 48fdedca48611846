"""Order: the transfers that a schedule needs, on its time axis.

What a planner routed itself stays as it is. Other inputs come straight from their home rank in the stage before first
use; other partial results go home in the stage after the last block that adds to them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.program import Role
from hsap.ir.schedule import INPUTS, OUTPUTS, Schedule, Transfers
from hsap.ir.sort import order_of

_QUERY_SIDE = (Role.Q, Role.O, Role.DO, Role.DQ)


def is_of_queries(role: Role) -> bool:
    """Whether a role's rows are those of queries; else they are those of keys."""
    return role in _QUERY_SIDE


def shard_of(schedule: Schedule, role: Role) -> np.ndarray:
    """Shard whose `role` each entry of the schedule reads or writes: int64 [num_entries]."""
    return _side(schedule, is_of_queries(role))


def _side(schedule: Schedule, is_query: bool) -> np.ndarray:
    return (schedule.blocks.q if is_query else schedule.blocks.kv)[schedule.block]


def order(shards: Shards, schedule: Schedule, direction: str) -> tuple[Transfers, Transfers]:
    """Complete a schedule: (input transfers, output transfers), every row a (role, shard, group) between two ranks."""
    routed = schedule.transfers
    given = routed_roles(schedule)
    inputs, outputs = (
        [] if routed is None else [routed.take(np.isin(routed.role, roles[direction]))] for roles in (INPUTS, OUTPUTS)
    )
    # Roles of one side are used by the same blocks.
    wanted = {role: is_of_queries(role) for role in (*INPUTS[direction], *OUTPUTS[direction]) if role not in given}
    uses = {is_query: _uses(shards, schedule, is_query) for is_query in set(wanted.values())}
    for role in INPUTS[direction]:
        if role in wanted:
            shard, group, rank, first, _ = uses[wanted[role]]
            inputs.append(Transfers.of(role, shard, shards.home[shard], rank, first - 1, group))
    for role in OUTPUTS[direction]:
        if role in wanted:
            shard, group, rank, _, last = uses[wanted[role]]
            outputs.append(Transfers.of(role, shard, rank, shards.home[shard], last + 1, group))
    return Transfers.join(*inputs), Transfers.join(*outputs)


def routed_roles(schedule: Schedule) -> set[int]:
    """Roles whose transfers the planner chose itself."""
    return set() if schedule.transfers is None else set(np.unique(schedule.transfers.role).tolist())


def without_overlap(
    schedule: Schedule, transfers: tuple[Transfers, Transfers]
) -> tuple[Schedule, tuple[Transfers, Transfers]]:
    """Give every transfer a stage of its own between those that compute.

    Nothing is then fetched while something else is computed, so that fewer buffers are alive together: for plans that
    don't fit their arena otherwise (HSAP §3.4).
    """
    arriving, leaving = transfers
    apart = (2 * arriving.until + 1, 2 * leaving.stage - 1)
    alone = tuple(replace(table, stage=stage, until=stage) for table, stage in zip(transfers, apart))
    return replace(schedule, stage=2 * schedule.stage), alone


def _uses(shards: Shards, schedule: Schedule, is_query: bool) -> tuple[np.ndarray, ...]:
    """Remote uses of one side's shards: (shard, group, rank, first stage, last stage), one per (shard, group, rank)."""
    shard = _side(schedule, is_query)
    away = np.flatnonzero(shards.home[shard] != schedule.rank)
    num_ranks = int(schedule.rank.max(initial=0)) + 1
    num_groups = int(schedule.group.max(initial=0)) + 1
    key = (shard[away] * num_groups + schedule.group[away]) * num_ranks + schedule.rank[away]
    stage = schedule.stage[away]
    by_key = order_of(key * (int(stage.max(initial=0)) + 1) + stage)
    key, stage = key[by_key], stage[by_key]
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]]) if len(key) else np.zeros(0, np.int64)
    last = np.append(first[1:], len(key)) - 1 if len(key) else first
    unique = key[first]
    shard_group, rank = unique // num_ranks, unique % num_ranks
    return shard_group // num_groups, shard_group % num_groups, rank, stage[first], stage[last]
