"""Prepared data: the same documents as in memory, the same bytes from any number of workers, and no trust in files."""

import dataclasses
import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from hsap.data import prepared
from hsap.data.batch import build_micro_batch, count_targets
from hsap.data.config import data_config
from hsap.data.opening import open_data, open_template, open_tokenizer
from hsap.data.packing import Packing, epoch_packs
from hsap.data.prepared.index import read_signed, signed
from hsap.data.sources import Tally
from hsap.data.store import DocumentStore
from hsap.data.tokenise import tokenise_documents

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "datasets" / "demo"
TOKENIZER = str(DEMO / "tokenizer.json")
SECONDS = 200


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROWS = [
    *({"text": f"The whale number {i} of {i * i}."} for i in range(40)),
    {"tokens": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
    {"id": "two\nlines", "text": "a name with a line break"},
    {"id": "\ud800", "text": "a name with half of a pair"},
    chat("Who?", "Ishmael."),
    {"messages": [{"role": "user", "content": "Nobody answers."}]},
    {"prompt": "Yes or no?", "answers": ["Yes.", "No, never.", "Perhaps"]},
    *({"text": f"Line {i}\n" * (i % 7)} for i in range(60)),
    {"tokens": [], "id": "nothing"},
    {"tokens": [9]},
]


def settings(path, tokenizer=TOKENIZER, **more):
    return data_config({"path": str(path), "tokenizer": str(tokenizer), **more})


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return settings(path, chat_template="chatml")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of several shards, with every column; copied before it is spoilt."""
    path = tmp_path_factory.mktemp("made") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = settings(path, chat_template="chatml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hsap.data.prepared.making.BLOCK_DOCUMENTS", 16)
        prepared.prepare(data, path.parent / "out", shard_tokens=400)
    return path.parent / "out", data


def in_memory(data):
    source, tokenizer = open_data(data, data.path), open_tokenizer(data)
    refused = Tally()

    def reject(where, reason):
        if not source.again:
            refused.reject(where, reason)

    store = tokenise_documents(source, tokenizer, lambda: open_template(data, tokenizer), reject)
    return store, Tally.of([source.tally, refused])


def same(store: DocumentStore, expected: DocumentStore) -> None:
    assert store.tokens[:].tolist() == expected.tokens.tolist()
    assert store.starts.tolist() == expected.starts.tolist()
    assert list(store.ids) == list(expected.ids)
    assert (store.trained is None) == (expected.trained is None)
    if expected.trained is not None:
        assert store.trained[:].tolist() == expected.trained.tolist()
    assert (store.answers is None) == (expected.answers is None)
    if expected.answers is not None:
        assert [rows.tolist() for rows in store.answers] == [rows.tolist() for rows in expected.answers]


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_a_folder_holds_what_tokenising_in_memory_gives(made):
    folder, data = made
    expected, tally = in_memory(data)
    store, index = prepared.open_store(folder), prepared.check(folder)
    same(store, expected)
    assert len(index.shards) > 2 and index.token_dtype == "uint16"
    assert (index.documents, index.tokens) == (len(expected.ids), len(expected.tokens))
    assert sum(shard.trained for shard in index.shards) == int(expected.trained.sum())
    assert (index.left_out.counts, index.left_out.examples) == (tally.counts, tally.examples)
    assert index.left_out.counts["a conversation that ends without an answer"] == 1
    assert index.left_out.counts["no text and no tokens"] == 10
    assert index.content == prepared.read_index(folder).content
    kinds = dict(zip(expected.ids, index.chats.tolist(), strict=True))
    for document in open_data(data, data.path):
        if document.id in kinds:
            assert kinds[document.id] == 2 or kinds[document.id] == (document.chat is not None)


def test_batches_of_a_folder_are_those_of_memory(made):
    folder, data = made
    expected, _ = in_memory(data)
    store = prepared.open_store(folder)
    for policy in ("concat", "best_fit"):
        packs = epoch_packs(store.lengths, Packing(37, policy), 3, 0, uncut=store.uncut)
        assert packs == epoch_packs(expected.lengths, Packing(37, policy), 3, 0, uncut=expected.uncut)
        mine, theirs = (build_micro_batch(one, packs, 37) for one in (store, expected))
        for name in ("tokens", "labels", "positions"):
            assert getattr(mine, name).tolist() == getattr(theirs, name).tolist()
        assert (mine.document_ids, mine.answers) == (theirs.document_ids, theirs.answers)
        assert mine.num_targets == theirs.num_targets == (mine.labels != -100).sum() == count_targets(store, packs)


def test_slices_go_over_shards(made):
    folder, data = made
    expected, _ = in_memory(data)
    store = prepared.open_store(folder)
    size = len(store.tokens)
    for start, stop in [
        (0, 0),
        (0, 1),
        (size - 1, size),
        (size, size),
        (3, size - 2),
        (401, 900),
        (7, 3),
        (5, size + 9),
    ]:
        assert store.tokens[start:stop].tolist() == expected.tokens[start:stop].tolist()
        assert store.trained[start:stop].tolist() == expected.trained[start:stop].tolist()
    assert store.tokens[3:9].dtype == store.tokens[0:0].dtype == np.int32
    with pytest.raises(IndexError):
        store.ids[len(store.ids)]


def test_without_marks_and_answers_there_are_no_such_columns(tmp_path):
    (tmp_path / "a.txt").write_text("Call me Ishmael.")
    prepared.prepare(settings(tmp_path / "a.txt"), tmp_path / "out")
    store = prepared.open_store(tmp_path / "out")
    assert (store.trained, store.answers, store.uncut) == (None, None, None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("00000.id_starts", "00000.ids", "00000.starts", "00000.tokens", "prepared.json")
    ]


@pytest.mark.parametrize(("words", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_tokens_take_the_fewest_bytes_that_hold_the_vocabulary(tmp_path, words, dtype):
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(tmp_path / "t.json"))
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": f"w7 w{words - 1} w255 w256"}) + "\n")
    index = prepared.prepare(settings(tmp_path / "d.jsonl", tmp_path / "t.json"), tmp_path / "out")
    raw = np.fromfile(tmp_path / "out/00000.tokens", f"<{'u2' if dtype == 'uint16' else 'u4'}")
    assert index.token_dtype == dtype and raw.tolist() == [7, words - 1, 255, 256]
    assert prepared.open_store(tmp_path / "out").tokens[:].tolist() == [7, words - 1, 255, 256]


def test_a_document_of_three_million_tokens_is_one(tmp_path):
    tokens = np.arange(3_000_000) % 2000
    np.save(tmp_path / "d.npy", tokens.astype(np.uint16))
    index = prepared.prepare(settings(tmp_path / "d.npy"), tmp_path / "out", shard_tokens=1000)
    store = prepared.open_store(tmp_path / "out")
    assert (index.documents, len(index.shards), store.lengths.tolist()) == (1, 1, [3_000_000])
    assert np.array_equal(store.tokens[2_999_000:3_000_000], tokens[2_999_000:])


@pytest.mark.parametrize(
    ("rows", "told"),
    [([], "holds no document"), ([{"messages": [{"role": "user", "content": "Hm."}]}], "ends without an answer")],
)
def test_no_document_is_told(tmp_path, rows, told):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=told):
        prepared.prepare(settings(tmp_path / "d.jsonl", chat_template="chatml"), tmp_path / "out")
    assert not (tmp_path / "out").exists(), "what came to nothing leaves nothing"
    with pytest.raises(ValueError, match=r"holds no finished prepared data .* run the `hsap prepare` that began it"):
        prepared.open_store(tmp_path / "out")


def test_mixtures_and_several_sources(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(9)))
    paths = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    for number, path in enumerate((paths, {paths[0]: 2, paths[1]: 1})):
        data = data_config({"path": path, "tokenizer": TOKENIZER})
        prepared.prepare(data, tmp_path / f"out{number}")
        same(prepared.open_store(tmp_path / f"out{number}"), in_memory(data)[0])
    assert list(prepared.open_store(tmp_path / "out0").ids)[8:10] == [f"{paths[0]}/a.jsonl:9", f"{paths[1]}/b.jsonl:1"]
    with pytest.raises(ValueError, match=r"can be data.path alone"):
        open_data(data, {str(tmp_path / "out0"): 1.0})


def test_what_a_mixture_gives_again_is_left_out_once(tmp_path):
    """Rows that only the template refuses; the source of half of them is given three times."""
    (tmp_path / "t.jinja").write_text(
        "{% if 'bad' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    )
    paths = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    for path, count in zip(paths, (4, 12)):
        rows = [chat("bad" if i % 2 else "good", f"{i}") for i in range(count)]
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = settings("x", chat_template=str(tmp_path / "t.jinja"))
    data = dataclasses.replace(data, path={paths[0]: 1, paths[1]: 1})
    index = prepared.prepare(data, tmp_path / "out")
    expected, tally = in_memory(data)
    same(prepared.open_store(tmp_path / "out"), expected)
    assert index.left_out.counts == tally.counts and sum(tally.counts.values()) == 8
    assert sorted(one.where for one in index.left_out.examples) == sorted(one.where for one in tally.examples)


def test_a_finished_folder_is_not_read_again_and_not_overwritten(rows, tmp_path):
    index = prepared.prepare(rows, tmp_path / "out")
    before = contents(tmp_path / "out")
    assert prepared.prepare(rows, tmp_path / "out", workers=2).content == index.content
    for data, differs in (
        (settings(rows.path, chat_template="llama2"), r"data.chat_template was .*, now "),
        (settings(rows.path, chat_template="chatml", loss="all"), "data.loss was 'assistant', now 'all'"),
    ):
        with pytest.raises(ValueError, match=f"out holds data that was prepared from something else.*{differs}"):
            prepared.prepare(data, tmp_path / "out")
    with open(rows.path, "a") as file:
        file.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ValueError, match="source bytes was"):
        prepared.prepare(rows, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    with pytest.raises(ValueError, match=r"holds other things \(out, rows.jsonl\); name a folder that is new"):
        prepared.prepare(rows, tmp_path)


def test_a_seed_is_held_to_where_it_orders_something(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("hsap.data.prepared.making.BLOCK_DOCUMENTS", 16)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 1)
        prepared.prepare(rows, tmp_path / "out", seed=1, shard_tokens=400)
    index = prepared.prepare(rows, tmp_path / "out", seed=2, shard_tokens=400)
    assert prepared.prepare(rows, tmp_path / "out", seed=3, shard_tokens=400).content == index.content
    mixed = data_config({"path": {rows.path: 1.0}, "tokenizer": rows.tokenizer, "chat_template": "chatml"})
    prepared.prepare(mixed, tmp_path / "mixed", seed=1)
    with pytest.raises(ValueError, match=r"train.seed was 1, now 2; run the command that made it"):
        prepared.prepare(mixed, tmp_path / "mixed", seed=2)


def stop_after(monkeypatch, shards):
    """Let `prepare` fail when it has written so many shards."""
    from hsap.data.prepared.shards import Growing

    whole, count = Growing.write, [0]

    def write(self, *arguments):
        if count[0] == shards:
            raise KeyboardInterrupt
        count[0] += 1
        return whole(self, *arguments)

    monkeypatch.setattr(Growing, "write", write)


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_what_was_broken_off_goes_on_to_the_same_bytes(made, tmp_path, monkeypatch, shards):
    folder, data = made
    monkeypatch.setattr("hsap.data.prepared.making.BLOCK_DOCUMENTS", 16)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, shards)
        prepared.prepare(data, tmp_path / "out", shard_tokens=400)
    assert (tmp_path / "out").exists() == (shards > 0), "what came to nothing leaves nothing"
    (tmp_path / "out").mkdir(exist_ok=True)
    # What a crash while a shard is written leaves.
    (tmp_path / f"out/{shards:05d}.tokens").write_bytes(b"half")
    (tmp_path / f"out/.{shards:05d}.json").write_bytes(b"{")
    if shards:
        with pytest.raises(ValueError, match=r"data.loss was 'assistant', now 'all'"):
            prepared.prepare(
                settings(data.path, chat_template="chatml", loss="all"), tmp_path / "out", shard_tokens=400
            )
    told = []
    prepared.prepare(data, tmp_path / "out", progress=lambda *counts: told.append(counts), shard_tokens=400)
    assert (told[0][0] > 0) == (shards > 0), "it goes on behind what is whole"
    assert contents(tmp_path / "out") == contents(folder)


def test_two_at_a_time_are_refused(rows, tmp_path):
    from hsap.data.prepared.making import work_of
    from hsap.data.prepared.shards import begun

    work = work_of(rows, 0, open_data(rows, rows.path), open_tokenizer(rows), 1)
    with begun(tmp_path / "out", work), pytest.raises(ValueError, match="is being prepared by another process"):
        prepared.prepare(rows, tmp_path / "out")


SPOILT = {
    "missing": (lambda f: (f / "00001.tokens").unlink(), r"00001.tokens can't be read \(No such file"),
    "cut short": (lambda f: os.truncate(f / "00001.ids", 3), r"00001.ids has 3 bytes, and had \d+ when it was written"),
    "longer": (lambda f: append(f / "00000.trained"), "00000.trained has "),
    "a link": (lambda f: link(f / "00000.starts"), "00000.starts is no plain file; copy the file itself"),
    "a pipe": (lambda f: pipe(f / "00000.starts"), "00000.starts is no plain file"),
    "starts out of order": (lambda f: flip(f / "00001.starts", 9), "00001.starts: its numbers don't ascend from 0 to"),
    "answers elsewhere": (lambda f: flip(answers(f), 7), "the answers of document .* don't lie in it"),
    "index cut short": (lambda f: os.truncate(f / "prepared.json", 99), "prepared.json can't be used: .*copy it again"),
    "index flipped": (lambda f: flip(f / "prepared.json", 200), "prepared.json can't be used: "),
    "no index": (lambda f: (f / "prepared.json").unlink(), "holds no finished prepared data"),
}


def append(path):
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x41
    path.write_bytes(data)


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def answers(folder):
    return next(folder.glob("*.answers"))


@pytest.mark.parametrize("what", SPOILT)
def test_spoilt_files_are_refused_when_opened(made, tmp_path, what):
    folder = shutil.copytree(made[0], tmp_path / "out")
    spoil, told = SPOILT[what]
    spoil(folder)
    with pytest.raises(ValueError, match=told) as error:
        prepared.open_store(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("column", ["tokens", "ids", "id_starts", "trained", "answers"])
def test_flipped_bits_are_found_by_the_whole_check(made, tmp_path, column):
    folder = shutil.copytree(made[0], tmp_path / "out")
    path = max(folder.glob(f"*.{column}"), key=lambda path: path.stat().st_size)
    flip(path, 0 if column != "answers" else 8)
    with pytest.raises(ValueError, match=f"{path.name} is damaged: it doesn't have the SHA-256"):
        prepared.check(folder)


def test_tokens_and_ids_of_a_stranger_are_judged_when_they_are_used(made, tmp_path):
    folder = shutil.copytree(made[0], tmp_path / "out")
    tokens = np.fromfile(folder / "00000.tokens", "<u2")
    tokens[5] = 2048
    tokens.tofile(folder / "00000.tokens")
    flip(folder / "00000.ids", 0)
    (folder / "00000.ids").write_bytes(b"\xff" + (folder / "00000.ids").read_bytes()[1:])
    starts = np.fromfile(folder / "00000.id_starts", "<u8")
    starts[3] = 1 << 63
    starts.tofile(folder / "00000.id_starts")
    store = prepared.open_store(folder)
    assert len(store.tokens[6:20]) == 14 and store.ids[1] == "rows.jsonl:2"
    with pytest.raises(ValueError, match=r"00000.tokens: token 5 has id 2048, outside the vocabulary of 2048 entries"):
        store.tokens[3:9]
    with pytest.raises(ValueError, match=r"00000.ids: the id of document 0 isn't UTF-8"):
        store.ids[0]
    with pytest.raises(ValueError, match=r"00000.ids: the id of document 2 lies outside it"):
        store.ids[2]


@pytest.mark.parametrize("name", ["tokens", "trained", "ids", "id_starts"])
def test_a_file_that_changed_since_it_was_opened_is_refused_when_it_is_mapped(made, tmp_path, name):
    shutil.copytree(made[0], tmp_path / "out")
    store = prepared.open_store(tmp_path / "out")
    os.truncate(tmp_path / f"out/00000.{name}", 2)
    with pytest.raises(ValueError, match=rf"00000.{name} had \d+ bytes when the data were opened, and has 2 now; put"):
        store.ids[0] if "id" in name else (store.tokens if name == "tokens" else store.trained)[0:1]


def column(name, field, value):
    return lambda v: v["shards"][0]["columns"][name].__setitem__(field, value)


def shard(field, value):
    return lambda v: v["shards"][0].__setitem__(field, value)


STRANGE = {
    "another format": (lambda v: v.update(format="mds"), "it is 'mds' of version 2, not"),
    "another version": (lambda v: v.update(version=1), "of version 1, not"),
    "a true version": (lambda v: v.update(documents=True), "documents is True; it must be a whole number"),
    "no shards": (lambda v: v.pop("shards"), "it must have format, version"),
    "shards of another type": (lambda v: v.update(shards={}), "shards is {}"),
    "more fields": (lambda v: v.update(files=["../x"]), "the object has the fields"),
    "dtype": (lambda v: v.update(token_dtype="object"), "there is no 'object'"),
    "dtype of another type": (lambda v: v.update(token_dtype=["uint16"]), "token_dtype"),
    "totals": (lambda v: v.update(tokens=v["tokens"] + 1), r"tokens is \d+, its shards have"),
    "negative": (shard("documents", -1), r"shards\[0\].documents is -1"),
    "huge": (shard("tokens", 1 << 70), r"shards\[0\].tokens is 11805"),
    "a float": (shard("tokens", 3.0), r"shards\[0\].tokens is 3.0"),
    "more trained than there are": (shard("trained", 1 << 40), r"shards\[0\].trained is"),
    "columns that lead out": (
        lambda v: v["shards"][0]["columns"].update({"../tokens": v["shards"][0]["columns"]["tokens"]}),
        r"there is no column '../tokens'; known columns are",
    ),
    "columns of another type": (shard("columns", [1]), r"shards\[0\].columns is \[1\]"),
    "a column missing": (lambda v: v["shards"][0]["columns"].pop("ids"), r"shards\[0\].columns lacks ids"),
    "a size": (column("tokens", "bytes", 8), r"columns.tokens has 8 bytes; \d+ documents of \d+ tokens"),
    "a negative size": (column("ids", "bytes", -8), r"columns.ids.bytes is -8"),
    "a checksum": (column("ids", "sha256", "../../etc/passwd"), "must be 64 hexadecimal digits"),
    "a vocabulary": (lambda v: v["recipe"]["tokenizer"].update(vocab_size=1 << 40), "vocab_size is 1099511627776"),
    "a recipe": (lambda v: v.update(recipe=None), "recipe is None"),
    "left out": (lambda v: v["left_out"].update(counts={"x": -3}), "left_out.counts is -3"),
    "examples": (lambda v: v["left_out"].update(examples=[["a", "b", "c"]]), "left_out.examples has"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_an_index_that_no_writer_wrote_is_refused(made, tmp_path, what):
    folder = shutil.copytree(made[0], tmp_path / "out")
    values = read_signed(folder / "prepared.json")
    values.pop("sha256")
    change, told = STRANGE[what]
    change(values)
    (folder / "prepared.json").write_text(json.dumps(signed(values)))
    with pytest.raises(ValueError, match=told) as error:
        prepared.open_store(folder)
    assert str(folder / "prepared.json") in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"sha256": NaN}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_an_index_that_is_no_object_is_refused(made, tmp_path, text):
    (tmp_path / "prepared.json").write_text(text)
    with pytest.raises(ValueError, match=r"prepared.json can't be used: "):
        prepared.open_store(tmp_path)


def test_shards_without_documents_are_fine(tmp_path, monkeypatch):
    rows = [{"messages": [{"role": "system", "content": "x"}, *chat("Who?", "I.")["messages"]]}] * 4 + [{"text": "end"}]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.jinja").write_text("{{ raise_exception('no') }}")
    data = settings(path, chat_template=str(tmp_path / "t.jinja"))
    monkeypatch.setattr("hsap.data.prepared.making.BLOCK_DOCUMENTS", 2)
    monkeypatch.setattr("hsap.data.prepared.making.SHARD_DOCUMENTS", 2)
    index = prepared.prepare(data, tmp_path / "out")
    assert [one.documents for one in index.shards] == [0, 0, 1]
    same(prepared.open_store(tmp_path / "out"), in_memory(data)[0])


def test_training_with_other_settings_is_refused(made, tmp_path):
    folder, data = made
    tokenizer = open_tokenizer(data)
    prepared.check_agreement(folder, data, tokenizer)
    prepared.check_agreement(folder, settings(data.path), tokenizer)
    shutil.copy(TOKENIZER, tmp_path / "tokenizer.json")
    append_space(tmp_path / "tokenizer.json")
    for more, told in (
        (
            {"tokenizer": tmp_path / "tokenizer.json"},
            r"data.tokenizer was .*demo/tokenizer.json .*, now .*tokenizer.json",
        ),
        ({"add_eos": False}, r"EOS \(data.add_eos, data.eos\) was \[1\], now \[\]"),
        ({"chat_template": "mistral"}, r"the text of data.chat_template was that of chatml .*, now mistral"),
        ({"chat_template": "chatml", "loss": "last_assistant"}, "data.loss was 'assistant', now last_assistant"),
        ({"answers": "best"}, "data.answers was 'all', now 'best'"),
        ({"text_field": "body"}, "data.text_field was 'text', now 'body'"),
    ):
        other = settings(data.path, **more)
        with pytest.raises(ValueError, match=f"out was prepared otherwise than this run reads data: {told}"):
            prepared.check_agreement(folder, other, open_tokenizer(other))


def append_space(path):
    path.write_text(path.read_text() + " ")


COMMAND = """
import sys
from hsap.data import prepared
from hsap.data.config import data_config
if __name__ == "__main__":
    source, tokenizer, out, blocks = sys.argv[1:]
    prepared.making.BLOCK_DOCUMENTS = int(blocks)
    prepared.prepare(data_config({"path": source, "tokenizer": tokenizer}), out, 2, shard_tokens=30_000)
"""


def command(folder, blocks=1024):
    """Start a process that prepares d.jsonl with two workers."""
    (folder / "command.py").write_text(COMMAND)
    arguments = [sys.executable, folder / "command.py", folder / "d.jsonl", TOKENIZER, folder / "out", str(blocks)]
    return subprocess.Popen(arguments, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_workers_and_a_kill_change_no_byte(tmp_path, monkeypatch):
    lines = gzip.decompress((DEMO / "train.jsonl.gz").read_bytes()).splitlines(keepends=True)
    (tmp_path / "d.jsonl").write_bytes(b"".join(lines[:300]))
    data = settings(tmp_path / "d.jsonl")
    monkeypatch.setattr("hsap.data.prepared.making.BLOCK_DOCUMENTS", 32)
    for workers in (1, 2, 3):
        prepared.prepare(data, tmp_path / f"out{workers}", workers, shard_tokens=30_000)
    expected = contents(tmp_path / "out1")
    assert sum(name.endswith(".tokens") for name in expected) > 3
    assert expected == contents(tmp_path / "out2") == contents(tmp_path / "out3")
    running = command(tmp_path, 32)
    wait_for(tmp_path / "out/00001.json")
    running.send_signal(signal.SIGKILL)
    # Its workers hold its stderr open: the pipe ends when they do.
    running.communicate(timeout=SECONDS)
    assert running.returncode == -signal.SIGKILL and not (tmp_path / "out/prepared.json").exists()
    prepared.prepare(data, tmp_path / "out", 2, shard_tokens=30_000)
    assert contents(tmp_path / "out") == expected


def wait_for(path):
    until = time.monotonic() + SECONDS
    while not path.is_file() and time.monotonic() < until:
        time.sleep(0.002)


@pytest.mark.slow
def test_a_worker_that_is_ended_is_told(tmp_path):
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": "whales " * 9_000}) + "\n" for _ in range(200)))
    running = command(tmp_path)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    wait_for(tmp_path / "out/00000.json")
    for child in children.read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)
            break
    _, told = running.communicate(timeout=SECONDS)
    assert running.returncode == 1 and "a worker ended while it tokenised (exit code -9" in told
