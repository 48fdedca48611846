"""Memory under TSP by the model: parameters are the decoder's own, and sums by hand."""

import math
from types import SimpleNamespace

import pytest
import torch

from hsap.ir.problem import Topology
from hsap.models import ModelConfig
from hsap.models.tsp.decoder import ShardedLlama
from hsap.tune.setting import Setting
from tests.bench.tsp_memory import largest_shard, shard_params, tp_bytes, tsp_bytes, tsp_phases

SHAPE = {"vocab_size": 103, "num_layers": 3, "hidden_dim": 24, "num_q_heads": 9, "num_kv_heads": 3, "head_dim": 6,
         "ffn_dim": 43}  # fmt: skip
MORE = ({}, {"attention_bias": "all", "qk_norm": True}, {"attention_bias": "qkv", "tied_embeddings": True})


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("degree", [2, 4, 9])
def test_parameters_are_the_decoder_s(more: dict, degree: int) -> None:
    config = ModelConfig(**SHAPE, **more)
    counts = []
    for index in range(degree):
        transport = SimpleNamespace(index=index, degree=degree)
        shard = ShardedLlama(config, transport, lambda name, shape: torch.empty(shape, device="meta"), device="meta")
        counts.append(sum(parameter.numel() for parameter in shard.parameters()))
    assert counts == [shard_params(config, degree, index)["all"] for index in range(degree)]


@pytest.mark.parametrize(
    ("dtype", "stage", "kept_bytes", "gradient_bytes"), [("bf16", 1, 14, 6), ("fp32", 1, 16, 8), ("fp32", 0, 12, 4)]
)
def test_states_by_hand(dtype: str, stage: int, kept_bytes: int, gradient_bytes: int) -> None:
    """At the update, where nothing of a micro-step is left; every shard is on one rank."""
    config = ModelConfig(**SHAPE)
    setting = Setting(1, Topology(4, 1), "zigzag", stage, "none", 1, 1, dtype)
    params = largest_shard(config, 4)["all"]
    update = tsp_phases(config, setting, 4, 0, 0.0)["update"]
    kept = {name: value for name, value in update.items() if name != "gradients"}
    assert update["gradients"] == gradient_bytes * params
    assert sum(kept.values()) == kept_bytes * params


def test_less_than_tensor_parallelism_at_length() -> None:
    config = ModelConfig(**SHAPE)
    setting = Setting(1, Topology(3, 1), "zigzag", 1, "none", 1, 1)
    for tokens in (3_000, 30_000):
        tsp, tp = tsp_bytes(config, setting, 3, tokens // 3, 0.0), tp_bytes(config, setting, 3, tokens)
        assert sum(tsp.values()) < sum(tp.values())
        # The residual stream is whole on every rank of the one, and shared by the other.
        assert math.isclose(tp["activations"], 3 * tsp["activations"])
        assert math.isclose(tp["attention's saved tensors"], tsp["attention's saved tensors"])
