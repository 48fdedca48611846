"""Live: what of the arena a strategy needs, from when trays arrive and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsap.compiler.order import is_of_queries
from hsap.compiler.trays import NEVER
from hsap.ir.heads import HeadRun
from hsap.ir.precision import Precision, row_bytes
from hsap.ir.problem import Problem
from hsap.ir.program import Role, Space
from hsap.ir.reshard import scratch_bytes
from hsap.ir.schedule import INPUTS, OUTPUTS
from hsap.tune.ends import rank_tokens

if TYPE_CHECKING:
    from hsap.tune.stages import Laid


def arena_bytes(problem: Problem, laid: Laid, share: HeadRun) -> int:
    """Estimate the arena of the rank that needs the most, in bytes.

    Counted stage by stage: accumulators of the rank's own results, inputs from their arrival to their last use,
    partial results from first use to leaving, and what arrives to be folded in. Gaps between buffers aren't counted.
    """
    inter, dim = problem.topology.inter_sp, problem.heads.head_dim
    precision = Precision.of(problem.heads.dtype, problem.wire_dtype)
    if laid.num_groups > 1:
        heads = np.array(problem.heads.groups(share, laid.num_groups), np.int64)
    else:
        heads = np.array([(0, share.q_count, 0, share.kv_count)], np.int64)

    def row(role: Role, acc: bool) -> np.ndarray:
        return sum(row_bytes(precision, role, Space.ARENA, acc, heads, dim))

    held = np.zeros((laid.num_stages + 1, inter), np.int64)
    home = np.bincount(laid.shards.home, laid.tokens, inter).astype(np.int64)
    always = sum((home * row(role, True).sum() for role in OUTPUTS[laid.direction]), np.zeros(inter, np.int64))
    for of_queries, trays in laid.trays.items():
        tokens, (first, last) = laid.tray_tokens(of_queries), _uses(laid, of_queries)
        for role in INPUTS[laid.direction]:
            if is_of_queries(role) == of_queries:
                there = np.flatnonzero(trays.stage[role] != NEVER)
                size = tokens * row(role, False)[trays.group]
                came = np.maximum(trays.stage[role] - laid.ahead, laid.first_stage)
                _hold(held, laid, trays, there, came, np.maximum(last, trays.stage[role]), size)
        for role in OUTPUTS[laid.direction]:
            if is_of_queries(role) == of_queries:
                there = np.flatnonzero(trays.stage[role] != NEVER)
                leaves = trays.stage[role]
                size = tokens * row(role, True)[trays.group]
                _hold(held, laid, trays, there, np.minimum(first, leaves), leaves - 1, size)
                gone = np.minimum(leaves + laid.ahead, laid.first_stage + laid.num_stages - 1)
                _hold(held, laid, trays, there, leaves, gone, tokens * row(role, False)[trays.group])
    leaving = laid.transfers[1]
    for role in OUTPUTS[laid.direction]:
        mine = leaving.take(leaving.role == role)
        size = laid.tokens[mine.shard] * row(role, False)[mine.group]
        np.add.at(held, (mine.stage - laid.first_stage, mine.dst), size)
        np.add.at(held, (mine.until - laid.first_stage + 1, mine.dst), -size)
    peak = np.cumsum(held, axis=0)
    kept, scratch = _resharded(problem, laid, precision, share)
    return int((always + kept + np.maximum(peak.max(axis=0), scratch)).max(initial=0))


def _uses(laid: Laid, of_queries: bool) -> tuple[np.ndarray, np.ndarray]:
    """First and last stage in which each tray is used: int64 [num_trays] each."""
    on, count = laid.on[of_queries], len(laid.trays[of_queries].rank)
    away = np.flatnonzero(on >= 0)
    first, last = np.full(count, 1 << 30), np.full(count, NEVER)
    np.minimum.at(first, on[away], laid.schedule.stage[away])
    np.maximum.at(last, on[away], laid.schedule.stage[away])
    return first, last


def _hold(held, laid: Laid, trays, there, begin, end, size) -> None:
    np.add.at(held, (begin[there] - laid.first_stage, trays.rank[there]), size[there])
    np.add.at(held, (end[there] - laid.first_stage + 1, trays.rank[there]), -size[there])


def _resharded(problem: Problem, laid: Laid, precision: Precision, share: HeadRun) -> tuple[int, int]:
    """Bytes of a rank's all-to-alls: (head-sharded do, which backward keeps to its end; the largest scratch)."""
    if problem.topology.intra_sp == 1:
        return 0, 0
    tokens = rank_tokens(problem, laid.shards)
    roles = [(role, False) for role in OUTPUTS[laid.direction]]
    roles += [(role, True) for role in INPUTS[laid.direction] if laid.direction == "forward" or role == Role.DO]
    scratch = max(int(scratch_bytes(role, out, problem.heads, precision, tokens).max()) for role, out in roles)
    if laid.direction == "forward":
        return 0, scratch
    heads = np.array(share, np.int64)
    row = sum(row_bytes(precision, Role.DO, Space.ARENA, False, heads, problem.heads.head_dim))
    return int(tokens.sum(axis=1).max() * row), scratch
