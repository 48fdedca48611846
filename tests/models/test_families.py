"""What the families add to the decoder: biases, normed queries and keys, scaled rope, windows, against float64."""

import math
from types import SimpleNamespace

import pytest
import torch
from packed_oracle import layer_attention, oracle_frequency, oracle_logits, oracle_loss_sum, random_pack

from hsap.models import ModelConfig, build_model
from hsap.models.rope import rope_tables
from hsap.models.scaling import RopeScaling

BASE = {"vocab_size": 61, "hidden_dim": 20, "ffn_dim": 28, "init_std": 0.3, "loss_chunk_tokens": 8}
LLAMA3 = "llama3:8,1,4,40"
FAMILIES = {
    "llama3": {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 6, "rope_scaling": LLAMA3},
    "linear": {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 4, "head_dim": 4, "rope_scaling": "linear:2.5"},
    "biases": {"num_layers": 2, "num_q_heads": 3, "num_kv_heads": 1, "head_dim": 4, "attention_bias": "all"},
    "mistral": {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "masks": "window:5"},
    "qwen2": {
        "num_layers": 3,
        "num_q_heads": 28,
        "num_kv_heads": 4,
        "head_dim": 2,
        "attention_bias": "qkv",
        "masks": ["causal", "causal", "window:7"],
        "tied_embeddings": True,
    },
    "qwen3": {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "qk_norm": True},
    "smollm2": {"num_layers": 2, "num_q_heads": 9, "num_kv_heads": 3, "head_dim": 4, "tied_embeddings": True},
}
LENGTHS = [1, 13, 1, 29]


def family_config(name, **change):
    return ModelConfig(**BASE | FAMILIES[name] | change)


def shaken(model):
    """Give norms and biases values of their own, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "bias")):
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


@pytest.mark.parametrize("checkpointing", ["none", "selective"])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_oracle(name, checkpointing):
    config = family_config(name, checkpointing=checkpointing)
    model = shaken(build_model(config, seed=1, dtype=torch.float64))
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    tokens, positions, targets = random_pack(LENGTHS, 61)
    expected_logits = oracle_logits(config, weights, tokens, LENGTHS)
    expected_loss = oracle_loss_sum(expected_logits, targets)
    expected_loss.backward()

    attention = layer_attention(config, LENGTHS)
    torch.testing.assert_close(model(tokens, positions, attention), expected_logits, rtol=1e-10, atol=1e-10)
    loss = model(tokens, positions, attention, targets)
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_counted(name):
    config = family_config(name)
    assert config.num_params == sum(p.numel() for p in build_model(config, seed=0).parameters())


@pytest.mark.parametrize("name", ["biases", "qwen3"])
def test_a_rank_without_rows_gives_zero_gradients(name):
    model, empty = build_model(family_config(name), seed=0), torch.zeros(0, dtype=torch.long)
    model(empty, empty, lambda q, k, v, layer: q * 1 + 0 * (k.sum() + v.sum()), empty).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_biases_begin_at_zero_and_norms_at_one():
    parameters = dict(build_model(family_config("qwen3", attention_bias="all"), seed=3).named_parameters())
    fixed = {name: p for name, p in parameters.items() if name.endswith(("norm.weight", "bias"))}
    assert len(fixed) == 2 * (4 + 4) + 1
    for name, parameter in fixed.items():
        assert (parameter == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize("text", ["none", "linear:4", "llama3:8,1,4,8192", "llama3:32,1.5,4,8192"])
def test_scaled_frequencies(text):
    scaling = RopeScaling.parse(text)
    assert str(scaling) == text and RopeScaling.parse(str(scaling)) == scaling
    positions = torch.tensor([1, 2])
    cos, sin = rope_tables(positions, 128, 500000.0, torch.float64, scaling)
    frequencies = torch.atan2(sin[0, 0], cos[0, 0])
    config = SimpleNamespace(rope_scaling=text)
    expected = [oracle_frequency(config, 500000.0 ** (-i / 64)) for i in range(64)]
    torch.testing.assert_close(frequencies, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    kept = sum(math.isclose(e, 500000.0 ** (-i / 64)) for i, e in enumerate(expected))
    assert kept == 64 if text == "none" else kept == 0 if text.startswith("linear") else 20 < kept < 40


@pytest.mark.parametrize(
    "text", ["", "yarn:4", "linear", "linear:0", "linear:x", "linear:inf", "llama3:8,1,4", "llama3:8,4,1,8192"]
)
def test_bad_scaling_is_named(text):
    with pytest.raises(ValueError, match=r"model\.rope_scaling"):
        family_config("qwen3", rope_scaling=text)


def test_one_scaling_has_one_text():
    assert family_config("qwen3", rope_scaling="linear:4.0") == family_config("qwen3", rope_scaling="linear:4")
