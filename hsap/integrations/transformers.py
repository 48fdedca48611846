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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hsap.integrations.model_config import check_model, read_heads, read_masks, scaled_by
from hsap.integrations.own_loop import SequenceParallel, Shard
from hsap.ir.check import shown, whole
from hsap.ir.mask import Mask
from hsap.models.loss import token_loss_sum
from hsap.runtime.memory import DTYPE_NAMES

try:
    from transformers import AttentionInterface, PreTrainedModel
except ImportError as error:
    raise ImportError(
        "hsap.integrations.transformers needs Hugging Face's transformers, version 5.20 or later: "
        f"pip install 'hsap[transformers]' ({error})"
    ) from error

NAME = "hsap"
"""Our attention's name among transformers' (`model.config._attn_implementation`)."""
SHARD = "hsap"
"""The forward's argument that holds the rank's `Shard`; it is handed down to every layer's attention."""
_OURS = (SHARD, "labels", "shift_labels", "loss_scale", "num_items_in_batch")
_TAKEN = ("input_ids", "inputs_embeds", "position_ids", "output_hidden_states", "return_dict", "use_cache")
_HANDED_DOWN = (
    *("position_ids", "position_embeddings", "cache_position", "sliding_window", "is_causal", "layer_idx"),
    *("output_hidden_states", "return_dict"),
)


def sequence_parallel(
    model: PreTrainedModel,
    topology: str,
    *,
    dtype: str | None = None,
    masks: str | Sequence[Mask | str] | None = None,
    loss_chunk_tokens: int = 1024,
    **options,
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
    _Adapter(model, len(asked), windows, sp.layer_masks, loss_chunk_tokens)
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
    if isinstance(getattr(head.forward, "__self__", None), _Adapter):
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


class _Call:
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


class _Adapter:
    """Hooks on a model: its forward's arguments before it runs, its lm head, and its output.

    Hooks and not a new forward, so that whatever wraps the model later finds the one it knows.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_layers: int,
        windows: tuple[int | None, ...] | None,
        masks: tuple[Mask, ...],
        chunk_tokens: int,
    ) -> None:
        self.name, self.num_layers = type(model).__name__, num_layers
        self.windows, self.masks, self.chunk_tokens = windows, masks, chunk_tokens
        self.call: _Call | None = None
        self.checked = False
        self.head = model.get_output_embeddings()
        self.logits = self.head.forward
        self.head.forward = self.losses
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after, with_kwargs=True)

    def before(self, model: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Check a forward's arguments and take out what is ours."""
        self.call = None
        shard, other = kwargs.get(SHARD), model.config.get_text_config()._attn_implementation
        if other != NAME:
            if shard is None:
                return None
            raise ValueError(
                f"transformers: {self.name} was given a shard while its attention is {other}; call "
                "model.set_attn_implementation('hsap') before it is trained on"
            )
        if args or not isinstance(shard, Shard):
            raise ValueError(
                f"transformers: the forward of {self.name} needs hsap=shard, and all arguments by name; give what "
                "Collator gives, or load the batch by SequenceParallel.load and give input_ids=shard.take(ids)[None]; "
                "to generate, or for anything else without a shard, call model.set_attn_implementation('sdpa') first"
            )
        if shard.layer_masks != self.masks:
            raise ValueError(
                f"transformers: {self.name} was given a shard with masks {shown(tuple(map(str, shard.layer_masks)))}, "
                f"its own are {shown(tuple(map(str, self.masks)))}; load its batches by what sequence_parallel gave "
                "for this model"
            )
        for name, value in kwargs.items():
            if name not in (*_OURS, *_TAKEN) and value is not None and value is not False:
                raise ValueError(
                    f"transformers: the forward of {self.name} was given {name}={shown(value)}, which has no meaning "
                    "for packed documents split over ranks; leave it out"
                )
        if kwargs.get("use_cache"):
            raise ValueError(
                f"transformers: {self.name} was given use_cache=True; a rank has no keys of others to keep"
            )
        targets = self.targets(shard, kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in _OURS}
        rest.setdefault("position_ids", shard.positions[None])
        for name in ("input_ids", "inputs_embeds", "position_ids"):
            if rest.get(name) is not None and tuple(rest[name].shape[:2]) != (1, shard.num_tokens):
                raise ValueError(
                    f"transformers: {name} has shape {list(rest[name].shape)}, this rank's part of the batch is [1, "
                    f"{shard.num_tokens}]; give one row, the shard's own: shard.take(values)[None]"
                )
        scale = kwargs.get("loss_scale"), kwargs.get("num_items_in_batch")
        self.call = _Call(shard, targets, scale, self.windows)
        if not shard.num_tokens:
            # Models reshape by a size to be inferred, which no rows have; one row more that nobody attends to does.
            one = torch.zeros(1, 1, dtype=torch.int64, device=shard.rows.device)
            rest["position_ids"] = one
            if rest.get("inputs_embeds") is None:
                rest["input_ids"] = one
            else:
                rest["inputs_embeds"] = F.pad(rest["inputs_embeds"], (0, 0, 0, 1))
        return (), {**rest, "use_cache": False, "return_dict": True, SHARD: self.call}

    def targets(self, shard: Shard, kwargs: dict) -> Tensor | None:
        """Find the targets of the rank's rows, if there are any."""
        given = kwargs.get("shift_labels")
        if given is None and kwargs.get("labels") is not None:
            raise ValueError(
                f"transformers: {self.name} was given labels; it would have to shift them, and a row's successor may "
                "be on another rank: load the batch with labels, or give shift_labels, which are shifted in each "
                "document before they are split"
            )
        targets = shard.targets if given is None else given.reshape(-1)
        if targets is not None and len(targets) != shard.num_tokens:
            raise ValueError(
                f"transformers: shift_labels are {len(targets)}, this rank has {shard.num_tokens} rows; give one a row"
            )
        if targets is not None and (kwargs.get("loss_scale") is None) == (kwargs.get("num_items_in_batch") is None):
            raise ValueError(
                f"transformers: the loss of {self.name} needs loss_scale=sp.loss_scale(targets) or "
                "num_items_in_batch=: a rank doesn't know how many targets the others have, and a mean over its own is "
                "wrong"
            )
        scale = kwargs.get("loss_scale")
        if targets is not None and getattr(scale, "dtype", None) in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"transformers: loss_scale came as {scale.dtype}, which rounds loss and gradients; under "
                "FSDP2 say MixedPrecisionPolicy(cast_forward_inputs=False) for the whole model, or give loss_scale=1.0 "
                "and multiply the loss by sp.loss_scale(targets)"
            )
        return targets

    def losses(self, hidden_1TC: Tensor) -> Tensor:
        """The lm head's forward: the sum of token losses, [1, 1, 1], where there are targets, else the logits."""
        call = self.call
        if call is None:
            return self.logits(hidden_1TC)
        if call.targets is None:
            return self.logits(hidden_1TC[:, : call.shard.num_tokens])
        weight, hidden_TC = self.head.weight, hidden_1TC[0, : call.shard.num_tokens]
        if self.head.bias is not None:
            # One column more says the same, and one product gives both gradients.
            weight = torch.cat((weight, self.head.bias[:, None]), dim=1)
            hidden_TC = F.pad(hidden_TC, (0, 1), value=1.0)
        device = hidden_TC.device.type
        if torch.is_autocast_enabled(device):
            weight, hidden_TC = (t.to(torch.get_autocast_dtype(device)) for t in (weight, hidden_TC))
        with torch.autocast(device, enabled=False):
            total = token_loss_sum(hidden_TC, weight, call.targets, self.chunk_tokens)
        call.loss = total.detach().clone()
        return total.view(1, 1, 1)

    def after(self, model: PreTrainedModel, args: tuple, kwargs: dict, output: Any) -> Any:
        """Check that the model did what we take it to do, and put the loss where it is looked for."""
        call, self.call = self.call, None
        if call is None:
            return None
        if missing := sorted(set(range(self.num_layers)) - call.layers):
            raise ValueError(
                f"transformers: layers {missing} of {self.name} didn't ask for attention by its interface, so that "
                "they have mixed a rank's own rows only, as if they were one document; HSAP can't train this model"
            )
        if call.targets is None:
            return None
        if call.loss is None:
            raise ValueError(
                f"transformers: {self.name} didn't call the lm head it had before sequence_parallel; prepare it anew"
            )
        if not self.checked:
            # Once: it waits for the device. ZeRO-3 puts a node of its own behind the head, so it is another tensor.
            total = output.logits.detach().to(call.loss.dtype)
            if total.numel() != 1 or not torch.allclose(total.view(()), call.loss, rtol=0, atol=0, equal_nan=True):
                raise ValueError(
                    f"transformers: {self.name} changes its logits behind the lm head (a soft cap or a scale), which "
                    "the loss here wouldn't know of; train another model, or set that factor to 1 or null"
                )
            self.checked = bool(call.loss != 0)
        # By the argument that is given: a scale has the size of the world in it, Trainer multiplies by that itself.
        total, (scale, count) = output.logits.view(()), call.scale
        # Without any target in the whole step the sum is 0, and its gradients are to be 0, not NaN.
        loss = total * scale if count is None else total / torch.as_tensor(count).clamp(min=1)
        return type(output)(**{**output, "loss": loss, "logits": None})


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention as transformers' layers ask for it: query [1, H, T, D], key and value [1, H_kv, T, D], a rank's rows.

    Gives [1, T, H, D] and no weights. ValueError for anything asked that isn't computed here.
    """
    call, layer = kwargs.pop(SHARD, None), getattr(module, "layer_idx", None)
    if not isinstance(call, _Call) or layer is None:
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
    rows = (tensor[0].transpose(0, 1)[: call.shard.num_tokens] for tensor in (query, key, value))
    o_THD = call.shard.attention(*rows, layer)
    return F.pad(o_THD, (0, 0, 0, 0, 0, num_rows - call.shard.num_tokens))[None], None
