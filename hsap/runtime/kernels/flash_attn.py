"""The flash-attn package: version 2 (any recent GPU, softcap) and version 3 (Hopper)."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

from hsap.runtime.kernels.varlen import Call, VarlenKernel

FA2_MODULE = "flash_attn.flash_attn_interface"
FA3_MODULE = "flash_attn_interface"
FA3_DETERMINISTIC_DIM = 192
"""Its deterministic backward refuses head dimensions that it rounds to 256."""


def is_installed(module: str) -> bool:
    """Say whether a module could be imported, without importing it."""
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _load(kernel: str, module: str, advice: str) -> ModuleType:
    if not is_installed(module):
        raise ValueError(f"kernel {kernel} needs the module {module}, which isn't installed; {advice}")
    return importlib.import_module(module)


class FlashAttn2Kernel(VarlenKernel):
    """flash-attn 2.7 or later. softcap: 0 is none, else scores become softcap * tanh(score / softcap).

    deterministic: backward gives the same bits in every run, as it also does where torch is told to.
    """

    name = "flash_attn"

    def __init__(self, softcap: float = 0.0, deterministic: bool = False) -> None:
        advice = "pip install hsap[flash], or use kernel=cuda_flash, which comes with torch"
        module = _load(self.name, FA2_MODULE, advice)
        # 2.7 wrapped both functions as custom operators and made the window two arguments.
        if not hasattr(module, "_wrapped_flash_attn_varlen_forward"):
            raise ValueError(
                f"kernel {self.name} needs flash-attn 2.7 or later, but an older one is installed; {advice}"
            )
        self._forward = module._wrapped_flash_attn_varlen_forward
        self._backward = module._wrapped_flash_attn_varlen_backward
        self.softcap, self.deterministic = softcap, deterministic

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel.forward`."""
        o, lse, *_ = self._forward(
            q,
            k,
            v,
            call.q.cu_seqlens,
            call.kv.cu_seqlens,
            call.q.max_seqlen,
            call.kv.max_seqlen,
            0.0,
            scale,
            causal=call.window == (-1, 0),
            window_size_left=call.window[0],
            window_size_right=call.window[1],
            softcap=self.softcap,
            alibi_slopes=None,
            return_softmax=False,
        )
        return o, lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel.backward`."""
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self._backward(
            do,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            call.q.cu_seqlens,
            call.kv.cu_seqlens,
            call.q.max_seqlen,
            call.kv.max_seqlen,
            0.0,
            scale,
            call.window == (-1, 0),
            call.window[0],
            call.window[1],
            self.softcap,
            None,
            self.deterministic or torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv


class FlashAttn3Kernel(VarlenKernel):
    """flash-attn 3 (the `hopper` folder of its repository), for GPUs of compute capability 9.

    deterministic: as for version 2, up to FA3_DETERMINISTIC_DIM.
    """

    name = "flash_attn3"

    def __init__(self, deterministic: bool = False) -> None:
        advice = "install it from the hopper folder of the flash-attention repository, or use kernel=cuda_flash"
        module = _load(self.name, FA3_MODULE, advice)
        # Since the functions are custom operators, the window is two arguments.
        if not isinstance(module._flash_attn_forward, torch.library.CustomOpDef):
            raise ValueError(f"kernel {self.name} needs a newer version of the module {FA3_MODULE}; {advice}")
        self._forward = module._flash_attn_forward
        self._backward = module._flash_attn_backward
        self.deterministic = deterministic

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel.forward`."""
        o, lse, *_ = self._forward(
            q,
            k,
            v,
            cu_seqlens_q=call.q.cu_seqlens,
            cu_seqlens_k=call.kv.cu_seqlens,
            max_seqlen_q=call.q.max_seqlen,
            max_seqlen_k=call.kv.max_seqlen,
            softmax_scale=scale,
            causal=call.window == (-1, 0),
            window_size_left=call.window[0],
            window_size_right=call.window[1],
        )
        return o, lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel.backward`."""
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        # By position: versions differ in what they call `causal`, not in the order.
        self._backward(
            do,
            q,
            k,
            v,
            out,
            lse,
            call.q.cu_seqlens,
            call.kv.cu_seqlens,
            None,
            None,
            call.q.max_seqlen,
            call.kv.max_seqlen,
            dq,
            dk,
            dv,
            scale,
            call.window == (-1, 0),
            call.window[0],
            call.window[1],
            0.0,
            self.deterministic or torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
