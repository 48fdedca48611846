"""Tokenizers of both kinds, the BOS and EOS policy, and ids outside the vocabulary."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from hsap.data import sources
from hsap.data.document import Document
from hsap.data.tokenise import check_token_ids, tokenise, tokenise_documents
from hsap.data.tokenizer import load_tokenizer

DEMO = Path(__file__).parents[2] / "datasets" / "demo"
TEXT = "Call me Ishmael. Some years ago — never mind how long precisely —\n\tnaïve 象形 🐋 </s> <s>"


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    model = io.BytesIO()
    lines = [TEXT, "some more words to learn from", "whales and the sea, the sea and whales"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=290, byte_fallback=True, minloglevel=2
    )
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


def word_level(path, words, **extra):
    """Write a tokenizer.json whose ids are the places in `words`."""
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name, value in extra.items():
        setattr(backend, name, value)
    backend.save(str(path))
    return path


def test_both_kinds_give_text_back_and_put_bos_and_eos_around_documents(sentencepiece_model):
    for path in (DEMO / "tokenizer.json", sentencepiece_model):
        tokenizer = load_tokenizer(path)
        text = TEXT if path.suffix == ".json" else "some more words 象 </s>"
        inner = tokenizer.encode(text)
        assert inner.dtype == np.int32
        assert tokenizer.bos_id not in inner and tokenizer.eos_id not in inner  # "</s>" in text is text
        assert tokenizer.encode_document(text).tolist() == [tokenizer.bos_id, *inner, tokenizer.eos_id]
        assert tokenizer.decode(tokenizer.encode_document(text)) == text
        assert inner.min() >= 0 and inner.max() < tokenizer.vocab_size


def test_ids_agree_with_each_library_itself(sentencepiece_model):
    text = "whales and the sea"
    direct = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert load_tokenizer(sentencepiece_model).encode(text).tolist() == direct.encode(text)
    assert load_tokenizer(sentencepiece_model).vocab_size == direct.vocab_size() == 290
    direct = Backend.from_file(str(DEMO / "tokenizer.json"))
    assert load_tokenizer(DEMO).encode(text).tolist() == direct.encode(text, add_special_tokens=False).ids
    assert load_tokenizer(DEMO).vocab_size == 2048


@pytest.mark.parametrize(("add_bos", "add_eos"), [(None, None), (True, False), (False, True), (False, False)])
def test_the_policy_is_a_setting(tmp_path, add_bos, add_eos):
    path = word_level(tmp_path / "tokenizer.json", ["?", "<s>", "</s>", "sea"])
    tokens = load_tokenizer(path, add_bos=add_bos, add_eos=add_eos).encode_document("sea").tolist()
    assert tokens == [1] * (add_bos is not False) + [3] + [2] * (add_eos is not False)


def test_without_such_tokens_nothing_is_added_unless_demanded(tmp_path):
    path = word_level(tmp_path / "tokenizer.json", ["?", "<|endoftext|>", "sea", "start"])
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)
    assert tokenizer.encode_document("sea").tolist() == [2, 1]
    with pytest.raises(ValueError, match=r"no BOS token.*data\.bos.*data\.add_bos=false"):
        load_tokenizer(path, add_bos=True)
    assert load_tokenizer(path, bos="start").encode_document("sea").tolist() == [3, 2, 1]
    with pytest.raises(ValueError, match=r"no piece 'end'; set data\.eos"):
        load_tokenizer(path, eos="end")


def test_settings_saved_in_the_file_change_no_document(tmp_path):
    words = ["?", "<s>", "</s>", "sea"]
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    path = word_level(tmp_path / "tokenizer.json", words, post_processor=template)
    backend = Backend.from_file(str(path))
    backend.enable_truncation(4)
    backend.enable_padding(length=12)
    backend.save(str(path))
    assert load_tokenizer(path).encode_document("sea " * 7).tolist() == [1, *[3] * 7, 2]


def test_what_is_no_tokenizer_names_the_setting(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"not": "one"}))
    (tmp_path / "broken.model").write_bytes(b"\x00\x01 nothing")
    (tmp_path / "empty").mkdir()
    for name in ("missing.model", "missing.json", "empty", "tokenizer.json", "broken.model"):
        with pytest.raises(ValueError, match=r"data\.tokenizer") as error:
            load_tokenizer(tmp_path / name)
        assert name in str(error.value)


@pytest.mark.parametrize(("bad", "at"), [([5, 10, 11], 1), ([-1], 0), ([9, 9, 2**40], 2)])
def test_an_id_outside_the_vocabulary_is_named_with_its_place(bad, at):
    with pytest.raises(ValueError, match=rf"^d\.jsonl:4: token {at} .* id {bad[at]}, outside .* of 10 entries"):
        check_token_ids(np.array(bad), 10, "d.jsonl:4")


def test_ids_at_the_border_and_empty_documents_pass():
    check_token_ids(np.array([0, 9]), 10, "")
    check_token_ids(np.array([], dtype=np.int64), 10, "")


def test_pretokenised_documents_are_taken_as_they_are_and_checked(tmp_path):
    tokenizer = load_tokenizer(word_level(tmp_path / "tokenizer.json", ["?", "<s>", "</s>", "sea"]))
    assert tokenise(Document("a", "d:1", tokens=np.array([3, 0])), tokenizer).tokens.tolist() == [3, 0]
    with pytest.raises(ValueError, match=r"^d:2: "):
        tokenise(Document("b", "d:2", tokens=np.array([3, 4])), tokenizer)


def test_a_store_holds_every_document(tmp_path):
    tokenizer = load_tokenizer(word_level(tmp_path / "tokenizer.json", ["?", "<s>", "</s>", "sea", "whale"]))
    path = tmp_path / "d.jsonl"
    path.write_text('{"id": "x", "text": "sea sea"}\n{"text": ""}\n{"tokens": [3]}\n{"id": "y", "text": "whale"}\n')
    store = tokenise_documents(sources.open(path), tokenizer)
    assert store.tokens.tolist() == [1, 3, 3, 2, 3, 1, 4, 2]
    assert store.tokens.dtype == np.int32
    assert store.lengths.tolist() == [4, 1, 3]
    assert store.ids == ("x", "d.jsonl:3", "y")


def test_a_text_that_the_tokenizer_fails_on_is_refused_with_its_place(tmp_path):
    word_level(tmp_path / "t.json", ["[UNK]", "whale"])
    values = json.loads((tmp_path / "t.json").read_text())
    values["model"]["unk_token"] = "not there"
    (tmp_path / "t.json").write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    with pytest.raises(ValueError, match=r"d.jsonl:7: tokenizer .*t.json can't encode 'a ship' \(WordLevel error"):
        tokenise(Document("d", "d.jsonl:7", text="a ship"), tokenizer)
    with pytest.raises(ValueError, match=r"t.json can't encode 'a ship'"):
        tokenizer.encode_part("a ship", "text")


def test_ids_that_no_int32_holds_are_refused(tmp_path):
    word_level(tmp_path / "t.json", ["[UNK]", "whale"])
    values = json.loads((tmp_path / "t.json").read_text())
    values["model"]["vocab"]["whale"] = 1 << 31
    (tmp_path / "t.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"t.json has the id 2147483648; ids must be below 2147483648"):
        load_tokenizer(tmp_path / "t.json")
