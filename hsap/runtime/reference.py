"""Reference: a plan's answer with all ranks in one process, in any dtype.

Ranks take turns; one goes on until it waits for a message that nobody has started yet. Nothing is buffered on the
way. Whether a plan also keeps the order that a real transport wants is the verifier's to judge, not this one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hsap.ir.check import instance, whole
from hsap.ir.plan import Plan
from hsap.ir.span import positions
from hsap.runtime.kernels import Kernel, select_kernel
from hsap.runtime.machine import Kept, Machine, check_proven
from hsap.runtime.memory import DTYPE_NAMES, Arena
from hsap.runtime.transport import Mailbox
from hsap.runtime.upload import Upload


@torch.no_grad()
def reference(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_o: Tensor | None = None,
    mask: int = 0,
    kernel: str | Kernel = "auto",
) -> tuple[Tensor, ...]:
    """Run a plan on packed tensors in token-position order.

    q: [tokens, heads, dim]; k, v: [tokens, KV heads, dim]; grad_o as q. One dtype (float64, float32, bfloat16 or
    float16) and one device for all. mask: index into the problem's masks. Returns (o [tokens, heads, dim], lse [heads,
    tokens] natural log), and (dq, dk, dv) behind them if grad_o is given. Nothing is recorded for autograd: inputs that
    require gradients count as detached, and no result requires any. ValueError: no plan, or one read and not verified,
    no tensors, shapes that don't fit the plan, dtypes or devices that differ or that no kernel can do, a mask that the
    plan doesn't have.
    """
    _check(plan, q, k, v, grad_o)
    mask = whole("reference: mask, an index into the problem's masks,", mask, 0, len(plan.problem.masks) - 1)
    if isinstance(kernel, str):
        kernel = select_kernel(kernel, q.device, q.dtype, head_dim=plan.problem.heads.head_dim)
    box = Mailbox()
    machines = [
        Machine(plan, rank, box.for_rank(rank), kernel, Arena(q.device), q.device, q.dtype)
        for rank in range(plan.num_ranks)
    ]
    tables = Upload(q.device)
    rows = [tables.put(positions(plan.rank_spans(rank))) for rank in range(plan.num_ranks)]
    tables.flush()
    kept: list[Kept] = _together([m.forward(q[r], k[r], v[r], mask) for m, r in zip(machines, rows)], machines)
    o, lse = _gather([part.o for part in kept], rows, q), _gather([part.lse for part in kept], rows, q)
    if grad_o is None:
        return o, lse.T
    grads = _together([m.backward(grad_o[r], part, mask) for m, r, part in zip(machines, rows, kept)], machines)
    return o, lse.T, *(_gather(list(parts), rows, q) for parts in zip(*grads))


def _together(runs: Sequence[Iterator[Any]], machines: Sequence[Machine]) -> list[Any]:
    """Let all ranks take turns until each has its result; RuntimeError naming every rank's step if all are stuck."""
    results: list[Any] = [None] * len(runs)
    waiting = set(range(len(runs)))
    while waiting:
        before = [machines[rank].at for rank in sorted(waiting)]
        for rank in sorted(waiting):
            results[rank] = next(runs[rank])
        waiting -= {rank for rank in waiting if results[rank] is not None}
        if waiting and before == [machines[rank].at for rank in sorted(waiting)]:
            stuck = "; ".join(f"rank {rank} at {machines[rank].at}" for rank in sorted(waiting))
            raise RuntimeError(f"the plan can't go on: {stuck}")
    return results


def _gather(parts: list[Tensor], rows: list[Tensor], like: Tensor) -> Tensor:
    """Put the ranks' rows back into token-position order."""
    out = torch.empty((len(like), *parts[0].shape[1:]), dtype=parts[0].dtype, device=like.device)
    for part, index in zip(parts, rows):
        out[index] = part
    return out


def _check(plan: Plan, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor | None) -> None:
    given: tuple[Any, ...] = (q, k, v, grad_o)
    instance("reference: plan", plan, Plan, "an hsap.Plan, as hsap.compile makes it")
    check_proven("reference", plan)
    heads, tokens = plan.problem.heads, plan.problem.layout.num_tokens
    wanted = {"q": heads.num_q_heads, "k": heads.num_kv_heads, "v": heads.num_kv_heads, "grad_o": heads.num_q_heads}
    for (name, count), tensor in zip(wanted.items(), given):
        if tensor is None and name == "grad_o":
            continue
        instance(f"reference: {name}", tensor, Tensor, "a torch.Tensor")
        if tuple(tensor.shape) != (tokens, count, heads.head_dim):
            raise ValueError(
                f"reference: {name} has shape {list(tensor.shape)}, the plan wants {[tokens, count, heads.head_dim]} "
                "(tokens, heads, dim), packed in token-position order"
            )
        if tensor.dtype not in DTYPE_NAMES or (tensor.dtype, tensor.device) != (q.dtype, q.device):
            raise ValueError(
                f"reference: {name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}; give all one "
                f"dtype, of {', '.join(map(str, DTYPE_NAMES))}, and one device"
            )
