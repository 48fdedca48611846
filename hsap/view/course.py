"""Course: when the instructions of one mask and direction ran, and what every rank did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.program import Op, Programs
from hsap.sim.timeline import Trace

PARTS = ("attention", "other", "exposed", "gaps", "done")
"""What a rank's time goes to: attention; copies, merges and sums; standing still for messages; between instructions,
which takes time only in a measured run; done before the last rank is (imbalance)."""


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """Seconds from the start of the stream, float64 [n] each, a value per instruction.

    start, end: on the compute stream. comm_start, comm_end: on the communicator, NaN where nothing was on its way.
    spent_s: float64 [num_ranks, 5], columns `PARTS`, that add up to makespan_s.
    """

    programs: Programs
    start: np.ndarray
    end: np.ndarray
    comm_start: np.ndarray
    comm_end: np.ndarray
    makespan_s: float
    spent_s: np.ndarray

    @classmethod
    def of(cls, programs: Programs, start, end, comm_start, comm_end, seconds) -> Course:
        """Build from times. seconds: float64 [n], the part of each instruction that isn't standing still."""
        op, rank, num_ranks = programs.op, programs.rank, programs.num_ranks
        attends = (op == Op.ATTEND) | (op == Op.ATTEND_GRAD)
        stands = (op == Op.WAIT) | (op == Op.ALL_TO_ALL)
        last_s = np.zeros(num_ranks)
        np.maximum.at(last_s, rank, end)
        makespan_s = float(max(end.max(initial=0.0), np.nanmax(comm_end, initial=0.0)))
        parts = [
            np.bincount(rank, amount, num_ranks)
            for amount in (
                np.where(attends, seconds, 0.0),
                np.where(attends, 0.0, seconds),
                np.where(stands, end - start - seconds, 0.0),
            )
        ]
        parts.append(np.maximum(last_s - sum(parts), 0.0))
        parts.append(np.maximum(makespan_s - last_s, 0.0))
        return cls(programs, start, end, comm_start, comm_end, makespan_s, np.stack(parts, axis=1))

    @classmethod
    def planned(cls, trace: Trace) -> Course:
        """Take the simulator's times."""
        times = trace.times
        return cls.of(trace.programs, times.start, times.end, times.comm_start, times.comm_end, trace.seconds)


def partners(programs: Programs) -> np.ndarray:
    """Index of the receive that a send meets, and of the send that a receive meets: int64 [n], -1 elsewhere.

    Between two ranks the transfers of a round meet in the order in which either side lists them.
    """
    out = np.full(len(programs), -1, np.int64)
    moved = np.flatnonzero((programs.op == Op.SEND) | (programs.op == Op.RECV))
    receives = programs.op[moved] == Op.RECV
    own, other = programs.rank[moved], programs.peer[moved].astype(np.int64)
    key = np.stack([programs.round[moved], np.where(receives, other, own), np.where(receives, own, other), receives])
    order = np.lexsort([moved, *key[::-1]])
    moved, key = moved[order], key[:, order]
    # The place of each half among its equals; then halves of one place lie side by side.
    first = np.flatnonzero(np.append(True, (key[:, 1:] != key[:, :-1]).any(axis=0))[: len(moved)])
    place = np.arange(len(moved)) - np.repeat(first, np.diff(np.append(first, len(moved))))
    key = np.concatenate([key[:3], place[None], key[3:]])
    order = np.lexsort(key[::-1])
    moved, key = moved[order], key[:, order]
    send = np.flatnonzero((key[:4, 1:] == key[:4, :-1]).all(axis=0))
    out[moved[send]], out[moved[send + 1]] = moved[send + 1], moved[send]
    return out
