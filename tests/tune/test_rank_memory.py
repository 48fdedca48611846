"""Memory against sums by hand, and against what torch saves for backward."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hsap.ir.problem import Topology
from hsap.models import ModelConfig, build_model
from hsap.tune.memory import kept_copies, loss_bytes, rank_bytes, saved_bytes, state_bytes
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
    ("dtype", "zero", "weights", "gradients", "masters", "moments"),
    [
        ("bf16", 0, 2, 2, 4, 8),
        ("bf16", 1, 2, 6, 1, 2),
        ("bf16", 2, 2, 1, 1, 2),
        ("bf16", 3, 0.5, 1, 1, 2),
        ("fp32", 0, 4, 4, 0, 8),
        ("fp32", 1, 4, 4, 1, 2),
        ("fp32", 2, 4, 1, 1, 2),
        ("fp32", 3, 1, 1, 1, 2),
    ],
)
def test_states_on_four_ranks_by_hand(dtype, zero, weights, gradients, masters, moments) -> None:
    assert MODEL.num_params == PARAMS == sum(p.numel() for p in build_model(MODEL, 0).parameters())
    items = state_bytes(MODEL, setting(zero, dtype))
    assert list(items.values())[:4] == [PARAMS * each for each in (weights, gradients, masters, moments)]


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


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_activations_are_what_torch_saves(dtype, checkpointing) -> None:
    tokens, found = 37, []
    for layers in (1, 3):
        model = build_model(
            ModelConfig(**SHAPE | {"num_layers": layers, "checkpointing": checkpointing}), 0,
            {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype],
        )  # fmt: skip
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
    assert (found[1] - found[0]) / 2 / tokens == sum(saved_bytes(MODEL, dtype, checkpointing))


def test_replicated_kv_heads_are_kept_as_often_as_ranks_have_them() -> None:
    assert kept_copies(MODEL, setting(0, "bf16", topology="1x2")) == 1
    assert kept_copies(MODEL, setting(0, "bf16", topology="1x6")) == 3
    once, thrice = (saved_bytes(MODEL, "bf16", "selective", copies)[0] for copies in (1, 3))
    assert thrice - once == 2 * 2 * (2 * 2 * 8)


def test_loss_by_hand() -> None:
    # Gradients of 9 rows of 48 and of the head in fp32; logits, log-probabilities and their gradient of all 9 rows.
    assert loss_bytes(MODEL, "bf16", 9) == 4 * (9 * 48 + 50 * 48) + 9 * 50 * (2 + 4 + 2)
    assert loss_bytes(MODEL, "bf16", 5000) == 4 * (5000 * 48 + 50 * 48) + 1024 * 50 * 8


def test_items_add_up_and_grow_with_tokens() -> None:
    few, many = (rank_bytes(MODEL, setting(1, "bf16", "selective"), tokens, 5e6, 7e6) for tokens in (100, 300))
    assert few["communication arena"] == 5e6 and few["reserve"] == 7e6
    per_token = sum(saved_bytes(MODEL, "bf16", "selective")) * 2 + (8 + 4) * 48
    kept = ("activations", "attention's saved tensors")
    assert sum(many[k] for k in kept) - sum(few[k] for k in kept) == 200 * per_token
    assert sum(many.values()) > sum(few.values())
