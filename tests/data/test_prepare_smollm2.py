"""The GGUF reader of datasets/prepare_smollm2.py on a small file that is written here, number by number."""

import importlib.util
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hsap.models.huggingface.tensors import shapes

SCRIPT = Path(__file__).parents[2] / "datasets" / "prepare_smollm2.py"
SPEC = importlib.util.spec_from_file_location("prepare_smollm2", SCRIPT)
HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 40, 4, 2, 8
KEYS = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "llama.block_count": 1,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.vocab_size": VOCAB,
    "llama.rope.freq_base": 1e5,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
MATRICES = {
    "token_embd": (VOCAB, HIDDEN),
    "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_gate": (FFN, HIDDEN),
    "blk.0.ffn_up": (FFN, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, FFN),
}
NORMS = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")


@pytest.fixture(scope="module")
def script():
    module = importlib.util.module_from_spec(SPEC)
    sys.modules["prepare_smollm2"] = module
    SPEC.loader.exec_module(module)
    return module


def packed(shape, kind, random):
    """Bytes of a tensor of blocks, and the numbers they stand for."""
    stored, numbers = b"", []
    for _ in range(shape[0] * shape[1] // 32):
        scale, least = (float(np.float16(random.normal())) for _ in range(2))
        if kind == 8:
            values = random.integers(-127, 128, 32).tolist()
            stored += struct.pack("<e32b", scale, *values)
            numbers += [np.float32(scale) * value for value in values]
        else:
            values = random.integers(0, 16, 32).tolist()
            pairs = [low + 16 * high for low, high in zip(values[:16], values[16:])]
            stored += struct.pack("<ee16B", scale, least, *pairs)
            numbers += [np.float32(scale) * value + np.float32(least) for value in values]
    return stored, np.array(numbers, np.float32).reshape(shape)


def text(word):
    return struct.pack("<Q", len(word)) + word.encode()


def typed(value):
    """A key's type and value, as the file has them."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def gguf(more=()):
    """A file of one layer, and its tensors by GGUF's names. more: keys beside, or instead of, those of `KEYS`."""
    its_keys = KEYS | dict(more)
    random = np.random.default_rng(0)
    entries, body, tensors = b"", b"", {}
    for name, shape in MATRICES.items():
        kind = 8 if name == "token_embd" else 3
        stored, tensors[name] = packed(shape, kind, random)
        entries += text(f"{name}.weight") + struct.pack("<IQQIQ", 2, *shape[::-1], kind, len(body))
        body += stored + b"\0" * (-len(stored) % 32)
    for name in NORMS:
        tensors[name] = random.normal(size=HIDDEN).astype(np.float32)
        entries += text(f"{name}.weight") + struct.pack("<IQIQ", 1, HIDDEN, 0, len(body))
        body += tensors[name].tobytes()
    keys = text("general.tags") + struct.pack("<IIQ", 9, 8, 2) + text("one") + text("two")
    for name, value in its_keys.items():
        keys += text(name) + typed(value)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(its_keys) + 1) + keys + entries
    return head + b"\0" * (-len(head) % 32) + body, tensors


def test_every_tensor_is_read_exactly(script):
    data, tensors = gguf()
    file = script.read_gguf(data)
    assert file.keys["general.tags"] == ["one", "two"]
    config = script.config_of(file)
    assert (config.norm_eps, config.rope_base, config.tied_embeddings) == (1e-5, 1e5, True)
    found = {name: script.parameter(file, config, name) for name in shapes(config)}
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in shapes(config).items()}
    layer = "model.layers.0."
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        (f"{layer}mlp.down_proj", "blk.0.ffn_down"),
        (f"{layer}self_attn.v_proj", "blk.0.attn_v"),
        (f"{layer}post_attention_layernorm", "blk.0.ffn_norm"),
    ):
        np.testing.assert_array_equal(found[f"{ours}.weight"].numpy(), tensors[theirs])
    # Row 2i of a head turns with row 2i + 1 there; here row i turns with row i + 4.
    for short, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours, theirs = found[f"{layer}self_attn.{short}_proj.weight"].numpy(), tensors[f"blk.0.attn_{short}"]
        for head in range(heads):
            for i in range(HEAD_DIM):
                row = head * HEAD_DIM + (2 * i if i < HEAD_DIM // 2 else 2 * (i - HEAD_DIM // 2) + 1)
                np.testing.assert_array_equal(ours[head * HEAD_DIM + i], theirs[row])
    assert all(t.dtype == torch.float32 for t in found.values())


def test_other_files_are_refused(script):
    data, _ = gguf()
    for bad, told in ((b"PK" + data, "no GGUF"), (data[:4] + b"\2" + data[5:], "version 2")):
        with pytest.raises(ValueError, match=told):
            script.read_gguf(bad)


@pytest.mark.parametrize(
    "more",
    [
        {"general.architecture": "qwen2"},
        {"tokenizer.ggml.pre": "llama-bpe"},
        {"llama.rope.scaling.factor": 8.0},
    ],
)
def test_other_models_are_refused_by_what_they_say(script, more):
    """Their rotary embedding, biases or tokenizers would be lost without a word."""
    with pytest.raises(ValueError, match=f"{next(iter(more))}|scales its rotary"):
        script.config_of(script.read_gguf(gguf(more)[0]))


def test_tensors_that_aren_t_the_model_s_are_refused(script):
    file = script.read_gguf(gguf()[0])
    config = script.config_of(file)
    script.check_tensors(file, config)
    bias = {"blk.0.attn_q.bias": file.tensors["blk.0.attn_norm.weight"]}
    for tensors in (file.tensors | bias, dict(list(file.tensors.items())[1:])):
        with pytest.raises(ValueError, match=r"has (blk\.0\.attn_q\.bias|token_embd\.weight) with shape"):
            script.check_tensors(script.Gguf(file.keys, tensors, file.data), config)


def test_a_file_cut_anywhere_is_refused(script):
    data, _ = gguf()
    for size in (4, 8, 20, 100, 700, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError, match="damaged or cut short"):
            script.read_gguf(data[:size])
