"""Attention kernels behind one interface: `select_kernel` picks one, `Kernel` says what it does."""

from hsap.ir.heads import HeadRun
from hsap.runtime.kernels.delta import row_delta
from hsap.runtime.kernels.merge import merge, reset
from hsap.runtime.kernels.select import partial_output, select_kernel
from hsap.runtime.kernels.work import Kernel, Work

__all__ = [
    "HeadRun",
    "Kernel",
    "Work",
    "merge",
    "partial_output",
    "reset",
    "row_delta",
    "select_kernel",
]
