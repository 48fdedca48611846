"""Models of Hugging Face's library beside ours: logits, gradients, and files that each writes for the other."""

import json
import os

import pytest
import torch
from packed_oracle import layer_attention, packed_positions
from safetensors.torch import load_file

from hsap.models.huggingface import load, read_config, save
from hsap.models.scaling import RopeScaling

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip(
    "transformers", reason="compared with Hugging Face's transformers, not installed here"
)

TOKENS = 41
SIZES = {"vocab_size": 61, "intermediate_size": 28, "num_hidden_layers": 4, "initializer_range": 0.15}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
CASES = {
    "llama2": ("Llama", 32, 4, 4, {"rms_norm_eps": 1e-5}),
    "llama3": ("Llama", 32, 4, 2, {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama_linear": ("Llama", 32, 4, 2, {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama_biases": ("Llama", 32, 4, 2, {"attention_bias": True, "head_dim": 6}),
    "smollm2": ("Llama", 36, 9, 3, {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e5}}),
    "mistral": ("Mistral", 32, 4, 2, {"sliding_window": 7}),
    "mistral_causal": ("Mistral", 32, 4, 2, {"sliding_window": None, "head_dim": 10}),
    "qwen2": ("Qwen2", 56, 28, 4, {"rope_parameters": {"rope_theta": 1e6}}),
    "qwen2_windows": ("Qwen2", 56, 28, 4, {**WINDOWS, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", 32, 4, 2, {"head_dim": 12, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3_windows": ("Qwen3", 32, 4, 2, {"head_dim": 8, "attention_bias": True, **WINDOWS}),
}


def theirs(case, seed=0):
    """One of transformers' models with weights that are all drawn, norms and biases too."""
    family, hidden, q_heads, kv_heads, more = CASES[case]
    options = SIZES | {"hidden_size": hidden, "num_attention_heads": q_heads, "num_key_value_heads": kv_heads} | more
    config = getattr(transformers, f"{family}Config")(**options, attn_implementation="eager")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def tokens(seed=0):
    return torch.randint(0, 61, (TOKENS,), generator=torch.Generator().manual_seed(seed))


def assert_same(ours, theirs):
    """Logits to 1e-5 of their size, and every gradient to 1e-5 of its norm."""
    ids = tokens()
    targets = torch.cat([ids[1:], torch.tensor([-100])])
    attention = layer_attention(ours.config, [TOKENS])
    expected = theirs(ids[None]).logits[0]
    logits = ours(ids, packed_positions([TOKENS]), attention)
    assert (logits - expected).abs().max().item() <= 1e-5 * max(expected.abs().max().item(), 1)
    theirs(ids[None], labels=ids[None]).loss.backward()
    (ours(ids, packed_positions([TOKENS]), attention, targets) / (TOKENS - 1)).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
        assert error.item() <= 1e-5, name
    assert gradients.keys() == {name for name, _ in ours.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_theirs_computes_the_same_here(case, tmp_path):
    model = theirs(case)
    model.save_pretrained(tmp_path / "theirs")
    assert_same(load(tmp_path / "theirs"), model)


@pytest.mark.parametrize("case", CASES)
def test_a_model_saved_here_computes_the_same_there(case, tmp_path):
    theirs(case).save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    # In one file and in many, told of the first folder and not.
    save(ours, tmp_path / "ours", max_positions=64)
    save(ours, tmp_path / "again", like=read_config(tmp_path / "theirs")[1], shard_bytes=9000)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 2
    for name in ("ours", "again"):
        loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(told.values()), told
        assert read_config(tmp_path / name)[0] == ours.config
        ours.zero_grad()
        assert_same(ours, loaded)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == loaded.config.model_type
    assert loaded.config.model_type == theirs(case).config.model_type


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["smollm2", "qwen2", "qwen3_windows"])
def test_the_round_trip_keeps_every_bit(case, dtype, tmp_path):
    theirs(case).to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size="9KB")
    before = {}
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        before |= load_file(file)
    # By way of float32, which holds what the narrower types hold.
    model = load(tmp_path / "theirs")
    save(model, tmp_path / "ours", dtype=dtype, like=read_config(tmp_path / "theirs")[1])
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype == dtype and torch.equal(after[name], tensor), name


def test_scaled_rope_of_the_real_llama_3():
    parameters = {**LLAMA3, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=parameters)
    expected, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    from hsap.models.rope import rope_tables

    cos, sin = rope_tables(torch.tensor([1]), 128, 500000.0, torch.float64, RopeScaling.parse("llama3:8,1,4,8192"))
    torch.testing.assert_close(torch.atan2(sin, cos)[0, 0], expected.double(), rtol=1e-6, atol=0)
