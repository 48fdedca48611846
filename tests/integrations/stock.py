"""Hugging Face models beside which those under sequence parallelism stand: stock attention, one document at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SHARED = {"num_key_value_heads": 2}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def build(family: str, model: str | None = None, **more):
    """A small model with weights of a fixed seed and stock attention. model: the class, where not named as usual."""
    config = getattr(transformers, f"{family}Config")(**SIZES | more)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, model or f"{family}ForCausalLM")(config)


def documents(lengths: list[int], seed: int = 0) -> list[dict[str, Tensor]]:
    """Random documents, in each of which some tokens aren't trained."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        ids = torch.randint(0, 61, (length,), generator=generator)
        labels = ids.masked_fill(torch.rand(length, generator=generator) < 0.3, -100)
        made.append({"input_ids": ids, "labels": labels})
    return made


def num_targets(features: list[dict[str, Tensor]]) -> int:
    return sum(int((one["labels"][1:] != -100).sum()) for one in features)


def loss(model, features: list[dict[str, Tensor]]) -> Tensor:
    """Mean over all targets, by a forward of each document alone."""
    total = torch.zeros(())
    for one in features:
        logits = model(input_ids=one["input_ids"][None]).logits[0]
        total = total + F.cross_entropy(logits[:-1], one["labels"][1:], ignore_index=-100, reduction="sum")
    return total / max(num_targets(features), 1)


def norm(gradients) -> float:
    """Of all gradients together."""
    return sum(g.double().square().sum() for g in gradients).sqrt().item()
