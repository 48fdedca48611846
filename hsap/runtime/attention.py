"""Attention for models: an autograd function and a module over a plan's executor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hsap.runtime.executor import Executor
from hsap.runtime.machine import Kept


class _PlannedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, executor: Executor, mask: int, layer: int) -> Tensor:
        kept = executor.forward(q, k, v, mask, layer)
        ctx.save_for_backward(kept.q, kept.kv, kept.o, kept.lse)
        ctx.executor, ctx.mask, ctx.layer = executor, mask, layer
        return kept.o

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.executor.backward(do, Kept(*ctx.saved_tensors), ctx.mask, ctx.layer)
        return *grads, None, None, None


def attention(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, executor: Executor, mask: int = 0, layer: int = 0) -> Tensor:
    """Attend the rank's own rows over the whole packed batch, differentiably.

    q: [T, H, D]; k, v: [T, H_kv, D]; returns o: [T, H, D]; rows at plan.rank_spans(rank). Collective: every rank of
    the SP group takes part, in backward too. Softmax scale is 1/√D. layer: only the session's recorder cares.
    """
    return _PlannedAttention.apply(q_THD, k_THD, v_THD, executor, mask, layer)


class PlannedAttention(nn.Module):
    """Sequence-parallel attention as a module without parameters: load a micro-batch's plan, then call it per layer.

    layer_masks: index of each layer's mask in the problem's masks; None: every layer uses the first.
    """

    def __init__(self, layer_masks: Sequence[int] | None = None) -> None:
        super().__init__()
        self.layer_masks = layer_masks
        self.executor: Executor | None = None

    def load(self, executor: Executor) -> None:
        """Use this plan from now on."""
        self.executor = executor

    def forward(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer_index: int = 0) -> Tensor:
        if self.executor is None:
            raise ValueError("attention: no plan is loaded; call load(session.load(plan)) before the forward pass")
        mask = 0 if self.layer_masks is None else self.layer_masks[layer_index]
        return attention(q_THD, k_THD, v_THD, self.executor, mask, layer_index)
