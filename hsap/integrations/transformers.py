"""Hugging Face causal language models under sequence parallelism: attention, loss and batches of any of them.

`sequence_parallel` reads head shape and masks off the model's own configuration and changes the model in place: its
attention is "hsap", and its forward takes a rank's rows of packed documents and gives the rank's part of the loss. What
a model would want of attention beyond that is refused, at the start where the configuration says so, else in the first
forward, where every layer's attention must have been asked for, with nothing but what is computed here.

No mask is ever built: transformers asks its mask interface only for attentions that are registered there, and this one
isn't. Logits don't exist as a whole either: the model's own forward runs, with an lm head that turns hidden states into
the sum of token losses, chunk by chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from hsap.integrations.adapter import Adapter
from hsap.integrations.attend import NAME, SHARD, attend
from hsap.integrations.collator import Collator
from hsap.integrations.model_config import check_model, read_heads, read_masks
from hsap.integrations.own_loop import SequenceParallel
from hsap.ir.check import whole
from hsap.ir.mask import Mask
from hsap.runtime.memory import DTYPE_NAMES

try:
    from transformers import AttentionInterface, PreTrainedModel
except ImportError as error:
    raise ImportError(
        "hsap.integrations.transformers needs Hugging Face's transformers, version 5.20 or later: "
        f"pip install 'hsap[transformers]' ({error})"
    ) from error

__all__ = ["NAME", "SHARD", "Collator", "attend", "sequence_parallel"]


def sequence_parallel(
    model: PreTrainedModel,
    topology: str,
    *,
    dtype: str | None = None,
    masks: str | Sequence[Mask | str] | None = None,
    loss_chunk_tokens: int = 1024,
    **options: Any,
) -> SequenceParallel:
    """Put a causal language model under sequence parallelism, in place, and give what plans its batches.

    Call it before the model is wrapped (DDP, FSDP2, DeepSpeed, accelerate); collective over the job. dtype: of queries,
    keys and values as they will be (None: the model's own; under autocast or DeepSpeed's bf16 say "bf16"). masks: of
    the layers, instead of those that the model's configuration asks for. loss_chunk_tokens: rows whose logits exist at
    one time. options: of `SequenceParallel`.
    The model's forward then takes `hsap=shard`, with `input_ids` [1, T] of the shard's rows (`Collator` gives all), and
    `loss_scale=` (a loop's own, `SequenceParallel.loss_scale`) or `num_items_in_batch=` (Trainer's: targets of all
    ranks, over all micro-batches of the step); its loss is the rank's sum of token losses times the one, or divided by
    the other. Without targets it gives the logits of the rank's rows.
    Errors: ValueError names what of the model HSAP doesn't compute, and what to do.
    """
    whole("transformers: loss_chunk_tokens", loss_chunk_tokens)
    _check_fits(model)
    config = model.config.get_text_config()
    asked = read_masks(config)
    windows = None
    if masks is None:
        masks, windows = asked, tuple(mask.parameters[0] if mask.parameters else None for mask in asked)
    heads = read_heads(config, dtype or DTYPE_NAMES[model.dtype])
    sp = SequenceParallel(topology, heads, masks, **options)
    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise ValueError(
            f"transformers: {type(model).__name__} has attention of its own, which can't be exchanged by the attention "
            "interface; train another model"
        )
    Adapter(model, len(asked), windows, sp.layer_masks, loss_chunk_tokens)
    return sp


def _check_fits(model: PreTrainedModel) -> None:
    """Refuse a model whose attention, positions and head can't be exchanged."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"transformers: {type(model).__name__} isn't transformers' own; give the model before whatever wraps it"
        )
    check_model(model, model.config.get_text_config())
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ValueError(
            f"transformers: {type(model).__name__} has no lm head that is a linear layer; HSAP trains causal language "
            "models (AutoModelForCausalLM), with a head that isn't quantised or wrapped"
        )
    if isinstance(getattr(head.forward, "__self__", None), Adapter):
        raise ValueError(
            f"transformers: this {type(model).__name__} is under sequence parallelism already; call "
            "sequence_parallel once for a model"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"transformers: {type(model).__name__} takes no position_ids, to say where its rows are; train another one"
        )
    if getattr(model, "_tp_size", None) not in (None, 1):
        raise ValueError(
            "transformers: the model is loaded in tensor-parallel shares (tp_plan), of whose groups nothing is known "
            "here; load it whole, or give HSAP a share of the heads in a loop of your own (hsap.SequenceParallel)"
        )
