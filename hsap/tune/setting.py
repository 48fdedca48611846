"""Setting: one way of running a model on a job's ranks, and the machine that it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from hsap.ir.heads import DTYPE_BYTES
from hsap.ir.problem import Cluster, Topology

GIB = 1 << 30
MATMUL_EFFICIENCY = 0.7
"""Part of a device's rate that the model's matrix products reach: an assumption, as for large bf16 products on A100."""
RESERVE_BYTES = 2 * GIB
RESERVE_SHARE = 0.05
"""What is left alone on an accelerator: its context, communicators and workspaces, and a share lost to fragments."""
TIGHT_SHARE = 0.05
"""A setting that leaves less than this part of the memory beside the reserve may fail where the estimate is off."""


def is_host(cluster: Cluster) -> bool:
    """Whether ranks run on a host's cores, with no device of their own."""
    return cluster.name == "cpu-gloo" or cluster.cores is not None


def reserve_bytes(cluster: Cluster) -> float:
    """Bytes of a rank's memory that nothing is planned for; none on a host's, which swaps before it fails."""
    return 0.0 if is_host(cluster) else RESERVE_BYTES + RESERVE_SHARE * cluster.capacity_bytes


@dataclass(frozen=True, slots=True)
class Setting:
    """How a job is run: world = dp × topology.num_ranks ranks, a micro-step of micro_packs packs in each SP group."""

    dp: int
    topology: Topology
    planner: str
    zero_stage: int
    checkpointing: str
    micro_packs: int
    accumulation: int
    dtype: str = "bf16"

    @property
    def world(self) -> int:
        return self.dp * self.topology.num_ranks

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or activation."""
        return DTYPE_BYTES[self.dtype]
