"""Others' attention on the same ranks: DeepSpeed's DistributedAttention, and the ring of torch's context_parallel.

Both get the CPU kernels that our executor runs, so that what differs is who computes and what travels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hsap.ir.heads import HeadRun
from hsap.runtime.kernels import Kernel, Work, row_delta

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Varlen(torch.autograd.Function):
    """A kernel's attention over packed documents: q, k, v [T, H, D] of some heads, all tokens."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, prepared) -> Tensor:
        kv = torch.stack((k, v), dim=1)
        o = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64, device=q.device)
        kernel.attend(prepared, q, kv, o, lse, q.shape[-1] ** -0.5)
        ctx.save_for_backward(q, kv, o, lse)
        ctx.kernel, ctx.prepared = kernel, prepared
        return o

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple:
        q, kv, o, lse = ctx.saved_tensors
        do = do.contiguous()
        dq, dkv = torch.zeros_like(q), torch.zeros_like(kv)
        scale = q.shape[-1] ** -0.5
        ctx.kernel.attend_grad(ctx.prepared, q, kv, do, lse, row_delta(do, o), dq, dkv, scale)
        return dq, dkv[:, 0], dkv[:, 1], None, None


class VarlenAttention(torch.nn.Module):
    """Attention over packed documents on one process: slices are a mask's, as `Problem.slices` gives them."""

    def __init__(self, kernel: Kernel, slices, num_heads: int, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.kernel = kernel
        self.prepared = kernel.prepare(Work(slices, (HeadRun(0, num_heads, 0, num_heads),)), device)

    def forward(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        return _Varlen.apply(q_THD, k_THD, v_THD, self.kernel, self.prepared)


class Ulysses:
    """DeepSpeed's DistributedAttention over all ranks, equal shards, around attention of [T, H / ranks, D]."""

    def __init__(self, inner: torch.nn.Module) -> None:
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention

        # Its shared-memory communicator is compiled at first use; gloo does without it, as in training.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist.get_backend(), verbose=False, dist_init_required=False)
        self.attention = DistributedAttention(_Unbatched(inner), dist.group.WORLD, scatter_idx=2, gather_idx=0)

    def run(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        """(o, dq, dk, dv) of the rank's rows, [T / ranks, H, D] each."""
        q, k, v = (t.detach()[:, None].requires_grad_() for t in (q, k, v))
        o = self.attention(q, k, v, 1)
        grads = torch.autograd.grad(o, (q, k, v), do[:, None])
        return tuple(t[:, 0] for t in (o.detach(), *grads))


class _Unbatched(torch.nn.Module):
    """Take away the batch of one that DeepSpeed's attention carries in dimension 1."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(q[:, 0], k[:, 0], v[:, 0])[:, None]


class ContextParallel:
    """The ring of torch's context_parallel, over a causal pack that is one document; rank r has chunks r and 2R-1-r.

    Its public entry has no CPU operator registered (`refusal` tries), so its own ring is given the CPU's flash
    attention directly: the same exchange, merging and balance as on a GPU.
    """

    def run(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        """(o, dq, dk, dv) of the rank's rows."""
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring

        q, k, v, do = (t.transpose(0, 1)[None] for t in (q, k, v, do))
        o, lse = ring._templated_ring_attention(dist.group.WORLD, 2, _cpu_forward, q, k, v, is_causal=True)[:2]
        grads = ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, _cpu_backward, do, "grad_out", q, k, v, o, lse, is_causal=True
        )
        return tuple(t[0].transpose(0, 1) for t in (o, *grads[:3]))

    @staticmethod
    def refusal() -> str | None:
        """What the public entry says on this device; None where it runs."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        q, k, v = (torch.zeros(1, 1, 2 * dist.get_world_size(), 8) for _ in range(3))
        try:
            with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        except NotImplementedError as error:
            return str(error)
        return None


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    return _forward(query, key, value, 0.0, is_causal)


def _cpu_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, grad_out: Tensor
) -> tuple[Tensor, ...]:
    return _backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)
