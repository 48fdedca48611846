"""Memory against sums by hand, and against what torch saves for backward."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hsap.buckets import Buckets
from hsap.ir.problem import Topology
from hsap.models import ModelConfig, build_model
from hsap.tune.activations import loss_bytes, saved_bytes, working_bytes
from hsap.tune.memory import kept_copies, phases, rank_bytes, state_bytes
from hsap.tune.setting import Setting

SHAPE = {
    "vocab_size": 50, "num_layers": 2, "hidden_dim": 48, "num_q_heads": 6, "num_kv_heads": 2, "head_dim": 8,
    "ffn_dim": 80,
}  # fmt: skip
MODEL = ModelConfig(**SHAPE)
PARAMS = 2 * 50 * 48 + 2 * (48 * 48 + 2 * 48 * 16 + 48 * 48 + 3 * 48 * 80 + 2 * 48) + 48


def setting(zero: int, dtype: str, checkpointing: str = "none", topology: str = "2x1") -> Setting:
    return Setting(2, Topology.parse(topology), "sap", zero, checkpointing, 1, 1, dtype)


@pytest.mark.parametrize(
    ("dtype", "zero", "weights", "gradients", "masters", "moments", "at_the_update"),
    [
        ("bf16", 0, 2, 0, 4, 8, 6),
        ("bf16", 1, 2, 4, 1, 2, 7),
        ("bf16", 2, 2, 0, 1, 2, 1),
        ("bf16", 3, 0.5, 1, 1, 2, 2),
        ("fp32", 0, 4, 0, 0, 8, 4),
        ("fp32", 1, 4, 0, 1, 2, 2),
        ("fp32", 2, 4, 0, 1, 2, 2),
        ("fp32", 3, 1, 1, 1, 2, 2),
    ],
)
def test_states_on_four_ranks_by_hand(dtype, zero, weights, gradients, masters, moments, at_the_update) -> None:
    assert MODEL.num_params == PARAMS == sum(p.numel() for p in build_model(MODEL, 0).parameters())
    items = state_bytes(MODEL, setting(zero, dtype))
    assert list(items.values())[:4] == [PARAMS * each for each in (weights, gradients, masters, moments)]
    assert phases(MODEL, setting(zero, dtype), 10, 0, 0)["update"]["gradients"] == PARAMS * at_the_update


def test_buffers_are_those_that_deepspeed_is_told() -> None:
    told = Buckets.of(MODEL).settings()
    assert told["reduce_bucket_size"] == PARAMS, "a model smaller than a bucket is reduced at once"
    assert state_bytes(MODEL, setting(3, "bf16"))["ZeRO's buffers"] == 4 * told["reduce_bucket_size"]
    large = ModelConfig(32000, 32, 4096, 32, 32, 128, 11008)
    told = Buckets.of(large).settings()
    assert told["reduce_bucket_size"] == told["stage3_prefetch_bucket_size"] == large.layer_params == 202_383_360
    assert told["stage3_max_live_parameters"] == 2 * large.layer_params + 32000 * 4096
    loss, update = (phases(large, setting(3, "bf16"), 4096, 0, 0)[name] for name in ("loss", "update"))
    assert loss["ZeRO's buffers"] - update["ZeRO's buffers"] == 2 * told["stage3_max_live_parameters"]
    huge = ModelConfig(32000, 48, 12288, 96, 96, 128, 32768)
    assert Buckets.of(huge).reduced == 500_000_000 < huge.layer_params


class _Keeping(torch.autograd.Function):
    """Saves what the executor's attention does: q, stacked kv, o, and lse in float32."""

    @staticmethod
    def forward(ctx, q, k, v):
        o, kv = q.clone(), torch.stack((k, v), 1)
        ctx.save_for_backward(q, kv, o, torch.zeros(q.shape[:2]))
        return o

    @staticmethod
    def backward(ctx, do):
        return do, None, None


@pytest.mark.parametrize(
    ("checkpointing", "more"),
    [("none", {}), ("selective", {}), ("none", {"qk_norm": True}), ("none", {"mlp_chunk_tokens": 10})],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_activations_are_what_torch_saves(dtype, checkpointing, more) -> None:
    tokens, found, one = 37, [], replace(MODEL, checkpointing=checkpointing, **more)
    for layers in (1, 3):
        kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        model = build_model(replace(one, num_layers=layers), 0, kind)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved, alive = {}, []

        def keep(tensor, weights=weights, saved=saved, alive=alive):
            storage = tensor.untyped_storage()
            alive.append(tensor)  # or its place is taken by the next one
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        ids = torch.arange(tokens)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            model(ids, ids, lambda q, k, v, _: _Keeping.apply(q, k, v), ids)
        found.append(sum(saved.values()))
    assert (found[1] - found[0]) / 2 / tokens == sum(saved_bytes(one, dtype, checkpointing))


def test_replicated_kv_heads_are_kept_as_often_as_ranks_have_them() -> None:
    assert kept_copies(MODEL, setting(0, "bf16", topology="1x2")) == 1
    assert kept_copies(MODEL, setting(0, "bf16", topology="1x6")) == 3
    once, thrice = (saved_bytes(MODEL, "bf16", "selective", copies)[0] for copies in (1, 3))
    assert thrice - once == 2 * 2 * (2 * 2 * 8)


def test_loss_by_hand() -> None:
    # Gradients of 9 rows of 48 and of the head in fp32; and logits and log-probabilities of 9 rows.
    assert loss_bytes(MODEL, "fp32", 9) == 4 * (9 * 48 + 50 * 48) + 9 * 50 * (4 + 4)
    # In bf16 what is added to the head's gradient, twice, beside the log-probabilities and their gradient is more.
    assert loss_bytes(MODEL, "bf16", 9) == 4 * (9 * 48 + 50 * 48) + 9 * 50 * (4 + 2) + 50 * 48 * (4 + 2)
    # Of 1,024 rows at once, beside what is left of those before.
    assert loss_bytes(MODEL, "bf16", 5000) == 4 * (5000 * 48 + 50 * 48) + 1024 * 50 * (2 + 4 + 4 + 4 + 2)
    assert loss_bytes(MODEL, "fp32", 5000) == 4 * (5000 * 48 + 50 * 48) + 1024 * 50 * (4 + 4 + 4)


def test_chunks_bound_what_is_wide() -> None:
    chunked = replace(MODEL, loss_chunk_vocab=10, mlp_chunk_tokens=16)
    assert loss_bytes(chunked, "fp32", 900) == 4 * (900 * 48 + 50 * 48) + 900 * 10 * (4 + 4 + 4)
    assert working_bytes(MODEL, "fp32", "none", 5000) - working_bytes(MODEL, "fp32", "none", 4000) > 1000 * 2 * 4 * 80
    wide = working_bytes(chunked, "fp32", "none", 5000) - working_bytes(chunked, "fp32", "none", 4000)
    assert wide == 1000 * 5 * 4 * 48, "a norm's, whatever the feed-forward's width"


def test_items_add_up_and_grow_with_tokens() -> None:
    few, many = (phases(MODEL, setting(1, "bf16", "full"), tokens, 5e6, 7e6)["loss"] for tokens in (100, 300))
    assert few["communication arena"] == 5e6 and few["reserve"] == 7e6
    kept = ("activations", "attention's saved tensors")
    assert sum(many[k] for k in kept) - sum(few[k] for k in kept) == 200 * sum(saved_bytes(MODEL, "bf16", "full")) * 2
    assert sum(many.values()) > sum(few.values())


def test_the_phase_that_needs_most_is_the_rank_s() -> None:
    for tokens, phase in ((1, "reduction"), (100_000, "backward of a layer")):
        each = phases(MODEL, setting(0, "bf16"), tokens, 0, 0)
        assert rank_bytes(MODEL, setting(0, "bf16"), tokens, 0, 0) == each[phase]
        assert sum(each[phase].values()) == max(sum(items.values()) for items in each.values())
