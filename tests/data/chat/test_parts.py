"""Parts of text with tokenizers that put a space before text: it is put where the library itself puts it."""

import io
import json
import re
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hsap.data.tokenizer import load_tokenizer
from tests.data.chat.test_template import BOS, EOS, SOURCES, template_of
from tests.data.chat.told import conversation, told

WORDS = [*"▁Hiyo[]INST/", "Hi", "▁Hi", "▁y", "▁yo", "▁[", "IN", "INS", "INST"]
MERGES = ["▁ [", "H i", "▁ Hi", "▁ y", "▁y o", "I N", "IN S", "INS T"]


def metaspace(path, pre_tokenizer=None, normalizer=None):
    """Write a tokenizer.json of SentencePiece's kind."""
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    backend = Backend(models.BPE(vocab, [tuple(merge.split()) for merge in MERGES], unk_token="<unk>"))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in ("<unk>", "<s>", "</s>")])
    backend.save(str(path))
    return path


KINDS = {
    "first": lambda: {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False)},
    "always": lambda: {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always", split=False)},
    "never": lambda: {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="never", split=False)},
    "prepend": lambda: {"normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])},
    "prepend alone": lambda: {"normalizer": normalizers.Prepend("▁")},
    "sequence": lambda: {
        "pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first", split=False)])
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_whole_text_cut_at_control_tokens(tmp_path, kind):
    """Cut between words, parts have the tokens that the library gives for the whole."""
    path = metaspace(tmp_path / "tokenizer.json", **KINDS[kind]())
    tokenizer, backend = load_tokenizer(path), Backend.from_file(str(path))
    text = "<s>[INST]Hi[/INST]Hi</s><s>Hi" if kind == "prepend alone" else "<s>[INST] Hi [/INST] Hi yo</s><s>Hi yo"
    tokens, after = [], "start"
    for part in filter(None, re.split(r"(</?s>)", text)):
        control = tokenizer.control_tokens.get(part)
        head, mark, tail = part.partition("[/INST]")
        tokens += [control.id] if control else tokenizer.encode_part(head + mark, after)
        tokens += tokenizer.encode_part(tail, "text")
        after = "control" if control else "text"
    assert tokens == backend.encode(text, add_special_tokens=False).ids
    assert 0 not in tokens


def test_sentencepiece_parts_put_no_space_inside_text(tmp_path):
    lines = ["[INST] how are you [/INST] I am fine", "what is it", "</s> <s>"] * 20
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=282, byte_fallback=True, minloglevel=2
    )
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model.getvalue())
    tokenizer = load_tokenizer(path)
    direct = sentencepiece.SentencePieceProcessor(model_file=str(path))
    head, tail = "[INST] how are you [/INST]", " I am fine"
    assert tokenizer.encode_part(head, "control") == direct.encode(head)
    assert tokenizer.encode_part(head, "start") + tokenizer.encode_part(tail, "text") == direct.encode(head + tail)
    assert direct.decode(tokenizer.encode_part("fine", "text")) == "fine"
    assert direct.id_to_piece(tokenizer.encode_part("fine", "text")[0])[0] != "▁"
    assert set(tokenizer.control_tokens) == {"<s>", "</s>"} and (tokenizer.bos, tokenizer.eos) == ("<s>", "</s>")

    template = template_of(SOURCES["mistral"], tokenizer)
    made = conversation(("u", "what is </s>"), ("a", "<s> it"), ("u", "how"), ("a", "fine"))
    encoded = template.encode(made, "d:1")
    runs = told(tokenizer, encoded.tokens, encoded.trained)
    assert runs == [
        (BOS, False), ("[INST] what is </s> [/INST]", False), ("<s> it", True), (EOS, True),
        ("[INST] how [/INST]", False), ("fine", True), (EOS, True),
    ]  # fmt: skip


def test_words_that_the_tokenizer_reads_as_eos_are_rejected(tmp_path):
    """A vocabulary in which EOS is a word like any other can't keep it out of text."""
    from hsap.data.rejected import Rejected

    backend = Backend(models.WordLevel({word: i for i, word in enumerate(["?", "</s>", "a", "b"])}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = Path(tmp_path / "tokenizer.json")
    backend.save(str(path))
    template = template_of("{% for m in messages %}{{ m.content + ' ' + eos_token }}{% endfor %}", load_tokenizer(path))
    assert template.encode(conversation(("u", "a"), ("a", "b")), "d:1").tokens.tolist() == [2, 1, 3, 1]
    with pytest.raises(Rejected, match="d:1: words that the tokenizer reads as a control token"):
        template.encode(conversation(("u", "a </s> b"), ("a", "b")), "d:1")
    assert json.loads(path.read_text())["added_tokens"] == []
