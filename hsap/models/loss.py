"""Token cross-entropy from hidden states in chunks of rows, and of the vocabulary where it is large, so that the logits
are never whole in memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hsap.models.wide import add_product, chunks, wide_dtype
from hsap.targets import NO_TARGET


def token_loss_sum(
    hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, chunk_tokens: int, chunk_vocab: int | None = None
) -> Tensor:
    """Sum of the cross-entropies of all rows that have a target, differentiable in hidden states and weight.

    hidden: [T, hidden_dim]; weight: [vocab, hidden_dim]; targets: int [T], -100 has no loss. Returns a float32 scalar
    (float64 for float64). Logits exist for chunk_tokens rows and chunk_vocab words (None: all) at a time, briefly
    twice: raw and normalised. T may be 0, and there may be no target: 0 with zero gradients, and both inputs stay in
    the graph. The caller divides by the number of targets of all ranks. From forward to backward both gradients are
    held in float32 or wider.
    """
    check_targets(targets_T, len(hidden_TC), len(weight_VC))
    with_grad = torch.is_grad_enabled() and (hidden_TC.requires_grad or weight_VC.requires_grad)
    return _TokenLossSum.apply(hidden_TC, weight_VC, targets_T, chunk_tokens, chunk_vocab, with_grad)


@torch.no_grad()
def token_losses(
    hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, chunk_tokens: int, chunk_vocab: int | None = None
) -> Tensor:
    """Cross-entropy of each row, 0 where there is no target, for evaluation: no gradient flows.

    Shapes as in `token_loss_sum`; returns [T] in float32 (float64 for float64).
    """
    check_targets(targets_T, len(hidden_TC), len(weight_VC))
    losses_T = hidden_TC.new_zeros(hidden_TC.shape[0], dtype=wide_dtype(hidden_TC.dtype))
    for rows in chunks(hidden_TC.shape[0], chunk_tokens):
        losses_T[rows], _ = _chunk_losses(hidden_TC[rows], weight_VC, targets_T[rows], chunk_vocab)
    return losses_T


class _TokenLossSum(torch.autograd.Function):
    """The loss is a scalar, so its gradient is known up to one factor when it is computed.

    Forward therefore makes both gradients chunk by chunk, and backward only scales them: three products per chunk where
    recomputing the logits in backward takes four, and the weight is not needed again (no second gather under ZeRO-3).
    Chunks of the vocabulary take four as well: the logits once to norm them all, once more for the gradients.
    One call whatever the number of chunks: ranks with different numbers of rows still issue the same collectives.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TC: Tensor,
        weight_VC: Tensor,
        targets_T: Tensor,
        chunk_tokens: int,
        chunk_vocab: int | None,
        with_grad: bool,
    ) -> Tensor:
        wide = wide_dtype(hidden_TC.dtype)
        total = hidden_TC.new_zeros((), dtype=torch.float64)
        if with_grad:
            grad_hidden_TC = torch.empty_like(hidden_TC, dtype=wide)
            grad_weight_VC = torch.zeros_like(weight_VC, dtype=wide)
        for rows in chunks(hidden_TC.shape[0], chunk_tokens):
            hidden_NC, targets_N = hidden_TC[rows], targets_T[rows]
            losses_N, logits = _chunk_losses(hidden_NC, weight_VC, targets_N, chunk_vocab)
            total += losses_N.sum(dtype=torch.float64)
            if not with_grad:
                continue
            grad_hidden_NC = grad_hidden_TC[rows].zero_()
            for first, log_probs_NV in logits:
                grad_NV = logit_gradient(log_probs_NV, targets_N, first).to(hidden_NC.dtype)
                words = slice(first, first + grad_NV.shape[1])
                add_product(grad_hidden_NC, grad_NV.t(), weight_VC[words])
                add_product(grad_weight_VC[words], grad_NV, hidden_NC)
        if with_grad:
            ctx.save_for_backward(grad_hidden_TC, grad_weight_VC)
            ctx.dtypes = hidden_TC.dtype, weight_VC.dtype
        return total.to(wide)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            (gradient * grad_total).to(dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *gradients, None, None, None, None


def _chunk_losses(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, chunk_vocab: int | None
) -> tuple[Tensor, Iterable[tuple[int, Tensor]]]:
    """Losses of some rows, and their log-probabilities by chunks of words: (first word, [N, words]), each to be used
    before the next is asked for."""
    ignored_N = targets_N == NO_TARGET
    if chunk_vocab is None or chunk_vocab >= len(weight_VC):
        log_probs_NV = torch.log_softmax(hidden_NC @ weight_VC.t(), dim=-1, dtype=wide_dtype(hidden_NC.dtype))
        picked_N = log_probs_NV.gather(1, targets_N.masked_fill(ignored_N, 0).long()[:, None])[:, 0]
        return picked_N.neg().masked_fill(ignored_N, 0), [(0, log_probs_NV)]
    words = chunks(len(weight_VC), chunk_vocab)
    lse_N, picked_N = _logsumexp(hidden_NC, weight_VC, targets_N, words)
    log_probs = ((w.start, _logits(hidden_NC, weight_VC, w).sub_(lse_N[:, None])) for w in words)
    return (lse_N - picked_N).masked_fill(ignored_N, 0), log_probs


def _logsumexp(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, words: list[slice]) -> tuple[Tensor, Tensor]:
    """Of each row the log of its summed exponentials, over chunks of words, and its target's logit (NaN if none)."""
    wide = wide_dtype(hidden_NC.dtype)
    highest_N = hidden_NC.new_full((len(hidden_NC),), -torch.inf, dtype=wide)
    sum_N, picked_N = torch.zeros_like(highest_N), torch.full_like(highest_N, torch.nan)
    for w in words:
        logits_NV = _logits(hidden_NC, weight_VC, w)
        inside_N, column_N1 = word_columns(targets_N, w.start, logits_NV.shape[1])
        picked_N = torch.where(inside_N, logits_NV.gather(1, column_N1)[:, 0], picked_N)
        higher_N = torch.maximum(highest_N, logits_NV.amax(dim=1))
        sum_N = sum_N * (highest_N - higher_N).exp() + logits_NV.sub_(higher_N[:, None]).exp_().sum(dim=1)
        highest_N = higher_N
    return highest_N + sum_N.log(), picked_N


def _logits(hidden_NC: Tensor, weight_VC: Tensor, words: slice) -> Tensor:
    return (hidden_NC @ weight_VC[words].t()).to(wide_dtype(hidden_NC.dtype))


def word_columns(targets_N: Tensor, first: int, num_words: int) -> tuple[Tensor, Tensor]:
    """Which targets are among some words, and where: [N], and [N, 1] with 0 for those that aren't."""
    column_N = targets_N.long() - first
    inside_N = (column_N >= 0) & (column_N < num_words) & (targets_N != NO_TARGET)
    return inside_N, column_N.masked_fill(~inside_N, 0)[:, None]


def logit_gradient(log_probs_NV: Tensor, targets_N: Tensor, first: int) -> Tensor:
    """Softmax minus one-hot, zero in rows without a target; overwrites its input, the largest tensor of the step.

    first: the word of the first column.
    """
    inside_N, column_N1 = word_columns(targets_N, first, log_probs_NV.shape[1])
    grad_NV = log_probs_NV.exp_()
    grad_NV.scatter_add_(1, column_N1, inside_N.to(grad_NV.dtype).neg()[:, None])
    return grad_NV.masked_fill_((targets_N == NO_TARGET)[:, None], 0)


def check_targets(targets_T: Tensor, num_rows: int, num_words: int) -> None:
    """Refuse, by ValueError, targets that aren't one a row, or on a CPU that are no words.

    A GPU would have to be waited for: there one that is no word makes the loss NaN, or gathering it fails.
    """
    if targets_T.shape != (num_rows,):
        raise ValueError(
            f"targets have shape {tuple(targets_T.shape)} but there are {num_rows} rows of hidden states: "
            f"give one target for each local token, {NO_TARGET} where there is none."
        )
    if targets_T.device.type == "cpu":
        known_T = (targets_T >= 0) & (targets_T < num_words) | (targets_T == NO_TARGET)
        if not bool(known_T.all()):
            row = int((~known_T).nonzero()[0])
            raise ValueError(
                f"the target of row {row} is {int(targets_T[row])}: give a word of the vocabulary, 0 to "
                f"{num_words - 1}, or {NO_TARGET} where there is none."
            )
