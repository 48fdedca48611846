"""A model whose layers have different masks, planned and run, against the same model with dense attention per layer."""

import pytest
import torch
import torch.distributed as dist
from packed_oracle import random_pack, visible_attention

import hsap
from hsap.ir.mask import distinct_masks
from hsap.models import ModelConfig, build_model

LENGTHS = [23, 1, 40]
SHAPE = {
    "vocab_size": 61,
    "num_layers": 6,
    "hidden_dim": 24,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_dim": 40,
    "masks": ["window:5", "window:5", "causal", "chunked:7", "window:5", "causal"],
}
SEES = {
    "window:5": lambda q, k: (k <= q) & (k > q - 5),
    "causal": lambda q, k: k <= q,
    "chunked:7": lambda q, k: (k <= q) & (k // 7 == q // 7),
}


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_each_layer_attends_by_its_own_mask(world):
    config = ModelConfig(**SHAPE, init_std=0.3)
    model = build_model(config, seed=3, dtype=torch.float64)
    tokens, positions, targets = random_pack(LENGTHS, 61)
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def dense(q, k, v, layer):
        sees = SEES[SHAPE["masks"][layer]](positions[:, None], positions[None, :])
        return visible_attention(q, k, v, sees & (document[:, None] == document[None, :]))

    masks, layer_masks = distinct_masks(config.layer_masks)
    assert len(masks) == 3
    heads = hsap.HeadShape(4, 2, 8, "fp64")
    plan = hsap.compile(hsap.Problem(hsap.Layout.from_lengths(LENGTHS), heads, hsap.Topology(1, 1), masks))
    planned = hsap.PlannedAttention(layer_masks)
    planned.load(hsap.Session(dtype=torch.float64).load(plan))
    losses, gradients = [], []
    for attention in (planned, dense):
        model.zero_grad()
        loss = model(tokens, positions, attention, targets)
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    for got, want in zip(*gradients):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
