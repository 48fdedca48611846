"""What a Hugging Face configuration asks of attention: head shape and masks of layers, or why it can't be had here.

What our attention would silently leave out (soft caps, sinks, biases, dropout) is refused by its name, and so is what
mixes tokens outside of attention: a rank has some rows of a document only. Nothing here imports transformers.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from hsap.ir.check import one_line, shown
from hsap.ir.heads import HeadShape
from hsap.ir.mask import Mask

KNOWN_ROPE = ("default", "linear", "llama3", "yarn")
"""Scalings whose frequencies are the same whatever positions a rank has."""
_WINDOWS = {"full_attention": False, "sliding_attention": True}
_REFUSED = {
    "is_encoder_decoder": "attention between an encoder and a decoder",
    "add_cross_attention": "attention to another sequence",
    "use_bidirectional_attention": "attention that isn't causal",
    "attn_logit_softcapping": "a soft cap on attention's logits",
    "final_logit_softcapping": "a soft cap on the model's logits",
    "attention_dropout": "dropout in attention",
    "attn_pdrop": "dropout in attention",
    "attn_dropout": "dropout in attention",
    "attention_probs_dropout_prob": "dropout in attention",
    "alibi": "ALiBi, which adds a bias by distance",
    "attention_chunk_size": "attention in chunks",
    "output_router_logits": "a loss on the router, which would be that of a rank's own tokens",
}
_POSITIONS = ("absolute", "rotary", "rope")


def read_heads(config: Any, dtype: str) -> HeadShape:
    """Give the head shape of a model's layers. config: of its text model. ValueError where layers or q and v differ."""
    try:
        q_heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // q_heads
        value_dim = getattr(config, "v_head_dim", None)
    except (AttributeError, RuntimeError) as error:  # there is none, or each layer has its own
        raise ValueError(
            f"transformers: {_name(config)} doesn't say one number and width of heads for all layers "
            f"({one_line(error)}); train a model whose layers are alike"
        ) from error
    if value_dim not in (None, head_dim):
        raise ValueError(
            f"transformers: {_name(config)} has values of {value_dim} elements a head and keys of another width; "
            "attention here has one width for queries, keys and values: train a model without latent attention"
        )
    return HeadShape(q_heads, kv_heads, head_dim, dtype)


def read_masks(config: Any) -> tuple[Mask, ...]:
    """Give the mask of each layer: causal, or a window of `sliding_window` keys where the layer has one."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    masks = []
    for layer, kind in enumerate(types):
        if kind not in _WINDOWS:
            raise ValueError(
                f"transformers: layer {layer} of {_name(config)} is of type {shown(kind)}; layers here are of "
                f"{' or '.join(_WINDOWS)}: train a model whose layers all are"
            )
        if _WINDOWS[kind] and window is None:
            raise ValueError(
                f"transformers: layer {layer} of {_name(config)} slides, and sliding_window is not set; set it"
            )
        masks.append(Mask("window", (window,)) if _WINDOWS[kind] and window is not None else Mask())
    return tuple(masks)


def check_model(model: nn.Module, config: Any) -> None:
    """Refuse what would be computed otherwise here than by the model's own attention: ValueError that names it."""
    for name, what in _REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(
                f"transformers: {_name(config)} has {name}={shown(getattr(config, name))}, {what}, which HSAP doesn't "
                "compute; set it to null, false or 0 if the model is to be trained without, or train another model"
            )
    if not getattr(config, "is_causal", True):
        raise ValueError(f"transformers: {_name(config)} isn't causal; HSAP trains causal language models only")
    if (kind := getattr(config, "position_embedding_type", None)) not in (None, *_POSITIONS):
        raise ValueError(
            f"transformers: {_name(config)} has position_embedding_type={shown(kind)}, a bias in attention"
        )
    for kind in _rope_types(config):
        if kind not in KNOWN_ROPE:
            raise ValueError(
                f"transformers: {_name(config)} has rotary scaling {shown(kind)}, whose frequencies depend on the "
                "longest position that is computed together: it would differ between ranks. Known ones are "
                f"{', '.join(KNOWN_ROPE)}"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            raise ValueError(
                f"transformers: {_name(config)} mixes neighbouring tokens in {name}, outside of attention, and "
                "neighbours may be on different ranks; train a model whose layers mix tokens by attention alone"
            )
        padded = isinstance(module, nn.Embedding) and module.padding_idx is not None
        if padded and name.rpartition(".")[2] == "position_embeddings":
            raise ValueError(
                f"transformers: {_name(config)} counts positions from behind {name}.padding_idx and not from 0, past "
                "tokens that look like padding; train another model"
            )
    for name, _ in model.named_parameters():
        if name.rpartition(".")[2] in ("sinks", "sink", "attention_sink"):
            raise ValueError(
                f"transformers: {_name(config)} has attention sinks ({name}), which HSAP doesn't compute; train "
                "another model"
            )


def scaled_by(scaling: float | None, head_dim: int) -> float:
    """Give what queries are multiplied by, so that scores scaled by 1/√head_dim are what the model asks for."""
    if scaling is None or math.isclose(scaling, head_dim**-0.5, rel_tol=1e-9):
        return 1.0
    return scaling * math.sqrt(head_dim)


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary scaling, of which a model may have one for each type of layer."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    tables = [table for table in given.values() if isinstance(table, dict)] or [given]
    return {table.get("rope_type", table.get("type", "default")) or "default" for table in tables}


def _name(config: Any) -> str:
    return f"a model of type {getattr(config, 'model_type', type(config).__name__)}"
