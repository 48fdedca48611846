"""Feed-forward: gated, and over chunks of rows where what is as wide as it would be too much for all rows at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsap.models.config import ModelConfig
from hsap.models.wide import add_product, wide_dtype


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)).

    With `mlp_chunk_tokens` it is one autograd function over chunks of rows: between forward and backward it keeps its
    input alone (hidden_dim a row), and ffn_dim-wide rows exist for one chunk at a time, five of them in backward. Its
    three weights are then used by this module and not by the linear layers that own them, once forward and once
    backward whatever the number of rows: for ZeRO-3 name it to `deepspeed.utils.set_z3_leaf_modules`, so that they are
    gathered with it.
    """

    def __init__(self, config: ModelConfig, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.chunk_tokens = config.mlp_chunk_tokens
        self.gate_proj = nn.Linear(config.hidden_dim, config.ffn_dim, **options)
        self.up_proj = nn.Linear(config.hidden_dim, config.ffn_dim, **options)
        self.down_proj = nn.Linear(config.ffn_dim, config.hidden_dim, **options)

    def forward(self, x_TC: Tensor) -> Tensor:
        if self.chunk_tokens is None:
            return self.down_proj(F.silu(self.gate_proj(x_TC)) * self.up_proj(x_TC))
        weights = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        if self.down_proj.weight.dim() != 2:
            raise ValueError(
                "model.mlp_chunk_tokens: the feed-forward's weights are partitioned and nobody has gathered them; call "
                "deepspeed.utils.set_z3_leaf_modules(model, [SwiGLU]) before deepspeed.initialize."
            )
        return _ChunkedSwiGLU.apply(x_TC, *weights, self.chunk_tokens)


class _ChunkedSwiGLU(torch.autograd.Function):
    """Forward and backward chunk by chunk; backward makes gate and up again: 11 products where whole rows take 9.

    Gradients of the weights are summed over chunks in float32 or wider, which takes 4 bytes a weight of one layer.
    """

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, gate_FC: Tensor, up_FC: Tensor, down_CF: Tensor, chunk_tokens: int) -> Tensor:
        ctx.save_for_backward(x_TC, gate_FC, up_FC, down_CF)
        ctx.chunk_tokens = chunk_tokens
        out_TC = torch.empty_like(x_TC)
        for x_NC, out_NC in zip(x_TC.split(chunk_tokens), out_TC.split(chunk_tokens)):
            act_NF = F.silu(x_NC @ gate_FC.t())
            act_NF *= x_NC @ up_FC.t()
            torch.mm(act_NF, down_CF.t(), out=out_NC)
        return out_TC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, gate_FC, up_FC, down_CF = ctx.saved_tensors
        dx_TC = torch.empty_like(x_TC)
        dgate, dup, ddown = (torch.zeros_like(w, dtype=wide_dtype(w.dtype)) for w in (gate_FC, up_FC, down_CF))
        chunks = (tensor.split(ctx.chunk_tokens) for tensor in (x_TC, do_TC, dx_TC))
        for x_NC, do_NC, dx_NC in zip(*chunks):
            _add_chunk(x_NC, do_NC, dx_NC, (gate_FC, up_FC, down_CF), (dgate, dup, ddown))
        gradients = (wide.to(weight.dtype) for wide, weight in zip((dgate, dup, ddown), (gate_FC, up_FC, down_CF)))
        return dx_TC, *gradients, None


def gated_gradients(gate_NF: Tensor, up_NF: Tensor, dact_NF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give silu(gate) · up, and for its gradient `dact` those of gate and up; up and dact are overwritten."""
    silu_NF = F.silu(gate_NF)
    act_NF = silu_NF * up_NF
    up_NF *= dact_NF  # the gradient of silu(gate)
    dact_NF *= silu_NF  # the gradient of up
    del silu_NF
    return act_NF, torch.ops.aten.silu_backward(up_NF, gate_NF), dact_NF


def _add_chunk(
    x_NC: Tensor, do_NC: Tensor, dx_NC: Tensor, weights: tuple[Tensor, ...], gradients: tuple[Tensor, ...]
) -> None:
    """Put the gradient of a chunk's rows into dx and add those of the weights."""
    gate_FC, up_FC, down_CF = weights
    act_NF, dgate_NF, dup_NF = gated_gradients(x_NC @ gate_FC.t(), x_NC @ up_FC.t(), do_NC @ down_CF)
    add_product(gradients[2], do_NC, act_NF)
    add_product(gradients[0], dgate_NF, x_NC)
    add_product(gradients[1], dup_NF, x_NC)
    torch.mm(dgate_NF, gate_FC, out=dx_NC)
    dx_NC.addmm_(dup_NF, up_FC)
