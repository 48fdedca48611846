"""Families of models whose config.json is understood: what fields mean that aren't there, and which mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SIZES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "hidden_dim": "hidden_size",
    "num_q_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
}
"""Fields of `ModelConfig` that every config.json must hold, and their names there."""


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    defaults: what its fields mean where they are missing, as transformers' own class has it; None: needed. windows: how
    layers get a sliding window: never, all at once by `sliding_window`, or layer by layer. bias: which projections have
    biases, None where `attention_bias` says it. qk_norm: whether queries and keys are normed.
    """

    architecture: str
    windows: str
    bias: str | None
    qk_norm: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


_WINDOWS_BY_LAYER = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", "never", None, defaults={"attention_bias": False, "head_dim": None}),
    "mistral": Family("MistralForCausalLM", "all", "none", defaults={"sliding_window": 4096, "head_dim": None}),
    "qwen2": Family("Qwen2ForCausalLM", "by layer", "qkv", defaults={**_WINDOWS_BY_LAYER, "head_dim": None}),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "by layer",
        None,
        qk_norm=True,
        defaults={**_WINDOWS_BY_LAYER, "attention_bias": False, "head_dim": 128},
    ),
}

COMMON = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "num_key_value_heads": None,
}
"""Defaults of the fields that all families have."""

ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1, None),
    "pruned_heads": ({}, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
}
"""Fields with values that this decoder computes as they say, and no others; a field that isn't there has the first."""

_NOTES = (
    "_attn_implementation _name_or_path architectures attn_implementation bos_token_id dtype eos_token_id "
    "is_llama_config keys_to_ignore_at_inference max_position_embeddings model_type pad_token_id pretraining_tp "
    "sep_token_id tokenizer_class torch_dtype transformers.js_config transformers_version unk_token_id unsloth_fixed "
    "unsloth_version use_cache "
    "bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id "
    "forced_eos_token_id id2label is_decoder label2id length_penalty max_length min_length no_repeat_ngram_size "
    "num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_scores prefix "
    "problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate suppress_tokens "
    "task_specific_params temperature tf_legacy_loss tie_encoder_decoder top_k top_p torchscript typical_p "
    "use_bfloat16 "
)
NOTES = frozenset(_NOTES.split())
"""Fields that say nothing about what a decoder computes in training: notes, and settings of generation."""
