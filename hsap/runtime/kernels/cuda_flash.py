"""The flash attention that torch carries for CUDA: no package needed, half precision only."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hsap.runtime.kernels.determinism import deterministic_algorithms
from hsap.runtime.kernels.varlen import Call, VarlenKernel


@cache
def _no_random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """What the schema wants and only dropout reads, made once."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


class CudaFlashKernel(VarlenKernel):
    """torch's aten::_flash_attention_forward and _backward over packed sequences, as torch.nn.attention.varlen does.

    deterministic: backward gives the same bits in every run.
    """

    name = "cuda_flash"

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel.forward`."""
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            call.q.cu_seqlens,
            call.kv.cu_seqlens,
            call.q.max_seqlen,
            call.kv.max_seqlen,
            0.0,
            call.window == (-1, 0),
            False,
            scale=scale,
            window_size_left=call.window[0],
            window_size_right=call.window[1],
        )
        return o, lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel.backward`."""
        with deterministic_algorithms(self.deterministic):
            return torch.ops.aten._flash_attention_backward(
                do.contiguous(),
                q,
                k,
                v,
                out,
                lse,
                call.q.cu_seqlens,
                call.kv.cu_seqlens,
                call.q.max_seqlen,
                call.kv.max_seqlen,
                0.0,
                call.window == (-1, 0),
                *_no_random_state(q.device),
                scale=scale,
                window_size_left=call.window[0],
                window_size_right=call.window[1],
            )
