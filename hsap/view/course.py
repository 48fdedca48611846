"""Course: when the instructions of one mask and direction ran, and what every rank did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.program import Programs
from hsap.sim.clock import Times
from hsap.sim.spent import spent
from hsap.sim.timeline import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """Seconds from the start of the stream, float64 [n] each, a value per instruction.

    start, end: on the compute stream. comm_start, comm_end: on the communicator, NaN where nothing was on its way.
    spent_s: float64 [num_ranks, 5], see `hsap.sim.spent`.
    """

    programs: Programs
    start: np.ndarray
    end: np.ndarray
    comm_start: np.ndarray
    comm_end: np.ndarray
    makespan_s: float
    spent_s: np.ndarray

    @classmethod
    def of(cls, programs: Programs, times: Times) -> Course:
        """Build from times."""
        return cls(programs, times.start, times.end, times.comm_start, times.comm_end, *spent(programs, times))

    @classmethod
    def planned(cls, trace: Trace) -> Course:
        """Take the simulator's times."""
        return cls.of(trace.programs, trace.times)
