"""Attention for models: an autograd function and a module over a plan's executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hsap.runtime.executor import Executor
from hsap.runtime.machine import Kept


class Call(NamedTuple):
    """One layer's attention. num_rows: of what the model gives; rows beyond the rank's own are padding."""

    executor: Executor
    mask: int
    layer: int
    num_rows: int


class Attended(NamedTuple):
    """What to keep of a layer's attention so that it is not computed again: o [rows, H, D], lse [T, H]."""

    o: Tensor
    lse: Tensor
    call: Call


class _PlannedAttention(torch.autograd.Function):
    """Gives (o, lse), and saves these two with q and kv as the executor keeps them.

    attended: the outcome of the same call; then only q and kv are brought where backward needs them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, attended: Attended | None
    ) -> tuple[Tensor, Tensor]:
        executor = call.executor
        q, k, v = (_own(tensor, call) for tensor in (q, k, v))
        if attended is None:
            kept = executor.forward(q, k, v, call.mask, call.layer)
            kept_q, kept_kv, o, lse = kept.q, kept.kv, _padded(kept.o, call), kept.lse
        else:
            kept_q, kept_kv = executor.keep(q, k, v, call.mask, call.layer)
            o, lse = attended.o.detach(), attended.lse.detach()
        ctx.save_for_backward(kept_q, kept_kv, o, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.call = call
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        q, kv, o, lse = ctx.saved_tensors
        kept = Kept(q, kv, _own(o, call), lse)
        grads = call.executor.backward(_own(do, call), kept, call.mask, call.layer)
        return *(_padded(grad, call) for grad in grads), None, None


def attention(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, executor: Executor, mask: int = 0, layer: int = 0) -> Tensor:
    """Attend the rank's own rows over the whole packed batch, differentiably.

    q: [T, H, D]; k, v: [T, H_kv, D]; returns o: [T, H, D]; rows at plan.rank_spans(rank). Collective: every rank of
    the SP group takes part, in backward too. Softmax scale is 1/√D. layer: only the session's recorder cares. Saved
    for backward: q, k, v and o as they are, and lse in float32: 4 bytes a row and query head; q, k and v with the
    column's rows and this rank's share of the heads where intra_sp > 1.
    """
    return _PlannedAttention.apply(q_THD, k_THD, v_THD, Call(executor, mask, layer, executor.num_tokens), None)[0]


class PlannedAttention(nn.Module):
    """Sequence-parallel attention as a module without parameters: load a micro-batch's plan, then call it per layer.

    layer_masks: index of each layer's mask in the problem's masks; None: every layer uses the first.
    """

    def __init__(self, layer_masks: Sequence[int] | None = None) -> None:
        super().__init__()
        self.layer_masks = layer_masks
        self.executor: Executor | None = None
        self.num_rows = 0

    def load(self, executor: Executor, num_rows: int | None = None) -> None:
        """Use this plan from now on.

        num_rows: of the tensors to come, at least the rank's own rows (None: just these). Rows behind its own are
        padding: they take no part in attention, their output and their gradients are 0.
        """
        self.executor = executor
        self.num_rows = executor.num_tokens if num_rows is None else num_rows
        if self.num_rows < executor.num_tokens:
            raise ValueError(
                f"attention: rank {executor.rank} has {executor.num_tokens} rows, which don't go into num_rows="
                f"{num_rows}; give at least as many"
            )

    def forward(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer_index: int = 0) -> Tensor:
        """Attend as `attention` does, with the plan and as many rows as `load` was told of; ValueError for others."""
        return self._attend(q_THD, k_THD, v_THD, self._call(layer_index))[0]

    def keeping(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer_index: int = 0) -> tuple[Tensor, Attended]:
        """Attend, and give besides what `resumed` needs: o and lse, 4 bytes a row and query head beside o's."""
        call = self._call(layer_index)
        o, lse = self._attend(q_THD, k_THD, v_THD, call)
        return o, Attended(o.detach(), lse, call)

    def resumed(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, attended: Attended) -> Tensor:
        """Give the output of a call that `keeping` kept, differentiable in inputs made again; nothing is attended.

        Collective where intra_sp > 1, as q, k and v are resharded. The call's own plan is used, whatever was loaded
        since.
        """
        return self._attend(q_THD, k_THD, v_THD, attended.call, attended)[0]

    def _call(self, layer_index: int) -> Call:
        if self.executor is None:
            raise ValueError("attention: no plan is loaded; call load(session.load(plan)) before the forward pass")
        mask = 0 if self.layer_masks is None else self.layer_masks[layer_index]
        return Call(self.executor, mask, layer_index, self.num_rows)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, attended: Attended | None = None
    ) -> tuple[Tensor, Tensor]:
        wrong = [tensor.shape[0] for tensor in (q, k, v) if tensor.shape[0] != call.num_rows]
        if wrong and call.num_rows != call.executor.num_tokens:
            raise ValueError(
                f"attention: rank {call.executor.rank} was given {wrong[0]} rows, load() was told of {call.num_rows}, "
                f"{call.executor.num_tokens} of its own and padding behind them"
            )
        return _PlannedAttention.apply(q, k, v, call, attended)


def _own(tensor: Tensor, call: Call) -> Tensor:
    """The rank's own rows of a tensor that may have padding behind them."""
    return tensor if call.num_rows == call.executor.num_tokens else tensor[: call.executor.num_tokens]


def _padded(own: Tensor, call: Call) -> Tensor:
    """The same with zeros behind, as many rows as the model has."""
    if call.num_rows == call.executor.num_tokens:
        return own
    rows = own.new_zeros(call.num_rows, *own.shape[1:])
    rows[: len(own)] = own
    return rows
