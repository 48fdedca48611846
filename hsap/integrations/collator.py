"""Collator: documents as a forward's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hsap.integrations.attend import SHARD
from hsap.integrations.own_loop import SequenceParallel


class Collator:
    """Turns documents into a forward's arguments: for a `DataLoader`'s `collate_fn` or Trainer's `data_collator`.

    Called with a list of features, the same on every rank of an SP group: `input_ids` of a document, and `labels` if
    not all of its tokens are trained (as long, not shifted, -100 where there is no loss). Gives `input_ids`,
    `position_ids`, `labels` and `shift_labels`, each [1, T] of this rank's rows, and the shard. `labels` are
    `shift_labels` once more: Trainer counts targets only where there are some. Collective over the SP group, so not for
    workers of a DataLoader.
    """

    def __init__(self, sp: SequenceParallel) -> None:
        self.sp = sp

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        tokens = [_tokens(i, feature) for i, feature in enumerate(features)]
        documents, labels = [ids for ids, _ in tokens], [targets for _, targets in tokens]
        none = torch.empty(0, dtype=torch.int64)
        shard = self.sp.load([len(ids) for ids in documents], torch.cat([none, *labels]))
        assert shard.targets is not None, "labels were given"
        targets = shard.targets[None]
        return {
            "input_ids": shard.take(torch.cat([none, *documents]))[None],
            "position_ids": shard.positions[None],
            "labels": targets,
            "shift_labels": targets,
            SHARD: shard,
        }


def _tokens(i: int, feature: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Give ids and labels of document i, int64 [T]."""
    given = feature.get("input_ids") if isinstance(feature, Mapping) else None
    if given is None:
        raise ValueError(f"transformers: document {i} has no input_ids; give features with the ids of their tokens")
    ids, labels, mask = torch.as_tensor(given), feature.get("labels"), feature.get("attention_mask")
    targets = ids if labels is None else torch.as_tensor(labels)
    if ids.dim() != 1 or targets.shape != ids.shape:
        raise ValueError(
            f"transformers: document {i} has input_ids of shape {list(ids.shape)} and labels of "
            f"{list(targets.shape)}; give one row of ids a document, and labels, if any, of the same length"
        )
    if len(ids) and (ids.is_floating_point() or targets.is_floating_point()):
        raise ValueError(
            f"transformers: document {i} has input_ids of {ids.dtype} and labels of {targets.dtype}; give whole numbers"
        )
    if mask is not None and 0 in torch.as_tensor(mask):
        raise ValueError(f"transformers: document {i} is padded; documents are packed without padding: leave it out")
    return ids.long(), targets.long()
