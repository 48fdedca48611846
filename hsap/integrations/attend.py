"""Attend: the attention that transformers' layers call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsap.integrations.model_config import scaled_by
from hsap.integrations.shard import Shard
from hsap.ir.check import shown

NAME = "hsap"
"""Our attention's name among transformers' (`model.config._attn_implementation`)."""
SHARD = "hsap"
"""The forward's argument that holds the rank's `Shard`; it is handed down to every layer's attention."""
_HANDED_DOWN = (
    *("position_ids", "position_embeddings", "cache_position", "sliding_window", "is_causal", "layer_idx"),
    *("output_hidden_states", "return_dict"),
)


class Call:
    """One forward of a model: what its layers and its head need to know, and what they have done.

    scale: what the sum of losses is multiplied by, or what it is divided by; the other one is None. windows: of each
    layer, as the configuration was read; None where it wasn't asked.
    No dataclass, as `Shard`, lest layers tell a copy what they have done.
    """

    __slots__ = ("layers", "loss", "scale", "shard", "targets", "windows")

    def __init__(
        self,
        shard: Shard,
        targets: Tensor | None,
        scale: tuple[Tensor | float | None, Tensor | int | None],
        windows: tuple[int | None, ...] | None,
    ) -> None:
        self.shard, self.targets, self.scale, self.windows = shard, targets, scale, windows
        self.layers: set[int] = set()
        self.loss: Tensor | None = None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers ask for it: query [1, H, T, D], key and value [1, H_kv, T, D], a rank's rows.

    Gives [1, T, H, D] and no weights. ValueError for anything asked that isn't computed here.
    """
    call, layer = kwargs.pop(SHARD, None), getattr(module, "layer_idx", None)
    if not isinstance(call, Call) or layer is None:
        raise ValueError(
            f"transformers: {type(module).__name__} was called without a shard (or has no layer_idx): either the "
            "model wasn't given hsap=shard, or it doesn't hand its forward's arguments down to attention, and HSAP "
            "can't train it"
        )
    asked = {name: value for name, value in kwargs.items() if name not in _HANDED_DOWN}
    asked |= {"attention_mask": attention_mask, "dropout": dropout}
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        asked["is_causal"] = "False"
    for name, wanted in asked.items():
        if isinstance(wanted, Tensor) or wanted:
            raise ValueError(
                f"transformers: layer {layer} asks its attention for {name}={shown(wanted)}, which HSAP doesn't "
                "compute; set it to null, false or 0 in the model's configuration, or train another model"
            )
    if call.windows is not None and kwargs.get("sliding_window") != call.windows[layer]:
        raise ValueError(
            f"transformers: layer {layer} asks for sliding_window={kwargs.get('sliding_window')}, its configuration "
            f"was read as {call.windows[layer]}; say what you mean by masks= of sequence_parallel"
        )
    if query.shape[0] != 1 or query.shape[-1] != value.shape[-1]:
        raise ValueError(
            f"transformers: layer {layer} has queries of shape {list(query.shape)} and values of {list(value.shape)}; "
            "attention here takes one row of packed documents, and one width for queries, keys and values"
        )
    call.layers.add(layer)
    factor, num_rows, device = scaled_by(scaling, query.shape[-1]), query.shape[2], query.device.type
    if factor != 1.0:
        query = query * factor
    if torch.is_autocast_enabled(device):
        # As torch's own attention does: rotary embedding may have left queries and keys in float32.
        query, key, value = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (query, key, value))
    q_THD, k_THD, v_THD = (tensor[0].transpose(0, 1)[: call.shard.num_tokens] for tensor in (query, key, value))
    o_THD = call.shard.attention(q_THD, k_THD, v_THD, layer)
    return F.pad(o_THD, (0, 0, 0, 0, 0, num_rows - call.shard.num_tokens))[None], None
