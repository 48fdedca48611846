"""Leak check of a run: its own model, topology and plans on the first real batch (`check.leak=true`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from hsap.data.batch import ARRAYS, MicroBatch
from hsap.gathering import gather_texts
from hsap.ir.layout import Layout
from hsap.ir.mask import distinct_masks, mask_slices
from hsap.ir.shared import shared_masks
from hsap.ir.span import positions
from hsap.leak.changes import Batch, order_rows
from hsap.leak.probe import probe
from hsap.leak.report import LeakReport
from hsap.models import ModelConfig
from hsap.planning.planned import Exchange, Planned
from hsap.planning.steps import PlannedStep
from hsap.runtime.groups import Mesh

Loss = Callable[[MicroBatch, Planned, nn.Module], Tensor]
"""This rank's sum of token losses of a micro-batch, by a module of the model."""


def check_leak(
    step: PlannedStep, model: ModelConfig, mesh: Mesh, exchange: Exchange, module: nn.Module, loss: Loss
) -> list[LeakReport]:
    """Look for leaks in the micro-batch of most documents of a step, in every SP group; their reports, on all ranks.

    Collective over the job: every group runs as many forwards. exchange: of a use of its own, for the plan of the same
    documents in another order. module: the bare one, without DeepSpeed's engine, which would take a backward for one of
    training; weights and their gradients stay as they are.
    """
    chosen = max(range(len(step.plans)), key=lambda i: len(step.batch.micro_batches[i].lengths))
    micro, plan = step.batch.micro_batches[chosen], step.plans[chosen]
    turned, came_from = _turned(micro)
    exchange.publish(turned, 0)
    other = exchange.get(0)

    def run(tokens: np.ndarray, order: np.ndarray | None) -> tuple[Tensor, np.ndarray]:
        if order is None:
            return loss(replace(micro, tokens=tokens), plan, module), positions(plan.rank_spans(mesh.sp_rank))
        rows = positions(other.rank_spans(mesh.sp_rank))
        return loss(replace(turned, tokens=tokens[came_from]), other, module), rows

    # What is compiled would be compiled with the hooks in it.
    deep = False if model.compile else None
    own = probe(module, _batch(model, micro), run, group=mesh.sp, deep=deep)
    texts = gather_texts(json.dumps(own.to_json()))
    return [LeakReport.from_json(json.loads(text)) for text in texts[:: mesh.topology.num_ranks]]


def _batch(model: ModelConfig, micro: MicroBatch) -> Batch:
    distinct, layers = distinct_masks(model.layer_masks)
    layout = Layout.from_lengths(micro.lengths, micro.sequences)
    masks = [shared_masks(mask, layout.lengths, micro.answers) if any(micro.answers) else mask for mask, _ in distinct]
    tables = tuple(mask_slices(layout, mask) for mask in masks)
    return Batch(micro.tokens, micro.lengths, micro.document_ids, tables, layers, micro.answers)


def _turned(micro: MicroBatch) -> tuple[MicroBatch, np.ndarray]:
    """The same documents in the opposite order, and where their rows were."""
    order = np.arange(len(micro.lengths))[::-1]
    came_from = order_rows(micro.lengths, order.tolist())
    turned = replace(
        micro,
        **{name: getattr(micro, name)[came_from] for name in ARRAYS},
        lengths=micro.lengths[::-1],
        sequences=micro.sequences[::-1],
        document_ids=micro.document_ids[::-1],
        answers=micro.answers[::-1],
    )
    return turned, came_from
