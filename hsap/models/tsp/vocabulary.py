"""Embedding and lm head over shards of the vocabulary, by the ring.

Looking tokens up goes round once; in backward the shards themselves stay where they are and only gradients travel. The
loss goes round twice: first for every row's log-sum-exp over the whole vocabulary, then for the gradients where they
are wanted; logits exist for a chunk of rows and one shard at a time. As the loss is a scalar, its gradients are known
up to one factor when it is computed (`hsap.models.loss`), so backward moves nothing; that factor must be the same on
all ranks, which hold the sum of each other's rows by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hsap.models.loss import IGNORED_TARGET, wide_dtype
from hsap.models.tsp.rounds import Homeward, Shapes, Transport, bundle, ring


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """borders: first token of every shard, and the number of all. shapes: of every shard's one matrix."""

    transport: Transport
    borders: Sequence[int]
    shapes: Sequence[Shapes]
    chunk_tokens: int

    def embed(self, tokens_T: Tensor, weight_VC: Tensor) -> Tensor:
        """Rows of the embedding, differentiable. weight: this rank's shard."""
        return _Embedding.apply(self, tokens_T, weight_VC)

    def losses(self, hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the token losses of this rank's rows, differentiable, and every row's, without gradient.

        Target -100 has no loss. Both are float32 (float64 for float64). weight: this rank's shard.
        """
        with_grad = torch.is_grad_enabled() and (hidden_TC.requires_grad or weight_VC.requires_grad)
        return _Losses.apply(self, hidden_TC, weight_VC, targets_T, with_grad)

    def within(self, ids_T: Tensor, shard: int) -> tuple[Tensor, Tensor]:
        """Tokens' places in a shard, 0 for those that aren't in it, and which are: [T] and bool [T, 1]."""
        first, stop = self.borders[shard], self.borders[shard + 1]
        there_T = (ids_T >= first) & (ids_T < stop)
        return (ids_T - first).where(there_T, 0), there_T[:, None]

    def chunks(self, num_rows: int) -> list[slice]:
        """Rows whose logits exist at one time."""
        return [slice(a, min(a + self.chunk_tokens, num_rows)) for a in range(0, num_rows, self.chunk_tokens)]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocabulary: Vocabulary, tokens_T, own_VC):
        out_TC = own_VC.new_zeros(len(tokens_T), own_VC.shape[1])
        for shard, (weight_VC,) in ring(vocabulary.transport, bundle((own_VC,)), vocabulary.shapes):
            places_T, there_T1 = vocabulary.within(tokens_T, shard)
            out_TC = torch.where(there_T1, weight_VC[places_T], out_TC)
        ctx.vocabulary, ctx.dtype = vocabulary, own_VC.dtype
        ctx.save_for_backward(tokens_T)
        return out_TC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout_TC):
        vocabulary, (tokens_T,) = ctx.vocabulary, ctx.saved_tensors
        transport, wide = vocabulary.transport, wide_dtype(dout_TC.dtype)
        home = Homeward(transport, vocabulary.shapes)
        for step in range(transport.degree):
            shard = (transport.index - step) % transport.degree
            places_T, there_T1 = vocabulary.within(tokens_T, shard)
            dweight_VC = dout_TC.new_zeros(vocabulary.shapes[shard][0], dtype=wide)
            home.add(shard, (dweight_VC.index_add_(0, places_T, dout_TC.to(wide) * there_T1),))
        return None, None, home.own()[0].to(ctx.dtype)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocabulary: Vocabulary, hidden_TC, own_VC, targets_T, with_grad):
        lse_T, picked_T = _statistics(vocabulary, hidden_TC, own_VC, targets_T)
        counted_T = targets_T != IGNORED_TARGET
        losses_T = (lse_T - picked_T).where(counted_T, 0)
        if with_grad:
            ctx.save_for_backward(*_gradients(vocabulary, hidden_TC, own_VC, targets_T, lse_T))
            ctx.dtypes = hidden_TC.dtype, own_VC.dtype
        ctx.mark_non_differentiable(losses_T)
        return losses_T.sum(dtype=torch.float64).to(losses_T.dtype), losses_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dtotal, _):
        gradients = ((saved * dtotal).to(dtype) for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return None, *gradients, None, None


def _statistics(vocabulary: Vocabulary, hidden_TC: Tensor, own_VC: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of every row's logits over the whole vocabulary, and its target's logit."""
    wide = wide_dtype(hidden_TC.dtype)
    lse_T = hidden_TC.new_full((len(targets_T),), -torch.inf, dtype=wide)
    picked_T = torch.zeros_like(lse_T)
    for shard, (weight_VC,) in ring(vocabulary.transport, bundle((own_VC,)), vocabulary.shapes):
        places_T, there_T1 = vocabulary.within(targets_T, shard)
        for rows in vocabulary.chunks(len(targets_T)):
            logits_NV = (hidden_TC[rows] @ weight_VC.t()).to(wide)
            lse_T[rows] = torch.logaddexp(lse_T[rows], logits_NV.logsumexp(dim=1))
            picked_N = logits_NV.gather(1, places_T[rows, None])[:, 0]
            picked_T[rows] = picked_N.where(there_T1[rows, 0], picked_T[rows])
    return lse_T, picked_T


def _gradients(
    vocabulary: Vocabulary, hidden_TC: Tensor, own_VC: Tensor, targets_T: Tensor, lse_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum of losses: of this rank's rows, and of this rank's shard over all ranks' rows."""
    counted_T1 = (targets_T != IGNORED_TARGET)[:, None]
    dhidden_TC = torch.zeros_like(hidden_TC, dtype=lse_T.dtype)
    home = Homeward(vocabulary.transport, vocabulary.shapes)
    for shard, (weight_VC,) in ring(vocabulary.transport, bundle((own_VC,)), vocabulary.shapes):
        places_T, there_T1 = vocabulary.within(targets_T, shard)
        dweight_VC = torch.zeros_like(weight_VC, dtype=lse_T.dtype)
        for rows in vocabulary.chunks(len(targets_T)):
            hidden_NC = hidden_TC[rows]
            logits_NV = (hidden_NC @ weight_VC.t()).to(lse_T.dtype)
            grad_NV = logits_NV.sub_(lse_T[rows, None]).exp_()
            grad_NV.scatter_add_(1, places_T[rows, None], -there_T1[rows].to(grad_NV.dtype))
            grad_NV = (grad_NV * counted_T1[rows]).to(hidden_NC.dtype)
            dhidden_TC[rows] += grad_NV @ weight_VC
            dweight_VC += grad_NV.t() @ hidden_NC
        home.add(shard, (dweight_VC,))
    return dhidden_TC, home.own()[0]
