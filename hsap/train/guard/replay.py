"""Replaying a dump on one process: the step's loss and gradient once more, in float32 or float64.

Every micro-batch is run under its own plan, all ranks in turn (`hsap.runtime.reference`), or under another planner's,
and then documents one by one, each alone on one device: what depends on the plan or on the number format shows as a
difference between these and what training saw. Weights are those that training computed with, rounded to its format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hsap.api import compile
from hsap.data.batch import MicroBatch
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, distinct_masks
from hsap.ir.plan import Plan
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.models.llama import Llama
from hsap.runtime.memory import TORCH_DTYPES
from hsap.runtime.reference import reference
from hsap.train.checkpoints.masters import WEIGHT
from hsap.train.guard.dump import Dump, Dumped
from hsap.train.guard.finding import Document, describe, document_sums
from hsap.train.guard.outputs import Outputs
from hsap.verify import verify

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
"""How far a replayed loss may lie, relatively, from the one seen in that format."""
NORM_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}
"""And a gradient's norm."""


@dataclass(frozen=True, slots=True)
class Alone:
    """A document's loss and its gradient's norm, as its share of the step's, computed on one device by itself."""

    loss_sum: float
    grad_norm: float


@dataclass(frozen=True, slots=True)
class Replay:
    """What a dump gives. first: the earliest output that isn't finite, as of a `Finding`; documents: by the plan, in
    the dump's order; alone: of some of them, by (group, micro-batch, index); gradients: elements that aren't finite."""

    loss: float
    grad_norm: float
    first: dict | None
    gradients: dict[str, int]
    documents: tuple[Document, ...]
    alone: dict[tuple[int, int, int], Alone]


class _Reference(torch.autograd.Function):
    """Attention of a whole packed batch by a plan, all ranks in this process."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, plan: Plan, mask: int) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.mask = plan, mask
        return reference(plan, q, k, v, mask=mask)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do: Tensor) -> tuple:
        q, k, v = ctx.saved_tensors
        return *reference(ctx.plan, q, k, v, do.contiguous(), mask=ctx.mask)[2:], None, None


class _Attention(torch.nn.Module):
    def __init__(self, layer_masks: Sequence[int]) -> None:
        super().__init__()
        self.layer_masks = layer_masks
        self.plan: Plan | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return _Reference.apply(q, k, v, self.plan, self.layer_masks[layer])


class Replayer:
    """A dump's model in one process. dtype: fp32 or fp64; planner: None for the dump's own plans."""

    def __init__(self, dump: Dump, dtype: str = "fp32", planner: str | None = None) -> None:
        self.dump, self.planner = dump, planner
        self.dtype = TORCH_DTYPES[dtype]
        self.model = Llama(dump.model, dtype=self.dtype)
        seen = TORCH_DTYPES[dump.dtype]
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                weight = dump.weights.read(WEIGHT, name, 0, parameter.numel())
                parameter.copy_(weight.to(seen).view(parameter.shape))
        self.masks, layer_masks = distinct_masks(dump.model.layer_masks)
        self.attention = _Attention(layer_masks)
        self.parameters = dict(self.model.named_parameters())

    def replay(self, most_alone: int, heard: Callable[[str], None] = lambda line: None) -> Replay:
        """Run the step. most_alone: documents to run by themselves, those with the highest losses first.

        ValueError: a plan that the verifier refuses.
        """
        totals = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        loss, first, documents = 0.0, None, []
        for one in self.dump.micros:
            heard(f"group {one.group}, micro-batch {one.number}: {sum(one.batch.lengths):,} tokens")
            self.attention.plan = self._plan(one)
            own, sight = self._forward(one)
            documents += own
            first = first or sight
            value, gradients = self._gradients(one.batch)
            loss += value
            for name, gradient in zip(totals, gradients, strict=True):
                totals[name] += gradient
        order = sorted(documents, key=lambda d: -d.mean if math.isfinite(d.loss_sum) else -math.inf)[:most_alone]
        micros = {(one.group, one.number): one for one in self.dump.micros}
        alone = {(d.group, d.micro, d.index): self._alone(micros[d.group, d.micro], d.index) for d in order}
        bad = {name: int((~torch.isfinite(total)).sum()) for name, total in totals.items()}
        loss /= max(self.dump.num_targets, 1)
        gradients = {name: count for name, count in bad.items() if count}
        return Replay(loss, _norm(totals.values()), first, gradients, tuple(documents), alone)

    def _plan(self, one: Dumped) -> Plan:
        plan = one.plan
        if self.planner is not None:
            plan = compile(replace(plan.problem, arena_multiple=None, wire_dtype=None), self.planner)
        if not (report := verify(plan)).ok:
            raise ValueError(
                f"{self.dump.path}: the verifier refuses the plan of micro-batch {one.number} of group {one.group}: "
                f"{report}; --planner NAME replays with a plan made anew"
            )
        return plan

    def _inputs(self, batch: MicroBatch, rows: slice = slice(None)) -> list[Tensor]:
        return [torch.from_numpy(a[rows]).long() for a in (batch.tokens, batch.positions, batch.labels)]

    def _forward(self, one: Dumped) -> tuple[list[Document], dict | None]:
        tokens, places, labels = self._inputs(one.batch)
        with torch.no_grad(), Outputs(self.model, self.attention) as outputs:
            losses = self.model(tokens, places, self.attention, labels, per_token=True)
        rows = np.arange(len(tokens))
        sums, counts = document_sums(one.batch, rows, losses.double().numpy())
        documents = [
            Document(one.group, one.number, i, name, float(sums[i]), int(counts[i]))
            for i, name in enumerate(one.batch.document_ids)
        ]
        if outputs.first is None:
            return documents, None
        return documents, {"group": one.group, "micro": one.number} | describe(outputs.first, one.batch, rows)

    def _gradients(self, batch: MicroBatch, rows: slice = slice(None)) -> tuple[float, tuple[Tensor, ...]]:
        """Sum of the losses, and the gradients of its share of the step's mean."""
        tokens, places, labels = self._inputs(batch, rows)
        loss = self.model(tokens, places, self.attention, labels)
        scaled = loss / max(self.dump.num_targets, 1)
        return float(loss.detach()), torch.autograd.grad(scaled, list(self.parameters.values()))

    def _alone(self, one: Dumped, index: int) -> Alone:
        end = sum(one.batch.lengths[: index + 1])
        length = one.batch.lengths[index]
        masks = tuple(
            (mask if isinstance(mask, Mask) else (mask[index],), layers) for mask, layers in one.plan.problem.masks
        )
        heads = one.plan.problem.heads
        problem = Problem(Layout.from_lengths([length]), heads, Topology(1, 1), masks, Cluster())
        self.attention.plan = compile(problem, "ring")
        loss, gradients = self._gradients(one.batch, slice(end - length, end))
        return Alone(loss, _norm(gradients))


def _norm(gradients) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 for gradient in gradients))


def repeats(dump: Dump, replay: Replay) -> bool:
    """Whether a replay shows what training saw: the same documents not finite, and the same loss and gradient norm
    where they are."""
    seen = [math.isfinite(loss) for one in dump.micros for loss in one.losses]
    if seen != [math.isfinite(one.loss_sum) for one in replay.documents]:
        return False
    return _same(dump.seen["loss"], replay.loss, TOLERANCE[dump.dtype]) and _same(
        dump.seen["grad_norm"], replay.grad_norm, NORM_TOLERANCE[dump.dtype]
    )


def _same(seen: float, found: float, tolerance: float) -> bool:
    if not math.isfinite(seen):
        return not math.isfinite(found)
    return abs(found - seen) <= tolerance * abs(seen)
