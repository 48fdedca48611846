"""Real text for the examples: packs of documents, as lists of token ids, from the corpus in datasets/."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "datasets" / "demo"
VOCAB_SIZE = 2048


def documents(longest: int) -> Iterator[list[int]]:
    """Token ids of every document, with BOS and EOS, cut to `longest`."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    with gzip.open(DEMO / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield [0, *tokenizer.encode(json.loads(line)["text"]).ids, 1][:longest]


def packs(pack_tokens: int, longest: int) -> Iterator[list[list[int]]]:
    """Lists of documents that have at most `pack_tokens` tokens together, in the corpus's order."""
    pack: list[list[int]] = []
    for document in documents(min(longest, pack_tokens)):
        if sum(map(len, pack)) + len(document) > pack_tokens:
            yield pack
            pack = []
        pack.append(document)
