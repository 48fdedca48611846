"""HSAP in a training loop of one's own, with FSDP2.

    torchrun --nproc-per-node 4 launch/examples/own_loop.py 2x1     # two SP groups of two ranks
    torchrun --nproc-per-node 4 launch/examples/own_loop.py 2x2     # one of four

Model, optimizer, data and loop are this file's; HSAP gives the rank's rows of each pack, attention over all of them,
and the scale of the loss. The losses don't depend on the topology or on the number of ranks.
"""

from __future__ import annotations

import json
import sys
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from demo_text import VOCAB_SIZE, packs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import hsap
from hsap.models.loss import token_loss_sum
from hsap.models.rope import rope_tables, rotate

HEADS = hsap.HeadShape(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype="fp32")
MASKS = "window:64+causal"
HIDDEN, LAYERS, STEPS, PACKS_PER_STEP = 64, 2, 4, 4


class Layer(nn.Module):
    """A decoder layer as anybody would write it; attention is handed in."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (HEADS.num_q_heads + 2 * HEADS.num_kv_heads) * HEADS.head_dim, bias=False)
        self.out = nn.Linear(HEADS.num_q_heads * HEADS.head_dim, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attention) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEADS.head_dim))
        q, k, v = heads.split((HEADS.num_q_heads, HEADS.num_kv_heads, HEADS.num_kv_heads), dim=1)
        x = x + self.out(attention(rotate(q, rope), rotate(k, rope), v, self.index).flatten(1))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A decoder; gives the sum of the losses of the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, HIDDEN)
        self.layers = nn.ModuleList(map(Layer, range(LAYERS)))
        self.head = nn.Linear(HIDDEN, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attention, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rope = rope_tables(positions, HEADS.head_dim, 10000.0, x.dtype)
        for layer in self.layers:
            x = layer(x, rope, attention)
        return token_loss_sum(x, self.head.weight, targets, chunk_tokens=1024)


def main(topology: str) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    sp = hsap.SequenceParallel(topology, HEADS, MASKS)

    torch.manual_seed(0)
    model = Model().to(sp.device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = packs(pack_tokens=512, longest=300)
    for step in range(STEPS):
        # Every SP group takes its share of the step's packs; all of its ranks see the same documents.
        mine = list(islice(data, PACKS_PER_STEP))[sp.dp_rank :: sp.dp_size]
        documents = [document for pack in mine for document in pack]
        tokens = torch.tensor([token for document in documents for token in document])

        shard = sp.load([len(document) for document in documents], labels=tokens)
        loss = model(shard.take(tokens), shard.positions, shard.attention, shard.targets)
        loss = loss * sp.loss_scale(shard.num_targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "loss": mean.item(), "grad_norm": norm.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "2x1")
