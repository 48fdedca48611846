"""Spent: what every rank's time goes to, of a simulated course or of a measured one."""

from __future__ import annotations

import numpy as np

from hsap.ir.program import Op, Programs
from hsap.sim.clock import Times

PARTS = ("attention", "other", "exposed", "gaps", "done")
"""What a rank's time goes to: attention; copies, merges and sums; standing still for messages; between instructions,
which takes time only in a measured run; done before the last rank is (imbalance)."""


def spent(programs: Programs, times: Times) -> tuple[float, np.ndarray]:
    """Seconds until all is over, and of each rank by `PARTS`: (makespan, float64 [num_ranks, 5] that add up to it)."""
    op, rank, num_ranks = programs.op, programs.rank, programs.num_ranks
    attends = (op == Op.ATTEND) | (op == Op.ATTEND_GRAD)
    # As long as it really took: whatever shares a device, a card or cores slows an instruction down.
    worked_s = times.worked - times.start
    last_s = np.zeros(num_ranks)
    np.maximum.at(last_s, rank, times.end)
    makespan_s = float(max(times.end.max(initial=0.0), np.nanmax(times.comm_end, initial=0.0)))
    parts = [
        np.bincount(rank, amount, num_ranks)
        for amount in (np.where(attends, worked_s, 0.0), np.where(attends, 0.0, worked_s), times.end - times.worked)
    ]
    parts.append(np.maximum(last_s - sum(parts), 0.0))
    parts.append(np.maximum(makespan_s - last_s, 0.0))
    return makespan_s, np.stack(parts, axis=1)
