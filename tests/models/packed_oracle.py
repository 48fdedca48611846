"""A decoder written a second time, in another style, and dense attention over packed documents: oracles for the
tests."""

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


def oracle_logits(config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor, lengths: list[int]) -> Tensor:
    """Logits by running each document alone, head by head, with rotary embedding as complex multiplication."""
    documents = [_oracle_document(config, weights, ids) for ids in torch.split(tokens, lengths) if len(ids)]
    return torch.cat(documents)


def _oracle_document(config: ModelConfig, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    def norm(x, name):
        return torch.stack([row / ((row @ row) / len(row) + config.norm_eps) ** 0.5 for row in x]) * weights[name]

    half = config.head_dim // 2
    frequencies = torch.tensor([config.rope_base ** (-i / half) for i in range(half)], dtype=torch.float64)
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
        heads = []
        for head in range(config.num_q_heads):
            kv_head = head * config.num_kv_heads // config.num_q_heads
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)
            shared = slice(kv_head * config.head_dim, (kv_head + 1) * config.head_dim)
            q, k = turned((x @ matrix["q"])[:, own]), turned((x @ matrix["k"])[:, shared])
            weight = torch.exp(torch.log_softmax(q @ k.T * config.head_dim**-0.5 + future, dim=1))
            heads.append(weight @ (x @ matrix["v"])[:, shared])
        stream = stream + torch.cat(heads, dim=1) @ matrix["o"]
        x = norm(stream, prefix + "post_attention_layernorm.weight")
        gate = x @ matrix["gate"]
        stream = stream + (gate / (1 + torch.exp(-gate)) * (x @ matrix["up"])) @ matrix["down"]
    head = weights["model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"]
    return norm(stream, "model.norm.weight") @ head.T


def oracle_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    losses = [torch.logsumexp(row, 0) - row[target] for row, target in zip(logits, targets.tolist()) if target >= 0]
    return torch.stack(losses).sum() if losses else logits.sum() * 0
