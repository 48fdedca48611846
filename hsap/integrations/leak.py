"""Leak check for loops of one's own and for Hugging Face models: see `hsap.leak`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hsap.integrations.own_loop import SequenceParallel
from hsap.integrations.shard import Shard
from hsap.ir.check import shown
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, distinct_masks, mask_slices, parse_layers
from hsap.leak.changes import Batch
from hsap.leak.hooks import layer_names
from hsap.leak.probe import probe
from hsap.leak.report import LeakReport

Forward = Callable[[Sequence[Any]], tuple[Tensor, Shard | None]]


def check_leak(
    model: nn.Module,
    documents: Sequence[Any],
    forward: Forward | None = None,
    *,
    sp: SequenceParallel | None = None,
    masks: str | Sequence[Mask | str] | None = None,
    bound: float | None = None,
    moves: bool = True,
    deep: bool | None = None,
) -> LeakReport:
    """Tell whether anything of one document reaches another in a model, with the loop's own forward and attention.

    Changes tokens of a few documents of a real batch and compares hidden states and gradients of all rows that the
    masks keep from them: bit for bit, where two equal runs agree in every bit. The report names documents and layer;
    `report.check()` raises a ValueError of one paragraph where something leaks, or where that can't be told
    (`report.undecided`: what isn't finite, or runs that differ by themselves). Weights, gradients, buffers and torch's
    random state stay as they are. Collective over the SP group, and eight forwards and backwards.

    model: what the forward runs; its modules are watched. documents: int ids of each, or mappings with `input_ids`,
    as the forward takes them. forward(documents): the loop's own, on any documents in any order; gives (output, shard):
    this rank's sum of token losses (times what doesn't depend on tokens) or its rows' logits, and what
    `SequenceParallel.load` gave, None in a loop without, whose one process has all rows in their order. None: of a
    Hugging Face model under `hsap.integrations.transformers.sequence_parallel`, its own. sp: gives masks and ranks.
    masks: of the layers, where there is no sp (causal). bound: what rows may differ by, over a row's size, in models
    whose rows are computed in other groups when tokens change (mixtures of experts); None: nothing, or a few times what
    two equal runs do. moves: lay documents in another order, and leave the longest out, too. deep: name modules inside
    layers, not layers alone; None: where a batch isn't too large. False for models that are compiled as a whole.
    """
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 <= bound < 1):
        raise ValueError(
            f"leak check: bound is {shown(bound)}; give a number from 0 to below 1, of a row's size, or None"
        )
    if len(documents) == 0:
        raise ValueError("leak check: no documents were given; give at least one, or there is nothing to compare")
    forward = _hugging_face(model, sp) if forward is None else forward
    tokens = [_tokens(i, document) for i, document in enumerate(documents)]
    layer_masks = _masks(sp, masks)
    layout = Layout.from_lengths(map(len, tokens))
    distinct, layers = distinct_masks(layer_masks)
    tables = tuple(mask_slices(layout, mask) for mask, _ in distinct)
    names = tuple(map(str, range(len(tokens))))
    whole = np.concatenate([np.zeros(0, dtype=np.int64), *tokens])
    batch = Batch(whole, layout.lengths, names, tables, _of_all_layers(model, layers))

    def run(tokens: np.ndarray, order: np.ndarray | None) -> tuple[Tensor, np.ndarray]:
        parts = np.split(tokens, layout.cu_seqlens[1:-1])
        given = [_with(documents[i], parts[i]) for i in (range(len(parts)) if order is None else order)]
        # DDP would wait for gradients that this doesn't make.
        with model.no_sync() if isinstance(model, DistributedDataParallel) else torch.enable_grad():
            output, shard = _given(forward(given))
        there = sum(map(len, parts)) if order is None else sum(len(parts[i]) for i in order)
        return output, np.arange(there) if shard is None else shard.rows.cpu().numpy()

    group = None if sp is None else sp.mesh.sp
    return probe(model, batch, run, group=group, deep=deep, bound=bound, moves=moves, leaves=True)


def _given(found: object) -> tuple[Tensor, Shard | None]:
    """What the loop's forward gave."""
    match found:
        case (Tensor() as output, None | Shard() as shard):
            return output, shard
    raise ValueError(
        "leak check: forward gives two things, (output, shard): this rank's sum of token losses or its rows' logits, a "
        f"tensor, and what SequenceParallel.load gave or None; this one gave {type(found).__name__}"
    )


def _hugging_face(model: nn.Module, sp: SequenceParallel | None) -> Forward:
    """The forward of a model that `sequence_parallel` has prepared."""
    if sp is None:
        raise ValueError(
            "leak check: neither a forward nor sp was given; give the loop's own forward(documents) -> (output, "
            "shard), or, for a Hugging Face model, sp= what hsap.integrations.transformers.sequence_parallel gave"
        )
    from hsap.integrations.attend import SHARD
    from hsap.integrations.collator import Collator

    collate = Collator(sp)

    def forward(documents: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Shard]:
        batch = collate(documents)
        return model(**batch, loss_scale=1.0).loss, batch[SHARD]

    return forward


def _masks(sp: SequenceParallel | None, masks: str | Sequence[Mask | str] | None) -> tuple[Mask, ...]:
    if masks is None:
        return (Mask(),) if sp is None else sp.layer_masks
    if isinstance(masks, str):
        return parse_layers(masks)
    if not isinstance(masks, Sequence) or not masks or not all(isinstance(mask, Mask | str) for mask in masks):
        raise ValueError(
            f"leak check: masks is {shown(masks)}; give a mask for each layer, as in ['causal', 'window:512'], or None"
        )
    return tuple(mask if isinstance(mask, Mask) else Mask.parse(mask) for mask in masks)


def _of_all_layers(model: nn.Module, layers: tuple[int, ...]) -> tuple[int, ...]:
    """The pattern of masks repeated to the model's layers, if these can be told; rows see more the more there are."""
    count = len(layer_names(model))
    return tuple(layers[i % len(layers)] for i in range(max(count, len(layers))))


def _tokens(i: int, document: Any) -> np.ndarray:
    """Ids of document i: int64 [T]."""
    given = document.get("input_ids") if isinstance(document, Mapping) else document
    try:
        ids = np.asarray(torch.as_tensor(given).cpu())
    except (TypeError, ValueError, RuntimeError):  # text, None, rows of several lengths
        ids = np.zeros(0)
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise ValueError(
            f"leak check: document {i} is no row of token ids; give ids of at least one token, or a mapping with them "
            "as input_ids, for each document"
        )
    return ids.astype(np.int64)


def _with(document: Any, tokens: np.ndarray) -> Any:
    """A document with other tokens; labels, and all else that it has, stay."""
    ids = torch.from_numpy(np.ascontiguousarray(tokens))
    if not isinstance(document, Mapping):
        return ids.to(document.device) if isinstance(document, Tensor) else ids
    return {**document, "input_ids": ids}
