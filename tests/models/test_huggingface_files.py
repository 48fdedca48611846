"""Folders in Hugging Face's form that are as they should be, and folders that aren't; needs no transformers."""

import json
import shutil

import pytest
import torch
from packed_oracle import layer_attention, random_pack
from safetensors.torch import load_file, save_file

from hsap.models import ModelConfig, build_model
from hsap.models.huggingface import configured, load, read_config, save, write
from hsap.models.huggingface.reading import model_config
from hsap.models.huggingface.writing import config_json

SMALL = ModelConfig(61, 3, 24, 4, 2, 6, 40, tied_embeddings=False, rope_scaling="llama3:8,1,4,64")


@pytest.fixture
def folder(tmp_path):
    """A small model in several files."""
    save(build_model(SMALL, seed=1), tmp_path / "model", max_positions=128, shard_bytes=12000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    return tmp_path / "model"


def change(path, **values):
    fields = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in fields.items() if value != "gone"}))


def retouch(folder, name, function):
    """Change one tensor where it lies; function gives None to take it out."""
    home = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(folder / home)
    tensors[name] = function(tensors[name])
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / home)


def test_the_round_trip_keeps_every_bit(folder, tmp_path):
    before, model = build_model(SMALL, seed=1), load(folder)
    assert model.config == SMALL
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name])
    save(model, tmp_path / "one", max_positions=128)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    assert tensors.keys() == dict(before.named_parameters()).keys()
    assert all(torch.equal(tensors[name], parameter) for name, parameter in before.named_parameters())


def test_tied_weights_are_one_parameter_and_one_tensor(tmp_path):
    config = ModelConfig(61, 2, 24, 4, 2, 6, 40, tied_embeddings=True)
    save(build_model(config, seed=1), tmp_path / "tied", max_positions=128)
    model = load(tmp_path / "tied", torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.dtype == torch.bfloat16
    path = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(path)
    assert "lm_head.weight" not in tensors
    # Some folders hold it all the same: it must be the embedding.
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    load(tmp_path / "tied")
    for other in (tensors["model.embed_tokens.weight"] + 1, tensors["model.embed_tokens.weight"].half()):
        save_file(tensors | {"lm_head.weight": other}, path)
        with pytest.raises(ValueError, match=r"lm_head\.weight .*tie_word_embeddings"):
            load(tmp_path / "tied")


def test_numbers_that_a_narrower_type_can_t_hold_are_refused(tmp_path):
    """Half precision ends at 65,504; an infinite weight would make every logit none."""
    model = build_model(SMALL, seed=1)
    with torch.no_grad():
        model.model.norm.weight[3] = -65519  # rounded to the last number that there is
        save(model, tmp_path / "near", dtype=torch.float16, max_positions=8)
        assert load(tmp_path / "near").model.norm.weight[3] == -65504
        model.model.norm.weight[3] = -65520
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds 65520, and float16 ends at 65504"):
        save(model, tmp_path / "far", dtype=torch.float16, max_positions=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["near"]
    save(model, tmp_path / "far", dtype=torch.bfloat16, max_positions=8)


def test_frequencies_that_old_files_hold_are_no_weights(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({name: torch.ones(3)}, folder / "extra.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = "extra.safetensors"
    path.write_text(json.dumps(index))
    load(folder)


def test_tensors_are_read_one_at_a_time(tmp_path):
    """Never is there a second copy of the model: one tensor of the files is alive when the next is asked for."""
    import gc
    import weakref

    config, alive, most = ModelConfig(61, 6, 24, 4, 2, 6, 40), [], 0
    model = dict(build_model(config, seed=0).named_parameters())

    def parameter(name):
        nonlocal most
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
        tensor = model[name].detach().clone()
        alive.append(weakref.ref(tensor))
        return tensor

    write(tmp_path / "out", config, parameter, torch.bfloat16, max_positions=8, shard_bytes=10**6)
    assert len(alive) == len(model) and most <= 1


@pytest.mark.parametrize(
    ("name", "function", "told"),
    [
        ("model.norm.weight", lambda t: None, r"lacks model\.norm\.weight|says that .* holds model\.norm\.weight"),
        ("model.norm.weight", lambda t: t[:-1], r"model\.norm\.weight in .* has the shape \(23,\).* \(24,\)"),
        ("lm_head.weight", lambda t: t.t().contiguous(), r"lm_head\.weight in .* shape \(24, 61\).* \(61, 24\)"),
        ("lm_head.weight", lambda t: t.to(torch.int8), r"lm_head\.weight in .* type I8"),
    ],
)
def test_a_wrong_tensor_is_named(folder, name, function, told):
    retouch(folder, name, function)
    with pytest.raises(ValueError, match=told):
        load(folder)


def test_missing_and_unexpected_tensors_are_listed(folder):
    change(folder / "config.json", num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"has also model\.layers\.2\..* and 4 more; copy"):
        load(folder)
    change(folder / "config.json", num_hidden_layers=10**9)
    with pytest.raises(ValueError, match=r"num_hidden_layers 1000000000, and the files there hold 30 tensors"):
        load(folder)
    change(folder / "config.json", num_hidden_layers=4, attention_bias=True)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.self_attn\.q_proj\.bias, .* and 20 more; copy"):
        load(folder)
    change(folder / "config.json", num_hidden_layers=3, attention_bias=False, model_type="qwen3", architectures=None)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(folder)


@pytest.mark.parametrize("cut", [3, 100, -1])
def test_a_file_cut_short_is_named(folder, cut):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=f"{path.name} isn't a whole safetensors file"):
        load(folder)


def test_a_file_that_is_missing_is_named(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(ValueError, match=f"{path.name} is missing"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["../model/x.safetensors", "/etc/passwd", "..", "a/b.safetensors", "a\\b", "", 3, None]
)
def test_the_index_leads_nowhere_else(folder, name):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is in .*no name of a file"):
        load(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{"])
def test_an_index_that_is_none(folder, content):
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load(folder)


def test_a_tensor_in_two_files(folder):
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    with pytest.raises(ValueError, match="take it out of one of them"):
        load(folder)


def test_pickles_are_not_read(folder):
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle"):
        load(folder)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match=r"config\.json isn't there"):
        load(folder)


REFUSED = {
    "hidden_act": "gelu",
    "mlp_bias": True,
    "attention_dropout": 0.1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 0,
    "rope_interleaved": True,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "attention_sinks": True,
    "num_experts": 8,
    "num_local_experts": 8,
    "quantization_config": {"quant_method": "gptq"},
    "no_rope_layers": [1, 0],
    "residual_multiplier": 0.2,
    "sliding_window": 4096,
    "auto_map": {"AutoModelForCausalLM": "modeling.Mine"},
    "architectures": ["LlamaForSequenceClassification"],
    "model_type": "gemma2",
    "vocab_size": "gone",
    "head_dim": 5.5,
    "num_key_value_heads": 3,
    "tie_word_embeddings": "yes",
    "rope_theta": None,
    "something_new": 1,
    "hidden_size": 10**30,
    "layer_types": [["full_attention"]],
    "initializer_range": 10**400,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_implemented_is_refused_by_its_name(folder, name):
    change(folder / "config.json", **{name: REFUSED[name]})
    ours = {"num_key_value_heads": "num_kv_heads"}.get(name, name)
    with pytest.raises(ValueError, match=ours):
        read_config(folder)


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type"),
        ({"type": "dynamic", "factor": 4.0}, "rope_type"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "rope_type"),
        ({"rope_type": ["linear"]}, "rope_type"),
        ({"rope_type": "linear", "factor": 10**400}, "factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1}, "factor"),
        ({"factor": 2.0}, "rope_type"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "original_max"),
        ({"rope_type": "linear", "factor": 2.0, "attention_factor": 1.1}, "attention_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "rope_scaling"),
        ({"rope_type": "linear", "type": "llama3", "factor": 2.0}, "rope_type"),
        ("linear", "rope_scaling"),
    ],
)
def test_rope_that_is_not_implemented_is_refused(folder, rope, told):
    change(folder / "config.json", rope_scaling=rope)
    with pytest.raises(ValueError, match=told):
        read_config(folder)


def test_rope_in_every_spelling():
    fields = config_json(SMALL, "float32", 128)
    text = "linear:4"
    for rope in (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4}},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ):
        assert model_config(fields | rope, "here").rope_scaling == text
        assert model_config(fields | rope, "here").rope_base == 10000.0
    both = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling"):
        model_config(fields | both, "here")


def test_fields_that_are_missing_mean_what_the_family_says():
    fields = {
        "vocab_size": 32,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_attention_heads": 4,
    }
    llama = model_config(fields | {"model_type": "llama"}, "here")
    assert (llama.num_kv_heads, llama.head_dim, llama.norm_eps, llama.rope_base) == (4, 8, 1e-6, 10000.0)
    assert (llama.tied_embeddings, llama.masks, llama.attention_bias) == (False, "causal", "none")
    fields["num_key_value_heads"] = 2
    assert model_config(fields | {"model_type": "mistral"}, "here").masks == "window:4096"
    assert model_config(fields | {"model_type": "mistral", "sliding_window": None}, "here").masks == "causal"
    qwen2 = model_config(fields | {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}, "here")
    assert (qwen2.masks, qwen2.attention_bias) == ("causal", "qkv")
    windows = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    qwen3 = model_config(fields | windows, "here")
    assert (qwen3.masks, qwen3.head_dim, qwen3.qk_norm) == ("causal*2+window:9*2", 128, True)
    types = ["sliding_attention", "full_attention"] * 2
    assert model_config(fields | windows | {"layer_types": types}, "here").masks == "window:9+causal"
    for bad in ({"layer_types": types[:3]}, {"layer_types": ["chunked_attention"] * 4}, {"max_window_layers": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            model_config(fields | windows | bad, "here")
    with pytest.raises(ValueError, match="use_sliding_window"):
        model_config(fields | windows | {"layer_types": types, "use_sliding_window": False}, "here")
    with pytest.raises(ValueError, match="num_key_value_heads"):
        model_config({key: fields[key] for key in fields if key != "num_key_value_heads"} | windows, "here")


@pytest.mark.parametrize(
    ("change", "family"),
    [
        ({}, "llama"),
        ({"attention_bias": "all"}, "llama"),
        ({"masks": "window:9"}, "mistral"),
        ({"attention_bias": "qkv"}, "qwen2"),
        ({"attention_bias": "qkv", "masks": "window:9*2+causal"}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"qk_norm": True, "attention_bias": "all", "masks": "causal+window:9*2"}, "qwen3"),
        ({"masks": "window:9*2+causal"}, None),
        ({"masks": "window:9*2+window:8"}, None),
        ({"masks": "lambda:2,9"}, None),
        ({"qk_norm": True, "attention_bias": "qkv"}, None),
    ],
)
def test_every_model_finds_the_family_that_has_it(change, family):
    config = ModelConfig(61, 3, 24, 4, 2, 6, 40, **change)
    if family is None:
        with pytest.raises(ValueError, match=r"model\.masks|model\.qk_norm"):
            config_json(config, "float32", 128)
        return
    fields = config_json(config, "float32", 128)
    assert fields["model_type"] == family and model_config(fields, "here") == config


def test_notes_of_the_folder_it_came_from_stay():
    like = {"model_type": "mistral", "sliding_window": 5, "eos_token_id": 7, "max_position_embeddings": 99}
    config = ModelConfig(61, 3, 24, 4, 2, 6, 40)
    fields = config_json(config, "bfloat16", like=like)
    assert (fields["model_type"], fields["sliding_window"], fields["eos_token_id"]) == ("mistral", None, 7)
    assert fields["max_position_embeddings"] == 99 and fields["torch_dtype"] == "bfloat16"
    assert config_json(config, "bfloat16", 120, like)["max_position_embeddings"] == 120
    with pytest.raises(ValueError, match="max_positions"):
        config_json(config, "bfloat16")


def test_a_folder_is_never_written_over_or_left_half(folder, tmp_path):
    with pytest.raises(ValueError, match="isn't an empty folder"):
        save(load(folder), folder, max_positions=128)
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "half", SMALL, lambda name: 1 / 0, torch.float32, max_positions=128)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    (tmp_path / "empty").mkdir()
    save(load(folder), tmp_path / "empty", max_positions=128)
    assert load(tmp_path / "empty").config == SMALL


def test_a_group_that_names_a_folder(folder):
    config, told = configured({"from": str(folder), "checkpointing": "selective"}, 50)
    assert config.checkpointing == "selective" and config.num_layers == 3 and told == ()
    asked = {"from": str(folder), "masks": "window:9", "rope_scaling": "none", "num_layers": 3, "vocab_size": None}
    config, told = configured(asked, 61)
    assert (config.masks, config.rope_scaling) == ("window:9", "none")
    assert [line.split()[0] for line in told] == ["model.masks=window:9", "model.rope_scaling=none"]
    assert "llama3:8,1,4,64" in told[1] and str(folder) in told[1]
    # What is asked for and not the folder's is computed: a window really hides something.
    tokens, positions, targets = random_pack([30], 61)
    wide, narrow = load(folder), load(folder, config=config)
    losses = [model(tokens, positions, layer_attention(model.config, [30]), targets) for model in (wide, narrow)]
    assert losses[0].item() != losses[1].item()
    for asked, told in (
        ({"num_layers": 4}, r"model\.num_layers=4, but 3 in"),
        ({"tied_embeddings": True}, r"model\.tied_embeddings"),
        ({"from": 3}, r"model\.from"),
        ({"heads": 3}, r"model\.heads: no such key"),
        ({"from": str(folder / "no")}, r"config\.json isn't there"),
    ):
        with pytest.raises(ValueError, match=told):
            configured({"from": str(folder)} | asked, 61)
    with pytest.raises(ValueError, match="tokenizer has 62 ids"):
        configured({"from": str(folder)}, 62)
