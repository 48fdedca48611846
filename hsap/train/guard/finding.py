"""Finding out who is to blame for a step: its forward once more, watched, and the losses of every document.

Only after something has gone wrong; nothing here is in the way of other steps. All ranks of the job take part, and all
of them come to the same finding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hsap.data.batch import MicroBatch
from hsap.data.loader import StepBatch
from hsap.gathering import gather_texts
from hsap.ir.check import shown
from hsap.ir.span import positions
from hsap.runtime.groups import Mesh
from hsap.targets import NO_TARGET
from hsap.train.gradients import non_finite
from hsap.train.guard.outputs import NonFinite, Outputs

_NAMED = 3
"""Documents and parameters that a message names; a dump has all."""


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of a micro-batch and its loss. group: SP group; index: among the micro-batch's pieces."""

    group: int
    micro: int
    index: int
    name: str
    loss_sum: float
    num_targets: int

    @property
    def mean(self) -> float:
        return self.loss_sum / max(self.num_targets, 1)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a step looks like from within. first: the earliest output, or gradient, that isn't finite: direction, rank,
    group, micro, order, module, layer, token, document, row and what ran there, JSON values; None where all is finite.
    gradients, weights: elements that aren't finite, by parameter."""

    documents: tuple[Document, ...]
    first: dict | None
    gradients: dict[str, int]
    weights: dict[str, int]

    @property
    def bad(self) -> list[Document]:
        """Documents whose loss isn't finite."""
        return [one for one in self.documents if not np.isfinite(one.loss_sum)]


class Search:
    """Looks into a step that went wrong. Made and called alike on every rank of the job.

    engine: DeepSpeed's; stage: of ZeRO. losses(micro, plan, call, per_token): the rank's rows' losses, or their sum.
    """

    def __init__(self, engine, stage: int, attention: object, mesh: Mesh, device: torch.device) -> None:
        self.engine, self.stage, self.attention, self.mesh, self.device = engine, stage, attention, mesh, device

    def find(self, batch: StepBatch, plans: Sequence, losses: Callable[..., Tensor], scale: float) -> Finding:
        """Look. Collective over the job; the gradient of the step must still be where its backward left it."""
        mine: dict[str, Any] = {
            "rank": dist.get_rank(),
            "group": self.mesh.dp_rank,
            "gradients": non_finite(self.engine),
        }
        mine["weights"] = self._weights()
        work = [*zip(batch.micro_batches, plans, strict=True)]
        self.engine.eval()
        micros = mine["micros"] = [self._forward(micro, plan, losses) for micro, plan in work]
        self.engine.train()
        told = self._gather(mine)
        if not any(micro["first"] for one in told for micro in one["micros"]) and self._can_go_back(told):
            mine["micros"] = [
                one | {"first": self._backward(micro, plan, losses, scale)}
                for one, (micro, plan) in zip(micros, work, strict=True)
            ]
            told = self._gather(mine)
        return _merged(told)

    def _gather(self, mine: dict) -> list[dict]:
        return [json.loads(text) for text in gather_texts(json.dumps(mine), device=self.device)]

    def _can_go_back(self, told: Sequence[dict]) -> bool:
        """Whether backward can be run and nothing remain of it: not where ZeRO 3 follows the order of modules, nor
        where weights travel with the gradient."""
        return self.stage < 3 and self.engine.mpu is None and any(one["gradients"] for one in told)

    def _weights(self) -> dict[str, int]:
        counts = {}
        for name, parameter in self.engine.module.named_parameters():
            held = getattr(parameter, "ds_tensor", parameter)
            if number := int((~torch.isfinite(held.detach())).sum()):
                counts[name] = number
        return counts

    @torch.no_grad()
    def _forward(self, micro: MicroBatch, plan, losses: Callable[..., Tensor]) -> dict:
        with Outputs(self.engine.module, self.attention) as outputs:
            losses_T = losses(micro, plan, self.engine, per_token=True)
        rows = positions(plan.rank_spans(self.mesh.sp_rank))
        values = losses_T[: len(rows)].double().cpu().numpy()
        sums, counts = document_sums(micro, rows, values)
        return {
            "first": self._described("forward", outputs.first, micro, rows),
            "sums": sums.tolist(),
            "targets": counts.tolist(),
            "documents": micro.document_ids if self.mesh.sp_rank == 0 else [],
        }

    def _backward(self, micro: MicroBatch, plan, losses: Callable[..., Tensor], scale: float) -> dict | None:
        with Outputs(self.engine.module, self.attention, keeps=True) as outputs:
            loss = losses(micro, plan, self.engine.module)
        sight = outputs.gradients(loss * scale)
        return self._described("backward", sight, micro, positions(plan.rank_spans(self.mesh.sp_rank)))

    def _described(self, direction: str, sight: NonFinite | None, micro: MicroBatch, rows: np.ndarray) -> dict | None:
        if sight is None:
            return None
        place = {"rank": dist.get_rank(), "group": self.mesh.dp_rank, "direction": direction}
        return place | describe(sight, micro, rows)


def describe(sight: NonFinite, micro: MicroBatch, rows: np.ndarray) -> dict:
    """Say where a sight is, in tokens and documents, as JSON values. rows: the token positions of the tensor's rows."""
    own = sight.rows[sight.rows < len(rows)]
    places = np.sort(rows[own])
    told = {"order": sight.order, "module": sight.module, "layer": sight.layer}
    if not len(places):
        return told | {"token": None, "documents": []}
    ends = np.cumsum(micro.lengths)
    indices = np.unique(np.searchsorted(ends, places, side="right"))
    first, token = int(indices[0]), int(places[0])
    return told | {
        "token": token,
        "id": int(micro.tokens[token]),
        "row": token - int(ends[first]) + micro.lengths[first],
        "documents": [micro.document_ids[i] for i in indices.tolist()],
    }


def document_sums(micro: MicroBatch, rows: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums of some rows' losses and numbers of their targets, by document. rows: token positions; losses: of each."""
    index = np.searchsorted(np.cumsum(micro.lengths), rows, side="right")
    sums, counts = np.zeros(len(micro.lengths)), np.zeros(len(micro.lengths), np.int64)
    np.add.at(sums, index, losses)
    np.add.at(counts, index, micro.labels[rows] != NO_TARGET)
    return sums, counts


def _merged(told: Sequence[dict]) -> Finding:
    documents, firsts = [], []
    groups = sorted({one["group"] for one in told})
    for group in groups:
        ranks = [one["micros"] for one in told if one["group"] == group]
        for number, parts in enumerate(zip(*ranks, strict=True)):
            names = next(part["documents"] for part in parts if part["documents"] or not part["sums"])
            sums = np.sum([part["sums"] for part in parts], axis=0)
            targets = np.sum([part["targets"] for part in parts], axis=0)
            documents += [
                Document(group, number, i, name, float(sums[i]), int(targets[i])) for i, name in enumerate(names)
            ]
            firsts += [part["first"] | {"micro": number} for part in parts if part["first"]]
    first = min(firsts, key=lambda one: (one["micro"], one["order"], one["token"] is None, one["rank"]), default=None)
    if first is not None:
        # The same output on other ranks: rows of the same documents, or of others that are bad too.
        alike = [one for one in firsts if all(one[key] == first[key] for key in ("group", "micro", "order"))]
        first = first | {"documents": list(dict.fromkeys(name for one in alike for name in one["documents"]))}
    gradients: dict[str, int] = {}
    weights: dict[str, int] = {}
    for one in told:
        for name, count in one["gradients"].items():
            gradients[name] = gradients.get(name, 0) + count
        for name, count in one["weights"].items():
            weights[name] = max(weights.get(name, 0), count)
    return Finding(tuple(documents), first, gradients, weights)


def told_of(finding: Finding, mean: float) -> str:
    """A finding in words, one after the other. mean: the step's loss, for what a document's is compared with."""
    parts = []
    if finding.weights:
        parts.append(f"{_counted(finding.weights)} weren't finite before this step")
    if finding.first is not None:
        parts.append(_first(finding.first))
    elif finding.gradients:
        parts.append(f"{_counted(finding.gradients)} of the gradient aren't finite, and every output in the forward is")
    elif not finding.bad:
        parts.append(_highest(finding, mean))
    if finding.bad:
        parts.append(f"the loss isn't finite of {_some(_name(one) for one in finding.bad)}")
    return "; ".join(parts)


def _first(first: dict) -> str:
    what = "output" if first["direction"] == "forward" else "gradient of an output, going backward,"
    layer = "" if first["layer"] is None else f" (layer {first['layer']})"
    at = ""
    if first["token"] is not None:
        at = (
            f" at token {first['token']:,}, which has id {first['id']} and is token {first['row']:,} of its document; "
            f"documents {_some(map(shown, first['documents']))}"
        )
    return (
        f"the first {what} that isn't finite is that of {first['module']}{layer} on rank {first['rank']}, in "
        f"micro-batch {first['micro']} of SP group {first['group']}{at}"
    )


def _highest(finding: Finding, mean: float) -> str:
    """Where nothing is infinite: who carries most of the loss above the mean, or that it doesn't repeat."""
    above = sorted(finding.documents, key=lambda one: one.num_targets * mean - one.loss_sum)[:_NAMED]
    if not np.isfinite(mean):
        return (
            "computed once more, every output, loss and gradient is finite: it doesn't repeat, as when a machine "
            "computes wrongly"
        )
    listed = (f"{_name(one)} with {one.mean:.4g} over {one.num_targets:,} targets" for one in above)
    return f"highest above the step's mean loss of {mean:.5g} are {', '.join(listed)}"


def _name(one: Document) -> str:
    return f"{shown(one.name)} (micro-batch {one.micro} of SP group {one.group})"


def _some(names) -> str:
    names = [*names]
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def _counted(counts: dict[str, int]) -> str:
    return _some(f"{count:,} elements of {name}" for name, count in counts.items())
