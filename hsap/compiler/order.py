"""Order: the transfers that a schedule needs, on its time axis.

What a planner routed itself stays as it is. Other inputs come straight from their home rank in the stage before first
use; other partial results go home in the stage after the last block that adds to them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.program import KV_ROLES, PARTIAL_ROLES, Role
from hsap.ir.schedule import INPUTS, OUTPUTS, Schedule, Transfers
from hsap.loops import loop

IS_OF_QUERIES = ~np.isin(np.arange(max(Role) + 1), KV_ROLES)
"""Whether a role's rows are those of queries, else they are those of keys: table over all roles."""

IS_RESULT = np.isin(np.arange(max(Role) + 1), PARTIAL_ROLES)
"""Whether a role's rows are partial results, which go home: table over all roles."""


def order(shards: Shards, schedule: Schedule, direction: str) -> tuple[Transfers, Transfers]:
    """Complete a schedule: (input transfers, output transfers), every row a (role, shard, group) between two ranks."""
    routed = schedule.transfers
    given = routed_roles(schedule)
    inputs, outputs = (
        [] if routed is None else [routed.take(np.isin(routed.role, roles[direction]))] for roles in (INPUTS, OUTPUTS)
    )
    # Roles of one side are used by the same blocks.
    wanted = {
        role: bool(IS_OF_QUERIES[role]) for role in (*INPUTS[direction], *OUTPUTS[direction]) if role not in given
    }
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
    inputs, results = (replace(table, stage=stage, until=stage) for table, stage in zip(transfers, apart))
    return replace(schedule, stage=2 * schedule.stage), (inputs, results)


def _uses(shards: Shards, schedule: Schedule, is_query: bool) -> tuple[np.ndarray, ...]:
    """Remote uses of one side's shards: (shard, group, rank, first stage, last stage), one per (shard, group, rank)."""
    shard = schedule.shard_of(Role.Q if is_query else Role.KV)
    sizes = (int(column.max(initial=0)) + 1 for column in (schedule.group, schedule.rank, schedule.stage))
    num_groups, num_ranks, num_stages = sizes
    use = ((shard * num_groups + schedule.group) * num_ranks + schedule.rank) * num_stages + schedule.stage
    uses = use[shards.home[shard] != schedule.rank]
    uses.sort()
    return tuple(_first_and_last(uses, num_groups, num_ranks, num_stages))


@loop
def _first_and_last(uses: np.ndarray, num_groups: int, num_ranks: int, num_stages: int) -> np.ndarray:
    """What `_uses` gives, int64 [5, n]. uses: (shard, group, rank, stage) as one number, rising."""
    out = np.empty((5, len(uses)), np.int64)
    count = 0
    for i in range(len(uses)):
        place, stage = uses[i] // num_stages, uses[i] % num_stages
        if i == 0 or place != uses[i - 1] // num_stages:
            shard_group = place // num_ranks
            out[0, count], out[1, count] = shard_group // num_groups, shard_group % num_groups
            out[2, count], out[3, count] = place % num_ranks, stage
            count += 1
        out[4, count - 1] = stage
    return out[:, :count]
