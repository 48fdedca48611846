"""A decoder written a second time, in another style, and dense attention over packed documents: oracles for the
tests."""

import math

import torch
from torch import Tensor

from hsap.models import ModelConfig


def packed_positions(lengths: list[int]) -> Tensor:
    return torch.tensor([index for length in lengths for index in range(length)], dtype=torch.long)


def random_pack(
    lengths: list[int], vocab_size: int, seed: int = 0, ignored: float = 0.2
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and targets, a share of the targets ignored."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    tokens = torch.randint(0, vocab_size, (total,), generator=generator)
    targets = torch.randint(0, vocab_size, (total,), generator=generator)
    targets[torch.rand(total, generator=generator) < ignored] = -100
    return tokens, packed_positions(lengths), targets


def document_of(lengths: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))


def visible_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible (q, k) pairs, heads of one group sharing a KV head, all [T, H, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def dense_attention(lengths: list[int]):
    """Causal attention inside each document, in the dtype of its inputs."""
    document = document_of(lengths)
    visible = (document[:, None] == document[None, :]).tril()
    return lambda q, k, v, layer_index: visible_attention(q, k, v, visible)


def layer_attention(config: ModelConfig, lengths: list[int]):
    """What each layer's mask shows inside each document: causal, or a window of so many keys."""
    document, positions = document_of(lengths), packed_positions(lengths)
    causal = (document[:, None] == document[None, :]).tril()
    distance = positions[:, None] - positions[None, :]
    visible = [causal & (distance < mask.parameters[0]) if mask.parameters else causal for mask in config.layer_masks]
    return lambda q, k, v, layer_index: visible_attention(q, k, v, visible[layer_index])


def oracle_logits(config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor, lengths: list[int]) -> Tensor:
    """Logits by running each document alone, head by head, with rotary embedding as complex multiplication."""
    documents = [_oracle_document(config, weights, ids) for ids in torch.split(tokens, lengths) if len(ids)]
    return torch.cat(documents)


def _oracle_document(config: ModelConfig, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    def norm(x, name):
        return torch.stack([row / ((row @ row) / len(row) + config.norm_eps) ** 0.5 for row in x]) * weights[name]

    def plus_bias(x, name):
        return x + weights[name] if name in weights else x

    half = config.head_dim // 2
    frequencies = [oracle_frequency(config, config.rope_base ** (-i / half)) for i in range(half)]
    frequencies = torch.tensor(frequencies, dtype=torch.float64)
    turns = torch.exp(1j * torch.arange(len(ids), dtype=torch.float64)[:, None] * frequencies)

    def turned(x):
        z = torch.complex(x[:, :half], x[:, half:]) * turns
        return torch.cat([z.real, z.imag], dim=1)

    stream = weights["model.embed_tokens.weight"][ids]
    future = torch.full((len(ids), len(ids)), float("-inf"), dtype=torch.float64).triu(1)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        matrix = {
            name: weights[f"{prefix}{part}.{name}_proj.weight"].T
            for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
            for name in names
        }
        x = norm(stream, prefix + "input_layernorm.weight")
        all_q, all_k, all_v = (plus_bias(x @ matrix[n], f"{prefix}self_attn.{n}_proj.bias") for n in "qkv")
        window = config.layer_masks[index].parameters
        hidden = future if not window else future + torch.full_like(future, float("-inf")).tril(-window[0])
        heads = []
        for head in range(config.num_q_heads):
            kv_head = head * config.num_kv_heads // config.num_q_heads
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)
            shared = slice(kv_head * config.head_dim, (kv_head + 1) * config.head_dim)
            q, k = all_q[:, own], all_k[:, shared]
            if config.qk_norm:
                q = norm(q, prefix + "self_attn.q_norm.weight")
                k = norm(k, prefix + "self_attn.k_norm.weight")
            q, k = turned(q), turned(k)
            weight = torch.exp(torch.log_softmax(q @ k.T * config.head_dim**-0.5 + hidden, dim=1))
            heads.append(weight @ all_v[:, shared])
        stream = stream + plus_bias(torch.cat(heads, dim=1) @ matrix["o"], prefix + "self_attn.o_proj.bias")
        x = norm(stream, prefix + "post_attention_layernorm.weight")
        gate = x @ matrix["gate"]
        stream = stream + (gate / (1 + torch.exp(-gate)) * (x @ matrix["up"])) @ matrix["down"]
    head = weights["model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"]
    return norm(stream, "model.norm.weight") @ head.T


def oracle_frequency(config: ModelConfig, frequency: float) -> float:
    """Scale one frequency by wavelengths and three cases, as Llama 3.1's own code does."""
    kind, _, rest = config.rope_scaling.partition(":")
    numbers = [float(word) for word in rest.split(",") if word]
    if kind == "none":
        return frequency
    if kind == "linear":
        return frequency / numbers[0]
    factor, low, high, original = numbers
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def oracle_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    losses = [torch.logsumexp(row, 0) - row[target] for row, target in zip(logits, targets.tolist()) if target >= 0]
    return torch.stack(losses).sum() if losses else logits.sum() * 0
