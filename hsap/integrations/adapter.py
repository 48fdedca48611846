"""Adapter: a transformers model's forward under sequence parallelism, from its arguments to the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hsap.integrations.attend import NAME, SHARD, Call
from hsap.integrations.shard import Shard
from hsap.ir.check import shown
from hsap.ir.mask import Mask
from hsap.models.loss import token_loss_sum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OURS = (SHARD, "labels", "shift_labels", "loss_scale", "num_items_in_batch")
_TAKEN = ("input_ids", "inputs_embeds", "position_ids", "output_hidden_states", "return_dict", "use_cache")


class Adapter:
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
        self.call: Call | None = None
        self.checked = False
        self.head = model.get_output_embeddings()
        self.logits = self.head.forward
        self.head.forward = self.losses
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after, with_kwargs=True)

    def before(
        self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
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
        self.call = Call(shard, targets, scale, self.windows)
        if not shard.num_tokens:
            # Models reshape by a size to be inferred, which no rows have; one row more that nobody attends to does.
            one = torch.zeros(1, 1, dtype=torch.int64, device=shard.rows.device)
            rest["position_ids"] = one
            if rest.get("inputs_embeds") is None:
                rest["input_ids"] = one
            else:
                rest["inputs_embeds"] = F.pad(rest["inputs_embeds"], (0, 0, 0, 1))
        return (), {**rest, "use_cache": False, "return_dict": True, SHARD: self.call}

    def targets(self, shard: Shard, kwargs: dict[str, Any]) -> Tensor | None:
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
        scale: Any = kwargs.get("loss_scale")
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

    def after(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
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
