"""The gated MLP over a ring of weight shards: hidden + down(silu(gate(x)) · up(x)), x the normed hidden rows.

Every rank keeps its own rows. Shards of all three matrices, one message, go round the ring under the computation that
uses them, and what a shard's columns of the hidden layer contribute is added up on the spot, so that nothing is
reduced at the end. Backward goes round once more, and gradients travel behind the weights (`Homeward`). Between them
only the block's input is kept: norm, gate and up are computed again (2 of the 11 products of a training step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hsap.models.llama import rms_norm
from hsap.models.mlp import gated_gradients
from hsap.models.tsp.rounds import Homeward, Shapes, Transport, bundle, ring
from hsap.models.wide import wide_dtype


@dataclass(frozen=True, slots=True)
class MLP:
    """One layer's MLP block. shapes: of (gate, up, down) of every shard."""

    transport: Transport
    shapes: Sequence[Shapes]
    norm_eps: float

    def __call__(self, hidden_TC: Tensor, norm_C: Tensor, gate_FC: Tensor, up_FC: Tensor, down_CF: Tensor) -> Tensor:
        """The block's output, differentiable. norm is the whole weight; the others are this rank's shards."""
        return _MLP.apply(self, hidden_TC, norm_C, gate_FC, up_FC, down_CF)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: MLP, hidden_TC: Tensor, norm_C: Tensor, *own: Tensor) -> Tensor:
        x_TC = rms_norm(hidden_TC, norm_C, block.norm_eps)
        out_TC = hidden_TC.to(wide_dtype(hidden_TC.dtype), copy=True)
        for _, (gate_FC, up_FC, down_CF) in ring(block.transport, bundle(own), block.shapes):
            out_TC += (F.silu(x_TC @ gate_FC.t()) * (x_TC @ up_FC.t())) @ down_CF.t()
        ctx.block = block
        ctx.save_for_backward(hidden_TC, norm_C, *own)
        return out_TC.to(hidden_TC.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_TC: Tensor) -> tuple[Tensor | None, ...]:
        block = ctx.block
        hidden_TC, norm_C, *own = ctx.saved_tensors
        x_TC = rms_norm(hidden_TC, norm_C, block.norm_eps)
        dx_TC = torch.zeros_like(x_TC, dtype=wide_dtype(x_TC.dtype))
        home = Homeward(block.transport, block.shapes)
        for shard, (gate_FC, up_FC, down_CF) in ring(block.transport, bundle(own), block.shapes):
            gate_TF, up_TF = (x_TC @ weight.t() for weight in (gate_FC, up_FC))
            inner_TF, dgate_TF, dup_TF = gated_gradients(gate_TF, up_TF, dout_TC @ down_CF)
            dx_TC += dgate_TF @ gate_FC
            dx_TC += dup_TF @ up_FC
            home.add(shard, (dgate_TF.t() @ x_TC, dup_TF.t() @ x_TC, dout_TC.t() @ inner_TF))
        dhidden_TC, dnorm_C = norm_backward(hidden_TC, norm_C, block.norm_eps, dx_TC)
        gradients = (gradient.to(like.dtype) for gradient, like in zip(home.own(), own, strict=True))
        return None, dhidden_TC + dout_TC, dnorm_C, *gradients


def norm_backward(hidden_TC: Tensor, norm_C: Tensor, eps: float, dx_TC: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the norm's input and weight."""
    with torch.enable_grad():
        inputs = hidden_TC.detach().requires_grad_(), norm_C.detach().requires_grad_()
        x_TC = rms_norm(*inputs, eps)
    dhidden_TC, dnorm_C = torch.autograd.grad(x_TC, inputs, dx_TC.to(x_TC.dtype))
    return dhidden_TC, dnorm_C
