"""Make datasets/demo: a small real corpus with a long tail of document lengths, and a tokenizer trained on it.

    python datasets/prepare_demo.py SOURCE.jsonl.gz -o datasets/demo

SOURCE is JSON lines with the fields id, source, license, text: C4 pages, Debian fortunes, Project Gutenberg books and
CPython standard-library files (README.md beside this script names them). The choice is by fixed rules:

- C4: pages whose id starts with one of 0-7 (ids are hexadecimal hashes, so this is a fixed random half);
- fortunes and riddles: all; CPython: files under 60,000 bytes; Gutenberg: Alice and Frankenstein;
- a text seen before is dropped, so that no held-out document is trained on;
- held out, whole documents only: 4 % of C4 and of fortunes by a hash of the id, and CPython's textwrap.py.

The tokenizer is byte-level BPE, so no text is unknown to it, trained on the training documents alone. The same SOURCE
and library versions give the same bytes: rows keep their order, gzip carries no time, training runs on one thread.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import zlib
from collections import Counter
from pathlib import Path

VOCAB_SIZE = 2048
BOS, EOS = "<s>", "</s>"
BOOKS = ("Alice-s-Adventures-in-Wonderland", "Frankenstein")
HELD_OUT_FILE = "cpython-stdlib/textwrap.py"
HELD_OUT_PERCENT = 4
LARGEST_CPYTHON_BYTES = 60_000


def is_chosen(row: dict) -> bool:
    """Say whether a source row belongs to the demo corpus."""
    source = row["source"]
    if source.startswith("c4/"):
        return row["id"][0] in "01234567"
    if source.startswith("gutenberg/"):
        return any(book in source for book in BOOKS)
    if source.startswith("cpython-stdlib/"):
        return len(row["text"].encode()) < LARGEST_CPYTHON_BYTES
    return source.startswith("fortunes-min/")


def is_held_out(row: dict) -> bool:
    """Say whether a chosen row is for evaluation."""
    source = row["source"]
    if source.startswith(("c4/", "fortunes-min/")):
        return zlib.crc32(row["id"].encode()) % 100 < HELD_OUT_PERCENT
    return source == HELD_OUT_FILE


def choose(source: Path) -> dict[str, list[dict]]:
    """Read the source corpus and split it into the rows of `train` and `eval`."""
    split: dict[str, list[dict]] = {"train": [], "eval": []}
    seen = set()
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if is_chosen(row) and row["text"].strip() not in seen:
                seen.add(row["text"].strip())
                kept = {name: row[name] for name in ("id", "source", "license", "text")}
                split["eval" if is_held_out(row) else "train"].append(kept)
    return split


def write_rows(path: Path, rows: list[dict]) -> dict:
    """Write rows as gzipped JSON lines; returns the manifest's entry."""
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    with open(path, "wb") as file, gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=0) as packed:
        packed.write(content)
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "sha256_uncompressed": hashlib.sha256(content).hexdigest(),
        "num_documents": len(rows),
        "text_bytes": sum(len(row["text"].encode()) for row in rows),
        "documents_by_source": dict(sorted(Counter(_family(row) for row in rows).items())),
    }


def _family(row: dict) -> str:
    return f"{row['source'].split('/')[0]} ({row['license']})"


def train_tokenizer(path: Path, texts: list[str]):
    """Train the byte-level BPE tokenizer and write tokenizer.json; returns it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="JSON lines, gzipped: id, source, license, text")
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).parent / "demo")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    arguments.out.mkdir(parents=True, exist_ok=True)

    split = choose(arguments.source)
    files = {name: arguments.out / f"{name}.jsonl.gz" for name in split}
    manifest = {files[name].name: write_rows(files[name], rows) for name, rows in split.items()}
    tokenizer_path = arguments.out / "tokenizer.json"
    tokenizer = train_tokenizer(tokenizer_path, [row["text"] for row in split["train"]])
    manifest["tokenizer.json"] = {
        "sha256": hashlib.sha256(tokenizer_path.read_bytes()).hexdigest(),
        "vocab_size": tokenizer.get_vocab_size(),
        "bos": BOS,
        "eos": EOS,
    }
    for name, rows in split.items():
        lengths = sorted(len(tokenizer.encode(row["text"]).ids) for row in rows)
        entry = manifest[files[name].name]
        entry["num_tokens"] = sum(lengths)  # of the shipped tokenizer, without BOS and EOS
        entry["tokens_percentiles"] = {f"p{p}": lengths[(len(lengths) - 1) * p // 100] for p in (0, 50, 90, 99, 100)}
    (arguments.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(manifest, indent=2))


if __name__ == "__main__":
    main()
