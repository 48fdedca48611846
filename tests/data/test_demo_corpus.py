"""The shipped corpus is what its manifest says, held-out text is held out, and the main job's path reads it."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from hsap.data import sources
from hsap.data.loader import StepLoader, eval_batches
from hsap.data.packing import Packing
from hsap.data.tokenise import tokenise_documents
from hsap.data.tokenizer import load_tokenizer

DATASETS = Path(__file__).parents[2] / "datasets"
DEMO = DATASETS / "demo"
MANIFEST = json.loads((DEMO / "manifest.json").read_text())


def rows(name):
    with gzip.open(DEMO / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_files_are_those_of_the_manifest(name):
    assert hashlib.sha256((DEMO / name).read_bytes()).hexdigest() == MANIFEST[name]["sha256"]


def test_rows_carry_source_and_licence_and_no_text_is_on_both_sides():
    train, held_out = rows("train.jsonl.gz"), rows("eval.jsonl.gz")
    assert all(row["source"] and row["license"] and row["text"] for row in train + held_out)
    assert len({row["id"] for row in train + held_out}) == len(train) + len(held_out)
    assert not {row["text"].strip() for row in train} & {row["text"].strip() for row in held_out}
    assert len({row["source"].split("/")[0] for row in held_out}) >= 3


def test_the_folder_does_not_hide_the_package_of_that_name():
    assert not list(DATASETS.rglob("__init__.py"))


def test_the_main_jobs_path_reads_it_back_as_text():
    tokenizer = load_tokenizer(DEMO / "tokenizer.json")
    store = tokenise_documents(sources.open(DEMO / "eval.jsonl.gz"), tokenizer)
    texts = [row["text"] for row in rows("eval.jsonl.gz")]
    for number, text in enumerate(texts):
        assert tokenizer.decode(store.tokens[store.starts[number] : store.starts[number + 1]]) == text
    assert len(store.tokens) == MANIFEST["eval.jsonl.gz"]["num_tokens"] + 2 * len(texts)
    assert eval_batches(store, Packing(2048), dp_size=2).num_tokens == len(store.tokens)
    with StepLoader(store, Packing(2048), packs_per_step=8, dp_size=2, micro_packs=2) as loader:
        step = next(loader)
    assert [len(batch.sequences) for batch in step.micro_batches] == [2, 2]
    assert step.padding_share < 0.1
