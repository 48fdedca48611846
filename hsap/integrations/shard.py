"""Shard: what one rank has of a packed micro-batch, and the attention of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hsap.ir.mask import Mask
from hsap.ir.plan import Plan
from hsap.ir.span import positions
from hsap.runtime.attention import attention
from hsap.runtime.executor import Executor
from hsap.runtime.upload import sent


class Shard:
    """One rank's part of a packed micro-batch; tensors are on the rank's device.

    plan: the micro-batch's. rows: int64 [T], token positions of the rank's rows in the packed batch, in row order; T
    may be 0. positions: int64 [T], within the document. targets: int64 [T], the token that each row predicts, -100
    where there is none; None where `load` was given no labels. layer_masks: of each layer, or a pattern that is
    repeated. No dataclass, because FSDP2 rebuilds those among a forward's arguments with all that is in them.
    """

    __slots__ = ("_executor", "_indices", "_num_targets", "layer_masks", "plan", "positions", "rows", "targets")

    def __init__(
        self,
        plan: Plan,
        rows: Tensor,
        positions: Tensor,
        targets: Tensor | None,
        num_targets: int,
        layer_masks: tuple[Mask, ...],
        indices: tuple[int, ...],
        executor: Executor,
    ) -> None:
        self.plan, self.rows, self.positions, self.targets = plan, rows, positions, targets
        self.layer_masks = layer_masks
        self._num_targets, self._indices, self._executor = num_targets, indices, executor

    @property
    def num_targets(self) -> int:
        """Targets of the whole micro-batch. ValueError where `load` was given no labels, and nothing was counted."""
        if self.targets is None:
            raise ValueError(
                "shard: the batch was loaded without labels, so its targets aren't counted, and a loss scaled by none "
                "would be wrong; give load the labels, or count the targets of the whole batch yourself"
            )
        return self._num_targets

    @property
    def num_tokens(self) -> int:
        """Rows of this rank."""
        return len(self.rows)

    def take(self, values: Tensor | np.ndarray | Sequence[Any], dim: int = 0) -> Tensor:
        """Give this rank's rows of any field of the packed batch, on the rank's device.

        values: as many tokens along `dim` as the batch has; ValueError otherwise.
        """
        values = torch.as_tensor(values)
        whole = self.plan.problem.layout.num_tokens
        if values.shape[dim] != whole:
            raise ValueError(
                f"shard: a field has {values.shape[dim]} tokens, the packed batch {whole}; give the whole batch's, "
                "documents one after the other, the same on every rank of the SP group"
            )
        rows = self.rows
        if rows.device != values.device:
            # Where they are wanted, and not fetched from the GPU, which would stop the host until it is through.
            rows = sent(torch.from_numpy(positions(self.plan.rank_spans(self._executor.rank))), values.device)
        return sent(values.index_select(dim, rows), self.rows.device)

    def mask_of(self, layer: int) -> Mask:
        """The attention mask of a layer."""
        return self.layer_masks[layer % len(self.layer_masks)]

    def attention(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, layer: int = 0) -> Tensor:
        """Attend the rank's own rows over the whole packed batch, as `hsap.attention`, under the layer's mask."""
        return attention(q_THD, k_THD, v_THD, self._executor, self._indices[layer % len(self._indices)], layer)
