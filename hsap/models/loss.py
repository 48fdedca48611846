"""Token cross-entropy from hidden states in chunks of rows, so that the logits are never whole in memory."""

import torch
from torch import Tensor

IGNORED_TARGET = -100


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for statistics, logits and losses: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def token_loss_sum(hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, chunk_tokens: int) -> Tensor:
    """Sum of the cross-entropies of all rows that have a target, differentiable in hidden states and weight.

    hidden: [T, hidden_dim]; weight: [vocab, hidden_dim]; targets: int [T], -100 has no loss. Returns a float32 scalar
    (float64 for float64). Logits exist for chunk_tokens rows at a time (briefly twice: raw and normalised). T may be 0,
    and there may be no target: 0 with zero gradients, and both inputs stay in the graph. The caller divides by the
    number of targets of all ranks. From forward to backward the weight's gradient is held in float32 or wider.
    """
    _check_rows(hidden_TC, targets_T)
    with_grad = torch.is_grad_enabled() and (hidden_TC.requires_grad or weight_VC.requires_grad)
    return _TokenLossSum.apply(hidden_TC, weight_VC, targets_T, chunk_tokens, with_grad)


@torch.no_grad()
def token_losses(hidden_TC: Tensor, weight_VC: Tensor, targets_T: Tensor, chunk_tokens: int) -> Tensor:
    """Cross-entropy of each row, 0 where there is no target, for evaluation: no gradient flows.

    Shapes as in `token_loss_sum`; returns [T] in float32 (float64 for float64).
    """
    _check_rows(hidden_TC, targets_T)
    losses_T = hidden_TC.new_zeros(hidden_TC.shape[0], dtype=wide_dtype(hidden_TC.dtype))
    for rows in _chunks(hidden_TC.shape[0], chunk_tokens):
        losses_T[rows], _ = _chunk_losses(hidden_TC[rows], weight_VC, targets_T[rows])
    return losses_T


class _TokenLossSum(torch.autograd.Function):
    """The loss is a scalar, so its gradient is known up to one factor when it is computed.

    Forward therefore makes both gradients chunk by chunk, and backward only scales them: three products per chunk where
    recomputing the logits in backward takes four, and the weight is not needed again (no second gather under ZeRO-3).
    One call whatever the number of chunks: ranks with different numbers of rows still issue the same collectives.
    """

    @staticmethod
    def forward(ctx, hidden_TC, weight_VC, targets_T, chunk_tokens, with_grad):
        wide = wide_dtype(hidden_TC.dtype)
        total = hidden_TC.new_zeros((), dtype=torch.float64)
        if with_grad:
            grad_hidden_TC = torch.empty_like(hidden_TC, dtype=wide)
            grad_weight_VC = torch.zeros_like(weight_VC, dtype=wide)
        for rows in _chunks(hidden_TC.shape[0], chunk_tokens):
            hidden_NC, targets_N = hidden_TC[rows], targets_T[rows]
            losses_N, log_probs_NV = _chunk_losses(hidden_NC, weight_VC, targets_N)
            total += losses_N.sum(dtype=torch.float64)
            if not with_grad:
                continue
            grad_NV = _logit_gradient(log_probs_NV, targets_N).to(hidden_NC.dtype)
            grad_hidden_TC[rows] = grad_NV @ weight_VC
            if wide == weight_VC.dtype:
                grad_weight_VC.addmm_(grad_NV.t(), hidden_NC)
            else:
                grad_weight_VC += grad_NV.t() @ hidden_NC
        if with_grad:
            ctx.save_for_backward(grad_hidden_TC, grad_weight_VC)
            ctx.dtypes = hidden_TC.dtype, weight_VC.dtype
        return total.to(wide)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_total):
        gradients = (
            (gradient * grad_total).to(dtype) for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *gradients, None, None, None


def _chunks(num_rows: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_rows)) for start in range(0, num_rows, chunk_tokens)]


def _chunk_losses(hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    log_probs_NV = torch.log_softmax(hidden_NC @ weight_VC.t(), dim=-1, dtype=wide_dtype(hidden_NC.dtype))
    ignored_N = targets_N == IGNORED_TARGET
    picked_N = log_probs_NV.gather(1, targets_N.masked_fill(ignored_N, 0).long()[:, None])[:, 0]
    return picked_N.neg().masked_fill(ignored_N, 0), log_probs_NV


def _logit_gradient(log_probs_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Softmax minus one-hot, zero in rows without a target; overwrites its input, the largest tensor of the step."""
    ignored_N = targets_N == IGNORED_TARGET
    grad_NV = log_probs_NV.exp_()
    minus_one_N1 = grad_NV.new_full((grad_NV.shape[0], 1), -1)
    grad_NV.scatter_add_(1, targets_N.masked_fill(ignored_N, 0).long()[:, None], minus_one_N1)
    return grad_NV.masked_fill_(ignored_N[:, None], 0)


def _check_rows(hidden_TC: Tensor, targets_T: Tensor) -> None:
    if targets_T.shape != hidden_TC.shape[:1]:
        raise ValueError(
            f"targets have shape {tuple(targets_T.shape)} but there are {hidden_TC.shape[0]} rows of hidden states: "
            f"give one target for each local token, {IGNORED_TARGET} where there is none."
        )
