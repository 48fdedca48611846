"""Executor: a plan on torch.distributed, one process a rank; NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.ir.plan import Plan
from hsap.position import Position
from hsap.runtime.kernels import Kernel, select_kernel
from hsap.runtime.machine import Kept, Machine, check_proven, finish
from hsap.runtime.memory import TORCH_DTYPES, Arena
from hsap.runtime.ranges import Ranges
from hsap.runtime.record import Recorder
from hsap.runtime.transport import Distributed


class Session:
    """What outlives a plan on one rank: the SP group's communicator, the kernel and the run's one arena.

    group: the SP group, ranks in plan order (None: the world). kernel and kernel_options: for `select_kernel`, which
    `load` asks once it knows the head dimension; ValueError where the kernel can't do dtype, device or dimension.
    recorder: records what runs as long as it is there. ranges: names what runs, for a profiler of the device. position:
    where what runs is noted. Making one on NCCL is collective over the group.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        kernel: str = "auto",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **kernel_options: Any,
    ) -> None:
        self.transport = Distributed(group, device)
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.device = torch.device(device)
        self.dtype = dtype
        self.arena = Arena(self.device)
        self.recorder: Recorder | None = None
        self.ranges: Ranges | None = None
        self.position = Position()
        self._select = partial(select_kernel, kernel, self.device, dtype, **kernel_options)
        self._kernels: dict[int, Kernel] = {}

    def kernel(self, head_dim: int) -> Kernel:
        """The kernel for heads of that dimension, chosen once."""
        if head_dim not in self._kernels:
            self._kernels[head_dim] = self._select(head_dim=head_dim)
        return self._kernels[head_dim]

    def load(self, plan: Plan) -> Executor:
        """Make a plan ready to run; ValueError: read and not verified, or for other ranks or another dtype."""
        return Executor(self, plan)


class Executor:
    """One rank's part of a plan. All ranks of the group call the same methods in the same order."""

    def __init__(self, session: Session, plan: Plan) -> None:
        check_proven("executor", plan)
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
        self.plan, self._session = plan, session
        self.rank = session.rank
        self.num_tokens = int(plan.tokens_per_rank[session.rank])
        kernel = session.kernel(plan.problem.heads.head_dim)
        self._machine = Machine(plan, session.rank, session.transport, kernel, session.arena, session.device)
        self._machine.position = session.position

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: int = 0, layer: int = 0) -> Kept:
        """Attend the rank's own rows. q: [T, H, D]; k, v: [T, H_kv, D]. The result is `Kept.o`, `Kept.lse`.

        layer: only whoever records or watches cares.
        """
        self._check(q=q, k=k, v=v)
        self._machine.recorder, self._machine.ranges = self._session.recorder, self._session.ranges
        return finish(self._machine.forward(q, k, v, mask, layer))

    def keep(self, q: Tensor, k: Tensor, v: Tensor, mask: int = 0, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Give `Kept.q` and `Kept.kv` again from the same inputs, without attending: all-to-all at most."""
        self._check(q=q, k=k, v=v)
        return finish(self._machine.keep(q, k, v, mask, layer))

    def backward(self, do: Tensor, kept: Kept, mask: int = 0, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients (dq, dk, dv) of the rank's own rows for do: [T, H, D]."""
        self._check(do=do)
        self._machine.recorder, self._machine.ranges = self._session.recorder, self._session.ranges
        return finish(self._machine.backward(do, kept, mask, layer))

    def _check(self, **tensors: Tensor) -> None:
        """Rows, heads and dtype of what the caller gives: a collective with the wrong ones would hang or mix rows."""
        heads = self.plan.problem.heads
        for name, tensor in tensors.items():
            count = heads.num_kv_heads if name in ("k", "v") else heads.num_q_heads
            wanted, dtype = (self.num_tokens, count, heads.head_dim), TORCH_DTYPES[heads.dtype]
            if tuple(tensor.shape) != wanted or tensor.dtype != dtype:
                raise ValueError(
                    f"executor: rank {self.rank} was given {name} of shape {list(tensor.shape)} and {tensor.dtype}, "
                    f"its rows are {list(wanted)} (tokens, heads, dim) of {dtype}; take those at "
                    "plan.rank_spans(rank), in that order and in the dtype that HeadShape (sequence_parallel's dtype=) "
                    "was given"
                )
