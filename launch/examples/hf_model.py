"""What the Hugging Face examples share: a small Llama from its configuration, and real documents."""

from __future__ import annotations

from itertools import islice

import torch
from demo_text import VOCAB_SIZE, documents
from transformers import LlamaConfig, LlamaForCausalLM


def small_llama() -> LlamaForCausalLM:
    """A model with weights of a fixed seed."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def features(count: int, longest: int = 300) -> list[dict[str, list[int]]]:
    """Documents as transformers' datasets have them."""
    return [{"input_ids": ids} for ids in islice(documents(longest), count)]
