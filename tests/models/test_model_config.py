"""Model configs: closed forms against the module and a FLOP counter, and what bad fields get."""

from pathlib import Path

import pytest
import torch
import yaml
from packed_oracle import random_pack, visible_attention
from torch.utils.flop_counter import FlopCounterMode

from hsap.ir.mask import Mask, distinct_masks
from hsap.models import Llama, ModelConfig, build_model

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
SMALL = {
    "vocab_size": 61,
    "num_layers": 2,
    "hidden_dim": 24,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 10,
    "ffn_dim": 40,
}
PUBLISHED = {"smollm2-135m": 134_515_008, "llama2-7b": 6_738_415_616}


def load(name):
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m", "llama2-7b", "gpt-30b"])
def test_config_files(name):
    config = ModelConfig.from_mapping(load(name), 32000)
    with torch.device("meta"):
        model = Llama(config)
    assert config.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert config.num_params == PUBLISHED.get(name, config.num_params)
    comment = (CONFIGS / f"{name}.yaml").read_text().split("vocab_size")[0]
    assert f"{config.num_params:,}" in comment or name == "tiny"


def test_gpt_30b_is_about_thirty_billion():
    assert ModelConfig.from_mapping(load("gpt-30b")).num_params == pytest.approx(30e9, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_flops_per_token_equal_a_counter(tied, checkpointing):
    config = ModelConfig(**SMALL, tied_embeddings=tied, checkpointing=checkpointing, loss_chunk_tokens=5)
    model = build_model(config, seed=0, dtype=torch.bfloat16)
    tokens, positions, targets = random_pack([9, 4], 61)
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens, positions, lambda q, k, v, layer: q + (k + v).repeat_interleave(2, dim=1), targets)
        forward = counter.get_total_flops()
        loss.backward()
    # Forward makes the head's gradients too, so the split differs from the usual third; the sum doesn't.
    head = 2 * 61 * 24
    assert forward == 13 * (config.flops_per_token // 3 + 2 * head)
    if checkpointing == "none":
        assert counter.get_total_flops() == 13 * config.flops_per_token
    else:
        assert counter.get_total_flops() > 13 * config.flops_per_token


def test_attention_flops_equal_a_counter():
    config = ModelConfig(**SMALL)
    q, k, v = torch.randn(13, 4, 10), torch.randn(13, 2, 10), torch.randn(13, 2, 10)
    with FlopCounterMode(display=False) as counter:
        visible_attention(q, k, v, torch.ones(13, 13, dtype=torch.bool))
    assert counter.get_total_flops() == config.attention_forward_flops(13 * 13)
    assert config.attention_backward_flops(169) == 2.5 * config.attention_forward_flops(169)
    assert config.train_flops(13, 91) == 13 * config.flops_per_token + 2 * 14 * 91 * 40


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": 2.0}, "num_layers"),
        ({"hidden_dim": True}, "hidden_dim"),
        ({"head_dim": 9}, "head_dim"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"norm_eps": "1e-5"}, "norm_eps"),
        ({"rope_base": float("inf")}, "rope_base"),
        ({"init_std": 0.0}, "init_std"),
        ({"tied_embeddings": 1}, "tied_embeddings"),
        ({"checkpointing": "some"}, "checkpointing"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"loss_chunk_tokens": 0}, "loss_chunk_tokens"),
        ({"masks": "widow:4"}, "masks"),
        ({"masks": ["window:4", 3]}, "masks"),
        ({"masks": None}, "masks"),
        ({"masks": []}, "masks"),
        ({"masks": "window:4*2+causal", "num_layers": 2}, "masks"),
        ({"masks": "causal*4", "num_layers": 6}, "masks"),
    ],
)
def test_bad_field_is_named(change, field):
    with pytest.raises(ValueError, match=rf"model\.{field}\b"):
        ModelConfig(**(SMALL | change))


def test_vocabulary_from_the_tokenizer():
    mapping = SMALL | {"vocab_size": None}
    assert ModelConfig.from_mapping(mapping, 77).vocab_size == 77
    assert ModelConfig.from_mapping(SMALL, 50).vocab_size == 61
    with pytest.raises(ValueError, match="no tokenizer"):
        ModelConfig.from_mapping(mapping)
    with pytest.raises(ValueError, match="tokenizer has 62 ids"):
        ModelConfig.from_mapping(SMALL, 62)


def test_unknown_and_missing_keys():
    with pytest.raises(ValueError, match=r"model\.num_heads: no such key; .* Did you mean"):
        ModelConfig.from_mapping(SMALL | {"num_heads": 4})
    with pytest.raises(ValueError, match=r"model\.ffn_dim is missing"):
        ModelConfig.from_mapping({key: value for key, value in SMALL.items() if key != "ffn_dim"})


def test_masks_of_every_layer_or_a_pattern():
    window, causal = Mask("window", (64,)), Mask()
    assert ModelConfig(**SMALL).layer_masks == (causal, causal)
    same = [["window:64", "window:64", "causal"] * 2, "window:64*2+causal", ["window:64*2", "causal"]]
    configs = {ModelConfig(**SMALL | {"num_layers": 6, "masks": masks}) for masks in same}
    assert len(configs) == 1
    (config,) = configs
    assert config.masks == "window:64*2+causal"
    assert config.layer_masks == (window, window, causal, window, window, causal)
    assert ModelConfig(**SMALL | {"num_layers": 6, "masks": config.masks}) == config
    pairs, index = distinct_masks(config.layer_masks)
    assert pairs == ((window, 4), (causal, 2)) and index == (0, 0, 1, 0, 0, 1)
