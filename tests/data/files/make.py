"""Write the sample files with each format's own library, and what that library reads back: `python make.py`.

Needs datasets, mosaicml-streaming and datatrove, in an environment of their own.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from datatrove.io import get_datafolder
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from streaming import MDSWriter, StreamingDataset

import datasets

HERE = Path(__file__).resolve().parent
TEXTS = ["Call me Ishmael.", "naïve 象形 🐋\n", "x" * 300, "four"]
TOKENS = [[1, 2, 3], [70000, 5], [9] * 40, [0]]
LABELS = [[-100, 2, 3], [-100, -100], [9] * 40, [0]]
PADDING = [[1] * 3, [1] * 2, [0] * 10 + [1] * 30, [1]]
SMALL = ([[1, 2, 3, 65000], [7], [5] * 20], [[1, 0, 1, 1], [0], [1] * 20])


def fresh(name: str) -> str:
    shutil.rmtree(HERE / name, ignore_errors=True)
    return str(HERE / name)


def write_mds() -> None:
    columns = {"id": "str", "input_ids": "ndarray:int32", "weight": "float32"}
    options = {"compression": "zstd:3", "size_limit": 280, "hashes": ["sha1"]}
    with MDSWriter(out=fresh("mds/tokens-zstd"), columns=columns, **options) as writer:
        for i, tokens in enumerate(TOKENS):
            writer.write({"id": f"d{i}", "input_ids": np.array(tokens, np.int32), "weight": 0.5})
    columns = {"text": "str", "meta": "json", "n": "int", "k": "uint16", "blob": "pkl", "free": "ndarray"}
    with MDSWriter(out=fresh("mds/mixed-columns"), columns=columns) as writer:
        free = np.arange(6, dtype=np.uint8).reshape(2, 3)
        for i, text in enumerate(TEXTS):
            writer.write({"text": text, "meta": {"i": i}, "n": -i, "k": i, "blob": {"a": 1}, "free": free})


def read_mds(name: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:  # reading unpacks shards beside their packed form
        copy = shutil.copytree(HERE / name, Path(folder) / "copy")
        data = StreamingDataset(local=str(copy), shuffle=False, batch_size=1, allow_unsafe_types=True)
        return [data[i] for i in range(len(data))]


def write_arrow() -> None:
    text = datasets.Dataset.from_dict({"id": ["a", "b", "c", "d"], "text": TEXTS})
    text.save_to_disk(fresh("arrow/saved"), num_shards=2)
    tokens = datasets.Dataset.from_dict({"input_ids": TOKENS, "labels": LABELS, "attention_mask": PADDING})
    datasets.DatasetDict({"train": text, "test": tokens}).save_to_disk(fresh("arrow/splits"))


def write_datatrove() -> None:
    folder = fresh("datatrove")
    for name, width in (("small.ds", 2), ("large.ds", 4)):
        masked = width == 2
        options = {"save_index": True, "save_loss_metadata": masked, "token_size": width}
        file = TokenizedFile(get_datafolder(folder), name, **options)
        for tokens, loss in zip(*SMALL):
            file.write([token + 70000 * (not masked) for token in tokens], loss if masked else None)
        file.close()


if __name__ == "__main__":
    write_mds()
    write_arrow()
    write_datatrove()
    expected = {
        "mds/tokens-zstd": [row["input_ids"].tolist() for row in read_mds("mds/tokens-zstd")],
        "mds/mixed-columns": [row["text"] for row in read_mds("mds/mixed-columns")],
        "mds/streaming-naive": [row["dept"] for row in read_mds("mds/streaming-naive")],
        "arrow/saved": datasets.load_from_disk(str(HERE / "arrow/saved"))["text"][:],
        "arrow/splits/test": datasets.load_from_disk(str(HERE / "arrow/splits/test"))["input_ids"][:],
    }
    for name in ("parquet/sample.parquet", "parquet/demo-dataset.parquet"):
        expected[name] = datasets.Dataset.from_parquet(str(HERE / name), cache_dir=tempfile.mkdtemp())["text"][:]
    (HERE / "expected.json").write_text(json.dumps(expected, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
