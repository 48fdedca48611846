"""Executor: a plan on torch.distributed, one process a rank; NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.ir.plan import Plan
from hsap.runtime.kernels import Kernel, select_kernel
from hsap.runtime.machine import Kept, Machine, finish
from hsap.runtime.memory import TORCH_DTYPES, Arena
from hsap.runtime.transport import Distributed


class Session:
    """What outlives a plan on one rank: the SP group's communicator, the kernel and the run's one arena.

    group: the SP group, ranks in plan order (None: the world). kernel: a name for `select_kernel`. ValueError where
    the kernel can't do the dtype or device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        kernel: str = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **kernel_options,
    ) -> None:
        self.transport = Distributed(group)
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.device = torch.device(device)
        self.dtype = dtype
        self.kernel: Kernel = select_kernel(kernel, self.device, dtype, **kernel_options)
        self.arena = Arena(self.device)

    def load(self, plan: Plan) -> Executor:
        """Make a verified plan ready to run; ValueError if it is for other ranks or another dtype."""
        return Executor(self, plan)


class Executor:
    """One rank's part of a plan. All ranks of the group call the same methods in the same order."""

    def __init__(self, session: Session, plan: Plan) -> None:
        if plan.num_ranks != session.num_ranks:
            raise ValueError(
                f"executor: the plan is for topology {plan.problem.topology} ({plan.num_ranks} ranks), the process "
                f"group has {session.num_ranks}; compile for a topology that fits"
            )
        if TORCH_DTYPES[plan.problem.heads.dtype] != session.dtype:
            raise ValueError(
                f"executor: the plan is for {plan.problem.heads.dtype}, the session runs {session.dtype}; give "
                "HeadShape the dtype of q, k and v"
            )
        self.plan = plan
        self.rank = session.rank
        self.num_tokens = int(plan.tokens_per_rank[session.rank])
        self._machine = Machine(plan, session.rank, session.transport, session.kernel, session.arena, session.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: int = 0) -> Kept:
        """Attend the rank's own rows. q: [T, H, D]; k, v: [T, H_kv, D]. The result is `Kept.o`, `Kept.lse`."""
        self._check(q)
        return finish(self._machine.forward(q, k, v, mask))

    def backward(self, do: Tensor, kept: Kept, mask: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (dq, dk, dv) of the rank's own rows for do: [T, H, D]."""
        return finish(self._machine.backward(do, kept, mask))

    def _check(self, q: Tensor) -> None:
        if len(q) != self.num_tokens:
            raise ValueError(
                f"executor: rank {self.rank} was given {len(q)} rows of q, its shard has {self.num_tokens}; take the "
                "rows at plan.rank_spans(rank), in that order"
            )
