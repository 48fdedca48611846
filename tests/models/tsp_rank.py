"""One rank of the sharded decoder: loss and gradients of its part, in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

import hsap
from hsap.ir.mask import distinct_masks
from hsap.ir.span import positions
from hsap.models import ModelConfig
from hsap.models.llama import initial
from hsap.models.tsp.decoder import ShardedLlama
from hsap.models.tsp.shards import WeightShards
from hsap.runtime.executor import Session
from hsap.runtime.groups import make_mesh, make_shard_groups
from hsap.runtime.sharded import ShardedAttention
from hsap.runtime.transport import Distributed
from hsap.runtime.weights import WeightTransport
from tests.models.packed_oracle import random_pack

SEED = 5


@dataclass(frozen=True)
class Case:
    """A model on a topology, weights sharded over `degree` neighbours; every SP group has a pack of its own."""

    topology: str
    degree: int
    packs: tuple[tuple[int, ...], ...]
    planner: str = "zigzag"
    model: dict = field(default_factory=dict)
    dtype: str = "fp64"

    @property
    def config(self) -> ModelConfig:
        shape = {"vocab_size": 37, "num_layers": 2, "hidden_dim": 24, "num_q_heads": 8, "num_kv_heads": 2}
        shape |= {"head_dim": 6, "ffn_dim": 21, "loss_chunk_tokens": 16}
        return ModelConfig(**(shape | self.model))

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Values for every parameter; biases and norms too are other than their initial ones."""
        drawn = initial(name.replace("norm", "nrm").replace("bias", "bs"), shape, self.config, SEED).double()
        return drawn * 10 + (1 if "norm" in name else 0)


class Counting(Distributed):
    """Counts what plans send."""

    sent = 0

    def launch(self, round, sends, receives) -> None:
        self.sent += sum(tensor.numel() * tensor.element_size() for _, tensor in sends)
        super().launch(round, sends, receives)


def plans_of(case: Case, pack: tuple[int, ...]) -> tuple[list[hsap.Plan], list[int]]:
    """A plan for each distinct share of the heads, and which of them each shard takes."""
    config = case.config
    shares = [run[1::2] for run in WeightShards(config, case.degree).heads]
    distinct = list(dict.fromkeys(shares))
    topology = hsap.Topology(hsap.Topology.parse(case.topology).num_ranks, 1)
    plans = [
        hsap.compile(
            hsap.Problem(
                hsap.Layout.from_lengths(pack),
                heads=hsap.HeadShape(*share, config.head_dim, case.dtype),
                topology=topology,
                masks=distinct_masks(config.layer_masks)[0],
            ),
            planner=case.planner,
        )
        for share in distinct
    ]
    return plans, [distinct.index(share) for share in shares]


def run_case(case: Case) -> dict:
    """Loss of this rank's rows, its gradients by name, and what it sent by kind; collective over the world."""
    mesh = make_mesh(hsap.Topology.parse(case.topology))
    shard_group, _ = make_shard_groups(case.degree)
    transport = WeightTransport(shard_group)
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[case.dtype]
    model = ShardedLlama(case.config, transport, case.weight, dtype)
    session = Session(mesh.sp, dtype=dtype)
    session.transport = Counting(mesh.sp)
    pack = case.packs[mesh.dp_rank]
    plans, variant_of = plans_of(case, pack)
    attention = ShardedAttention(session, variant_of, distinct_masks(case.config.layer_masks)[1])
    attention.load(plans)
    rows = positions(plans[0].rank_spans(mesh.sp_rank))
    tokens, places, targets = (x[rows] for x in random_pack(list(pack), case.config.vocab_size, seed=mesh.dp_rank))
    loss = model(tokens, places, attention, targets)
    (loss * 0.5).backward()
    sent = Counter(transport.sent_bytes, kv=session.transport.sent)
    with torch.no_grad():
        again = model(tokens, places, attention, targets, per_token=True)
    gradients = {name: parameter.grad * 2 for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), "per_token": again.sum(), "gradients": gradients, "sent": dict(sent)}


def run_cases(rank: int, cases: list[Case]) -> list[dict]:
    """All cases, one after the other, in one world."""
    results = []
    for case in cases:
        results.append(run_case(case))
        dist.barrier()
    return results
