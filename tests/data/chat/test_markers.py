"""Markers that a tokenizer reads as words are named, with how many tokens each takes."""

import pytest

from hsap.data.chat import markers
from hsap.data.chat.template import load_template
from hsap.data.tokenizer import load_tokenizer


def test_known_markers_are_no_news(bytes_tokenizer):
    template = load_template("chatml", bytes_tokenizer)
    assert markers.split_markers(template) == {} and markers.told(template) == ""


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{{ '[INST] ' }}", {"[INST]": 6}),
        ("{{ messages[0].content }} [1] a<b|c> <think> <|im_end|>", {}),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}<|turn|>", {"<|turn|>": 8}),
        ("{% for m in messages %}<|im_start|>{{ m.role }}<start_of_turn>{% endfor %}", {"<start_of_turn>": 15}),
        ("{{ messages[9] + 1 }}[INST]", {}),
    ],
)
def test_what_looks_like_a_marker_is_counted_in_tokens(bytes_tokenizer, tmp_path, source, found):
    (tmp_path / "own.jinja").write_text(source)
    template = load_template(str(tmp_path / "own.jinja"), bytes_tokenizer)
    assert markers.split_markers(template) == found, "every byte is a token of this tokenizer"
    for marker, count in found.items():
        assert f"{marker} ({count} tokens)" in markers.told(template)


def test_an_ordinary_token_of_its_own_is_fine_and_unknown_ones_are_told(tmp_path):
    path = tmp_path / "tokenizer.json"
    save_words(path, ["<|im_end|>"])
    template = load_template("chatml", load_tokenizer(str(path)))
    assert markers.split_markers(template) == {"<|im_start|>": 1}
    assert "words: <|im_start|> (unknown); right" in markers.told(template)


def test_markers_of_any_characters_and_number_are_told_in_a_short_paragraph(bytes_tokenizer, tmp_path):
    odd = ["<|\x1b[2J|>", f"<|{'long' * 5000}|>", *(f"<|{i}|>" for i in range(2000))]
    (tmp_path / "own.jinja").write_text("".join(odd))
    told = markers.told(load_template(str(tmp_path / "own.jinja"), bytes_tokenizer))
    assert told.isprintable() and len(told) < 2000
    assert r"<|\x1b[2J|> (8 tokens), " in told and " and 1990 more; " in told


def save_words(path, words):
    """Save a tokenizer that knows these words only."""
    from tokenizers import Tokenizer, models

    vocabulary = {word: i for i, word in enumerate(["<unk>", *words])}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(path))
