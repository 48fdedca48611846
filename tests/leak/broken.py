"""A small decoder in plain PyTorch, good or broken in a way of one's choice, that knows nothing of HSAP's attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS = 61, 24, 2


class Layer(nn.Module):
    def __init__(self, broken: str | None) -> None:
        super().__init__()
        self.broken, self.kept = broken, torch.zeros(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))
        if broken == "mixes neighbours":
            self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        if broken == "norms over the pack":
            self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (part.unflatten(1, (HEADS, -1)).transpose(0, 1) for part in self.qkv(x).chunk(3, dim=1))
        if self.broken == "attention ignores documents":
            seen = torch.ones_like(seen).tril()
        if self.broken == "attention looks ahead":
            seen = seen | seen.T
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1))
        if self.broken == "mixes neighbours":
            x = x + self.mix(x.T[None])[0].T
        if self.broken == "norms over the pack":
            x = self.norm(x)
        if self.broken == "reckons with the pack's length":
            x = x * (len(x) / 50)
        if self.broken == "borders are rounded":
            x = x + F.pad(x[15:16], (0, 0, 16, len(x) - 17))  # row 16 sees the row before, whosever it is
        if self.broken == "keeps the last batch":
            x, self.kept = x + self.kept, x.detach().mean(0)
        if self.broken == "isn't finite":
            x = torch.cat([x[:1] / 0, x[1:]])
        if self.broken == "drops without a module":
            x = F.dropout(x, 0.1, self.training)
        if self.broken == "mixes gradients" and x.requires_grad:
            x.register_hook(lambda grad: grad + grad.roll(1, 0))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """broken: what is wrong with layer 1, or with the positions; None: nothing."""

    def __init__(self, broken: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.broken = broken
        self.embedding, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(400, WIDTH)
        self.layers = nn.ModuleList(Layer(broken if i == 1 else None) for i in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, lengths: list[int], seen: Tensor | None = None) -> Tensor:
        """Logits of the rows of packed documents. seen: bool [T, T]; None: causal in each document."""
        positions = torch.cat([torch.arange(n) for n in lengths])
        if self.broken == "positions run on":
            positions = torch.arange(len(tokens))
        if seen is None:
            seen = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()
        x = self.embedding(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, seen)
        logits = self.head(x)
        return logits + logits.roll(1, 0) if self.broken == "mixes logits" else logits
