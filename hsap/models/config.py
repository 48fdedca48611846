"""The shape of a Llama-family decoder, checked, and what it costs in parameters and FLOPs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hsap.ir.effects import FLOPS_PER_PAIR
from hsap.ir.mask import Mask, parse_layers
from hsap.ir.program import Op
from hsap.keys import check, choice, flag, integer, number, read, rule, text
from hsap.models.scaling import RopeScaling


def _positive(default: float) -> Any:
    return number("a number above 0", lambda v: v > 0, default=default)


def _is_masks(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list | tuple) and all(isinstance(m, str) for m in value))


FREE = ("checkpointing", "offload_checkpoints", "mlp_chunk_tokens", "loss_chunk_tokens", "loss_chunk_vocab", "compile")
"""Fields that say how a model is computed and not what: they may change from run to run of one model."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Dimensions and numerics of one decoder; the keys of `configs/model/*.yaml` are these fields.

    `checkpointing` says what a layer keeps for backward, which makes the rest again: `selective` its input and what
    attention saved (q, kv, o, lse), `full` its input and attention's output (o, lse); attention itself is never
    computed again. `offload_checkpoints` keeps that on the host between forward and backward. `mlp_chunk_tokens` bounds
    the rows whose feed-forward exists at one time (None: all), `loss_chunk_tokens` and `loss_chunk_vocab` rows and
    columns of the logits that do (None: the whole vocabulary). `compile` runs torch.compile on the two parts of a
    layer. None of these six changes what is computed.

    `masks` names the attention mask of each layer, from the first on, in the spelling of `parse_layers` or as a list of
    such texts: of every layer, or a pattern that is repeated to the last, as in window:1024*5+causal. It is kept as the
    text of the shortest such pattern. `attention_bias` says which projections add a bias: none, those of queries, keys
    and values (Qwen2), or all four; `qk_norm` whether each head's queries and keys are normed before they are turned
    (Qwen3); `rope_scaling` is the text of a `RopeScaling`.
    Errors: ValueError that names the field.
    """

    vocab_size: int = integer(1)
    num_layers: int = integer(1)
    hidden_dim: int = integer(1)
    num_q_heads: int = integer(1)
    num_kv_heads: int = integer(1)
    head_dim: int = integer(1)
    ffn_dim: int = integer(1)
    rope_base: float = _positive(10000.0)
    norm_eps: float = _positive(1e-5)
    tied_embeddings: bool = flag(default=False)
    init_std: float = _positive(0.02)
    checkpointing: str = choice("none", "selective", "full", default="none")
    offload_checkpoints: bool = flag(default=False)
    mlp_chunk_tokens: int | None = integer(1, optional=True, default=None)
    loss_chunk_tokens: int = integer(1, default=1024)
    loss_chunk_vocab: int | None = integer(1, optional=True, default=None)
    compile: bool = flag(default=False)
    masks: str = rule("a mask for all layers, a pattern, or a list of masks", _is_masks, default="causal")
    attention_bias: str = choice("none", "qkv", "all", default="none")
    qk_norm: bool = flag(default=False)
    rope_scaling: str = text("none, linear:FACTOR or llama3:FACTOR,LOW,HIGH,ORIGINAL_TOKENS", default="none")

    def __post_init__(self) -> None:
        check(self, "model.")
        if not isinstance(self.masks, str):
            object.__setattr__(self, "masks", "+".join(self.masks))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_kv_heads is {self.num_kv_heads}, which does not divide model.num_q_heads "
                f"{self.num_q_heads}: every KV head must serve the same number of query heads."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim is {self.head_dim}, but rotary embedding turns pairs: give an even number."
            )
        if self.offload_checkpoints and self.checkpointing == "none":
            raise ValueError(
                "model.offload_checkpoints moves what checkpointing keeps, but model.checkpointing is none: set it to "
                "selective or full."
            )
        object.__setattr__(self, "masks", _pattern(self.masks, self.num_layers))
        try:
            object.__setattr__(self, "rope_scaling", str(RopeScaling.parse(self.rope_scaling)))
        except ValueError as error:
            raise ValueError(f"model.rope_scaling is {self.rope_scaling!r}: {error}.") from error

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], tokenizer_vocab_size: int | None = None) -> ModelConfig:
        """Make a config from plain keys, as read from YAML; a null `vocab_size` is taken from the tokenizer.

        Errors: ValueError for an unknown or missing key, for a null `vocab_size` without a tokenizer, and for a
        tokenizer that has more ids than the model has embeddings.
        """
        values = dict(mapping)
        if values.get("vocab_size") is None:
            if tokenizer_vocab_size is None:
                raise ValueError(
                    "model.vocab_size is null, which means the tokenizer's, but there is no tokenizer: set it."
                )
            values["vocab_size"] = tokenizer_vocab_size
        config = read(cls, "model.", values)
        if tokenizer_vocab_size is not None and tokenizer_vocab_size > config.vocab_size:
            raise ValueError(
                f"model.vocab_size is {config.vocab_size}, but the tokenizer has {tokenizer_vocab_size} ids: choose "
                f"the model's own tokenizer, or set model.vocab_size to {tokenizer_vocab_size} or more."
            )
        return config

    @property
    def layer_masks(self) -> tuple[Mask, ...]:
        """The attention mask of each layer."""
        pattern = parse_layers(self.masks)
        return pattern * (self.num_layers // len(pattern))

    @property
    def q_dim(self) -> int:
        """Width of all query heads together; it need not equal hidden_dim."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_matmul_params(self) -> int:
        """Weights of one layer that take part in matrix products."""
        return self.hidden_dim * (2 * self.q_dim + 2 * self.kv_dim + 3 * self.ffn_dim)

    @property
    def layer_params(self) -> int:
        """Trainable parameters of one layer."""
        biases = {"none": 0, "qkv": self.q_dim + 2 * self.kv_dim, "all": self.q_dim + 2 * self.kv_dim + self.hidden_dim}
        norms = 2 * self.hidden_dim + (2 * self.head_dim if self.qk_norm else 0)
        return self.layer_matmul_params + norms + biases[self.attention_bias]

    @property
    def num_params(self) -> int:
        """Trainable parameters; tied embeddings are counted once."""
        embeddings = self.vocab_size * self.hidden_dim * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * self.layer_params + self.hidden_dim

    @property
    def flops_per_token(self) -> int:
        """Model FLOPs of one token, forward and backward, without attention: 6 per weight in a matrix product.

        The lm head counts (tied or not), the embedding look-up doesn't; recomputation under checkpointing is not
        model FLOPs.
        """
        return 6 * (self.num_layers * self.layer_matmul_params + self.vocab_size * self.hidden_dim)

    def attention_forward_flops(self, area: float) -> float:
        """FLOPs of one layer's attention forward over `area` visible (q, k) pairs: QK and PV, 2·head_dim each, per
        query head."""
        return FLOPS_PER_PAIR[Op.ATTEND] * area * self.num_q_heads * self.head_dim

    def attention_backward_flops(self, area: float) -> float:
        """FLOPs of one layer's attention backward: five products where the forward has two (FlashAttention-2's count,
        2.5 ×)."""
        return FLOPS_PER_PAIR[Op.ATTEND_GRAD] * area * self.num_q_heads * self.head_dim

    def train_flops(self, num_tokens: int, area: float) -> float:
        """Model FLOPs of a forward and backward over `num_tokens`, where a layer's mask shows `area` (q, k) pairs, in
        the mean of all layers."""
        attention = self.attention_forward_flops(area) + self.attention_backward_flops(area)
        return num_tokens * self.flops_per_token + self.num_layers * attention


def _pattern(masks: str, num_layers: int) -> str:
    """Check masks of layers, and give the shortest pattern that says the same: equal models have equal texts."""
    try:
        layers = parse_layers(masks)
    except ValueError as error:
        raise ValueError(f"model.masks is {masks!r}: {error}.") from error
    if num_layers % len(layers):
        raise ValueError(
            f"model.masks names {len(layers)} layers, which don't go into model.num_layers {num_layers}: name one mask "
            "for each layer, or a pattern that fits in a whole number of times."
        )
    periods = (n for n in range(1, len(layers) + 1) if len(layers) % n == 0)
    shortest = next(n for n in periods if layers[:n] * (len(layers) // n) == layers)
    runs = ((mask, len([*run])) for mask, run in itertools.groupby(layers[:shortest]))
    return "+".join(f"{mask}*{count}" if count > 1 else f"{mask}" for mask, count in runs)
