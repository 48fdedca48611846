"""Attention over weight shards that are broadcast in turn: hidden + o_proj(attention(q, k, v of the normed rows)).

For each shard every rank projects its own rows to the shard's heads, exchanges keys and values with the other ranks
by the plan for those heads, and adds what the shard's columns of o_proj make of the result; the next shard's broadcast
runs under it. Backward goes through the shards again: gradients of a shard are reduced to its owner under the next
one's computation. Owners of one KV head, where there are several, then exchange its gradients and add them up in the
order of ranks, so that their copies stay equal bit for bit. Between forward and backward the block's input and what
attention itself needs are kept: q, k, v, o and lse of this rank's rows, never weights of others. With
`checkpointing="full"` q, k and v are projected again as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hsap.models.config import ModelConfig
from hsap.models.llama import rms_norm
from hsap.models.rope import Rope, rotate
from hsap.models.tsp.mlp import norm_backward
from hsap.models.tsp.rounds import Reductions, Shapes, Transport, broadcasts, bundle, unbundle
from hsap.models.wide import wide_dtype

Kept = tuple[Tensor, ...]
"""What attention keeps for backward; its third is o: [T, H, D]."""


class ShardAttention(Protocol):
    """Attention of one shard's heads over the whole packed batch; collective over the SP group.

    q, do: [T, H, D]; k, v: [T, H_kv, D]: this rank's rows, the shard's heads. forward gives what backward needs, (q,
    kv, o, lse), keep the first two of these without attending, backward (dq, dk, dv).
    """

    def forward(self, shard: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer: int) -> Kept: ...
    def backward(self, shard: int, do_THD: Tensor, kept: Kept, layer: int) -> tuple[Tensor, Tensor, Tensor]: ...
    def keep(self, shard: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer: int) -> Kept: ...


@dataclass(frozen=True, slots=True)
class Projections:
    """One layer's attention block. shapes: of (q, k, v, o[, biases of q, k, v]) of every shard.

    holders: ranks that hold this rank's part of the KV projections, in ascending order.
    """

    transport: Transport
    config: ModelConfig
    shapes: Sequence[Shapes]
    holders: tuple[int, ...]
    layer: int

    def __call__(
        self, hidden_TC: Tensor, rope: Rope, attention: ShardAttention, whole: Sequence[Tensor], own: Sequence[Tensor]
    ) -> Tensor:
        """The block's output, differentiable.

        whole: the replicated norm, then q_norm and k_norm where there are such. own: this rank's shards.
        """
        return _Attention.apply(self, attention, *rope, hidden_TC, len(whole), *whole, *own)

    @property
    def projects_again(self) -> bool:
        """Whether q, k and v are made anew in backward."""
        return self.config.checkpointing == "full"

    def raw(self, x_TC: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values as projected: [T, heads, dim] each."""
        biases = weights[4:] or (None, None, None)
        products = (torch.nn.functional.linear(x_TC, w, b) for w, b in zip(weights[:3], biases, strict=True))
        return [p.unflatten(1, (p.shape[1] // self.config.head_dim, self.config.head_dim)) for p in products]

    def turned(self, q_THD: Tensor, k_THD: Tensor, rope: Rope, norms: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Queries and keys as attention takes them."""
        if norms:
            q_THD, k_THD = (rms_norm(x, n, self.config.norm_eps) for x, n in zip((q_THD, k_THD), norms, strict=True))
        return rotate(q_THD, rope), rotate(k_THD, rope)

    def turned_backward(
        self, dq_THD: Tensor, dk_THD: Tensor, raw: Sequence[Tensor], rope: Rope, norms: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Gradients of queries and keys as projected, and of the norms."""
        if not norms:
            back = rope[0], -rope[1]
            return rotate(dq_THD, back), rotate(dk_THD, back), []
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in (*raw, *norms)]
            outputs = self.turned(inputs[0], inputs[1], rope, inputs[2:])
        dq_THD, dk_THD, *dnorms = torch.autograd.grad(outputs, inputs, (dq_THD, dk_THD))
        return dq_THD, dk_THD, dnorms

    def sum_replicas(self, gradients: list[Tensor]) -> None:
        """Add the gradients of KV projections that other ranks hold too to this rank's, in place.

        Called on every rank, with others or without: messages are matched by their number.
        """
        me = self.transport.index
        places = [1, 2, 5, 6] if len(gradients) > 4 else [1, 2]
        mine = bundle([gradients[i] for i in places])
        others = {rank: torch.empty_like(mine) for rank in self.holders if rank != me}
        self.transport.exchange(mine, [*others.items()], "replicas")()
        ordered = [mine if rank == me else others[rank] for rank in self.holders]
        total = torch.stack(ordered).sum(dim=0)
        for place, part in zip(places, unbundle(total, tuple(tuple(gradients[i].shape) for i in places)), strict=True):
            gradients[place].copy_(part)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        block: Projections,
        attention: ShardAttention,
        cos: Tensor,
        sin: Tensor,
        hidden_TC: Tensor,
        num_whole: int,
        *weights: Tensor,
    ) -> Tensor:
        (norm_C, *norms), own = weights[:num_whole], weights[num_whole:]
        x_TC = rms_norm(hidden_TC, norm_C, block.config.norm_eps)
        out_TC = hidden_TC.to(wide_dtype(hidden_TC.dtype), copy=True)
        kept: list[Tensor] = []
        for shard, shared in broadcasts(block.transport, bundle(own), block.shapes):
            q_THD, k_THD, v_THD = block.raw(x_TC, shared)
            q_THD, k_THD = block.turned(q_THD, k_THD, (cos, sin), norms)
            its = attention.forward(shard, q_THD, k_THD, v_THD, block.layer)
            out_TC += its[2].flatten(1) @ shared[3].t()
            kept += its[2:] if block.projects_again else its
        ctx.block, ctx.attention, ctx.num_whole = block, attention, num_whole
        ctx.save_for_backward(cos, sin, hidden_TC, *weights, *kept)
        return out_TC.to(hidden_TC.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_TC: Tensor) -> tuple[Tensor | None, ...]:
        block, num_whole = ctx.block, ctx.num_whole
        num_weights = num_whole + len(block.shapes[0])
        cos, sin, hidden_TC, *rest = ctx.saved_tensors
        (norm_C, *norms), own, kept = rest[:num_whole], rest[num_whole:num_weights], rest[num_weights:]
        x_TC = rms_norm(hidden_TC, norm_C, block.config.norm_eps)
        dx_TC = torch.zeros_like(x_TC, dtype=wide_dtype(x_TC.dtype))
        dnorms = [torch.zeros_like(norm, dtype=wide_dtype(norm.dtype)) for norm in norms]
        home = Reductions(block.transport)
        for shard, shared in broadcasts(block.transport, bundle(own), block.shapes):
            raw: tuple[Tensor, ...] = block.raw(x_TC, shared) if norms or block.projects_again else ()
            if block.projects_again:
                turned = block.turned(raw[0], raw[1], (cos, sin), norms)
                inputs = ctx.attention.keep(shard, *turned, raw[2], block.layer)
                its = (*inputs, *kept[2 * shard : 2 * shard + 2])
            else:
                its = tuple(kept[4 * shard : 4 * shard + 4])
            do_THD = (dout_TC @ shared[3]).view(its[2].shape)
            dq_THD, dk_THD, dv_THD = ctx.attention.backward(shard, do_THD, its, block.layer)
            dq_THD, dk_THD, more = block.turned_backward(dq_THD, dk_THD, raw[:2], (cos, sin), norms)
            for total, part in zip(dnorms, more, strict=True):
                total += part
            flats = [d.flatten(1).to(x_TC.dtype) for d in (dq_THD, dk_THD, dv_THD)]
            for flat, weight in zip(flats, shared):
                dx_TC += flat @ weight
            products = [flat.t() @ x_TC for flat in flats] + [dout_TC.t() @ its[2].flatten(1)]
            home.add(shard, products + ([flat.sum(dim=0) for flat in flats] if len(shared) > 4 else []))
        gradients = unbundle(home.own(), block.shapes[block.transport.index])
        block.sum_replicas(gradients)
        dhidden_TC, dnorm_C = norm_backward(hidden_TC, norm_C, block.config.norm_eps, dx_TC)
        whole = (dnorm_C, *(total.to(norm.dtype) for total, norm in zip(dnorms, norms, strict=True)))
        of_own = (gradient.to(like.dtype) for gradient, like in zip(gradients, own, strict=True))
        return None, None, None, None, dhidden_TC + dout_TC, None, *whole, *of_own
