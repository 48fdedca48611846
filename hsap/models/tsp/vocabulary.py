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
from typing import Any

import torch
from torch import Tensor

from hsap.models.loss import check_targets, logit_gradient, word_columns
from hsap.models.tsp.rounds import Homeward, Shapes, Transport, bundle, ring
from hsap.models.wide import add_product, chunks, wide_dtype
from hsap.targets import NO_TARGET


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

        Target -100 has no loss. Both are float32 (float64 for float64). weight: this rank's shard. ValueError as of
        `check_targets`.
        """
        check_targets(targets_T, len(hidden_TC), self.borders[-1])
        with_grad = torch.is_grad_enabled() and (hidden_TC.requires_grad or weight_VC.requires_grad)
        return _Losses.apply(self, hidden_TC, weight_VC, targets_T, with_grad)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vocabulary: Vocabulary, tokens_T: Tensor, own_VC: Tensor) -> Tensor:
        out_TC = own_VC.new_zeros(len(tokens_T), own_VC.shape[1])
        for shard, (weight_VC,) in ring(vocabulary.transport, bundle((own_VC,)), vocabulary.shapes):
            inside_T, column_T1 = word_columns(tokens_T, vocabulary.borders[shard], len(weight_VC))
            out_TC = torch.where(inside_T[:, None], weight_VC[column_T1[:, 0]], out_TC)
        ctx.vocabulary, ctx.dtype = vocabulary, own_VC.dtype
        ctx.save_for_backward(tokens_T)
        return out_TC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_TC: Tensor) -> tuple[Tensor | None, ...]:
        vocabulary, (tokens_T,) = ctx.vocabulary, ctx.saved_tensors
        transport, wide = vocabulary.transport, wide_dtype(dout_TC.dtype)
        home = Homeward(transport, vocabulary.shapes)
        for step in range(transport.degree):
            shard = (transport.index - step) % transport.degree
            dweight_VC = dout_TC.new_zeros(vocabulary.shapes[shard][0], dtype=wide)
            inside_T, column_T1 = word_columns(tokens_T, vocabulary.borders[shard], len(dweight_VC))
            home.add(shard, (dweight_VC.index_add_(0, column_T1[:, 0], dout_TC.to(wide) * inside_T[:, None]),))
        return None, None, home.own()[0].to(ctx.dtype)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, vocabulary: Vocabulary, hidden_TC: Tensor, own_VC: Tensor, targets_T: Tensor, with_grad: bool
    ) -> tuple[Tensor, Tensor]:
        lse_T, picked_T = _statistics(vocabulary, hidden_TC, own_VC, targets_T)
        counted_T = targets_T != NO_TARGET
        losses_T = (lse_T - picked_T).where(counted_T, 0)
        if with_grad:
            ctx.save_for_backward(*_gradients(vocabulary, hidden_TC, own_VC, targets_T, lse_T))
            ctx.dtypes = hidden_TC.dtype, own_VC.dtype
        ctx.mark_non_differentiable(losses_T)
        return losses_T.sum(dtype=torch.float64).to(losses_T.dtype), losses_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dtotal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ((saved * dtotal).to(dtype) for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return None, *gradients, None, None


def _statistics(vocabulary: Vocabulary, hidden_TC: Tensor, own_VC: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of every row's logits over the whole vocabulary, and its target's logit (NaN if none)."""
    wide = wide_dtype(hidden_TC.dtype)
    lse_T = hidden_TC.new_full((len(targets_T),), -torch.inf, dtype=wide)
    picked_T = torch.full_like(lse_T, torch.nan)
    for shard, (weight_VC,) in ring(vocabulary.transport, bundle((own_VC,)), vocabulary.shapes):
        for rows in chunks(len(targets_T), vocabulary.chunk_tokens):
            inside_N, column_N1 = word_columns(targets_T[rows], vocabulary.borders[shard], len(weight_VC))
            logits_NV = (hidden_TC[rows] @ weight_VC.t()).to(wide)
            lse_T[rows] = torch.logaddexp(lse_T[rows], logits_NV.logsumexp(dim=1))
            picked_T[rows] = torch.where(inside_N, logits_NV.gather(1, column_N1)[:, 0], picked_T[rows])
    return lse_T, picked_T


def _gradients(
    vocabulary: Vocabulary, hidden_TC: Tensor, own_VC: Tensor, targets_T: Tensor, lse_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the sum of losses: of this rank's rows, and of this rank's shard over all ranks' rows."""
    dhidden_TC = torch.zeros_like(hidden_TC, dtype=lse_T.dtype)
    home = Homeward(vocabulary.transport, vocabulary.shapes)
    for shard, (weight_VC,) in ring(vocabulary.transport, bundle((own_VC,)), vocabulary.shapes):
        dweight_VC = torch.zeros_like(weight_VC, dtype=lse_T.dtype)
        for rows in chunks(len(targets_T), vocabulary.chunk_tokens):
            hidden_NC = hidden_TC[rows]
            log_probs_NV = (hidden_NC @ weight_VC.t()).to(lse_T.dtype).sub_(lse_T[rows, None])
            grad_NV = logit_gradient(log_probs_NV, targets_T[rows], vocabulary.borders[shard]).to(hidden_NC.dtype)
            add_product(dhidden_TC[rows], grad_NV.t(), weight_VC)
            add_product(dweight_VC, grad_NV, hidden_NC)
        home.add(shard, (dweight_VC,))
    return dhidden_TC, home.own()[0]
