"""Live: what of the arena a strategy needs, from when trays arrive and leave."""

from __future__ import annotations

import numpy as np

from hsap.compiler.lay import Laid
from hsap.compiler.trays import NEVER
from hsap.ir.problem import Problem
from hsap.ir.program import Role
from hsap.ir.reshard import scratch_bytes
from hsap.ir.schedule import INPUTS, OUTPUTS
from hsap.tune.counted import Cost, Counted
from hsap.tune.ends import split


def arena_bytes(problem: Problem, counted: Counted, cost: Cost) -> int:
    """Estimate the arena of the rank that needs the most, in bytes.

    Counted stage by stage: accumulators of the rank's own results, inputs from their arrival to their last use,
    partial results from first use to leaving, what arrives to be folded in, and what is packed until it has left. Gaps
    between buffers aren't counted.
    """
    laid, inter = counted.laid, problem.topology.inter_sp
    narrow, wide = cost.rows(False), cost.rows(True)
    held = np.zeros((counted.num_stages + 1, inter), np.int64)
    always = sum((counted.home_tokens * wide[role, -1] for role in OUTPUTS[laid.direction]), np.zeros(inter, np.int64))
    _hold_inputs(held, counted, narrow)
    _hold_results(held, counted, narrow, wide)
    copies = laid.copies
    size = counted.tokens(copies.first, copies.stop) * narrow[copies.role, copies.run]
    _hold(held, laid, copies.rank, copies.stage, copies.until, size)
    peak = np.cumsum(held, axis=0)
    kept, scratch = _resharded(problem, counted, cost)
    return int((always + kept + np.maximum(peak.max(axis=0), scratch)).max(initial=0))


def _hold_inputs(held: np.ndarray, counted: Counted, narrow: np.ndarray) -> None:
    laid = counted.laid
    trays, m = laid.trays, laid.messages
    last = _by_tray(laid, np.maximum, NEVER)
    for role in INPUTS[laid.direction]:
        there = np.flatnonzero(trays.stage[role] != NEVER)
        begin = np.full(trays.num_ranks + len(trays.rank), 1 << 30)
        mine = m.of(role)
        np.minimum.at(begin, m.target[mine], m.stage[mine])
        # Whoever passes rows on has them until they have left.
        passed = np.full(len(begin), NEVER)
        np.maximum.at(passed, m.source[mine], m.until[mine])
        end = np.maximum(np.maximum(last[there], trays.stage[role, there]), passed[trays.num_ranks + there])
        size = counted.tray_tokens(there) * narrow[role, trays.run[there]]
        _hold(held, laid, trays.rank[there], begin[trays.num_ranks + there], end, size)


def _hold_results(held: np.ndarray, counted: Counted, narrow: np.ndarray, wide: np.ndarray) -> None:
    laid = counted.laid
    trays, m = laid.trays, laid.messages
    first = _by_tray(laid, np.minimum, 1 << 30)
    for role in OUTPUTS[laid.direction]:
        mine = m.of(role)
        there = np.flatnonzero(trays.stage[role] != NEVER)
        rank, leaves, run = trays.rank[there], trays.stage[role, there], trays.run[there]
        _hold(
            held, laid, rank, np.minimum(first[there], leaves), leaves - 1, counted.tray_tokens(there) * wide[role, run]
        )
        gone = np.full(trays.num_ranks + len(trays.rank), NEVER)
        np.maximum.at(gone, m.source[mine], m.until[mine])
        gone = np.maximum(gone[trays.num_ranks + there], leaves)
        _hold(held, laid, rank, leaves, gone, counted.tray_tokens(there) * narrow[role, run])
        arrives = counted.tokens(m.first[mine], m.stop[mine]) * narrow[role, m.run[mine]]
        _hold(held, laid, m.dst[mine], m.stage[mine], m.until[mine], arrives)


def _by_tray(laid: Laid, extreme: np.ufunc, none: int) -> np.ndarray:
    """First or last stage in which each tray is used by blocks: int64 [num_trays]."""
    trays = laid.trays
    found = np.full(trays.num_ranks + len(trays.rank), none)
    for on in (laid.kernels.on_q, laid.kernels.on_kv):
        extreme.at(found, on, laid.entries.stage)
    return found[trays.num_ranks :]


def _hold(held: np.ndarray, laid: Laid, rank: np.ndarray, begin: np.ndarray, end: np.ndarray, size: np.ndarray) -> None:
    """Count bytes on ranks from the stage in which they come to that in which they go."""
    np.add.at(held, (begin - laid.first_stage, rank), size)
    np.add.at(held, (end - laid.first_stage + 1, rank), -size)


def _resharded(problem: Problem, counted: Counted, cost: Cost) -> tuple[int, int]:
    """Bytes of a rank's all-to-alls: (head-sharded do, which backward keeps to its end; the largest scratch)."""
    if problem.topology.intra_sp == 1:
        return 0, 0
    direction, tokens = counted.laid.direction, split(counted.home_tokens, problem.topology.intra_sp)
    roles = [(role, False) for role in OUTPUTS[direction]]
    roles += [(role, True) for role in INPUTS[direction] if direction == "forward" or role == Role.DO]
    scratch = max(int(scratch_bytes(role, out, problem.heads, cost.precision, tokens).max()) for role, out in roles)
    if direction == "forward":
        return 0, scratch
    return int(counted.home_tokens.max(initial=0) * cost.rows(False)[Role.DO].sum()), scratch
