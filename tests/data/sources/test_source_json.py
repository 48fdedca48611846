"""JSON lines: what is read, and what every kind of bad line gets."""

import gzip
import json

import pytest

from hsap.data import sources
from hsap.data.fields import Fields

GOOD = b'{"id": "a", "text": "one"}\n'


def write(path, content: bytes):
    path.write_bytes(content)
    return path


def test_rows_are_read_in_order_with_ids_and_places(tmp_path):
    path = write(tmp_path / "d.jsonl", GOOD + b'\n{"text": "tw\xc3\xb6"}\n{"id": 7, "text": "three"}')
    documents = list(sources.open(path))
    assert [d.text for d in documents] == ["one", "twö", "three"]
    assert [d.id for d in documents] == ["a", "d.jsonl:3", "7"]
    assert [d.where for d in documents] == [f"{path}:{n}" for n in (1, 3, 4)]


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.jsonl", "d.anything"])
def test_gzip_is_told_by_content(tmp_path, name):
    path = write(tmp_path / name, gzip.compress(GOOD))
    assert [d.text for d in sources.open(path)] == ["one"]


def test_a_directory_is_read_by_name_and_other_files_are_left_alone(tmp_path):
    write(tmp_path / "b.jsonl", b'{"text": "second"}\n')
    write(tmp_path / "c.json.gz", gzip.compress(b'{"text": "third"}\n'))
    write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "first"}\n'))
    write(tmp_path / "manifest.json", b"not a line of data")
    (tmp_path / "deeper.jsonl").mkdir()
    assert [d.text for d in sources.open(tmp_path)] == ["first", "second", "third"]


def test_empty_documents_are_counted_anew_on_every_walk(tmp_path):
    source = sources.open(write(tmp_path / "d.jsonl", b'{"text": ""}\n' + GOOD + b'{"input_ids": []}\n'))
    for _ in range(2):
        assert len(list(source)) == 1
        assert source.tally.num_empty == 2


def test_text_wins_over_tokens_unless_only_tokens_are_wanted(tmp_path):
    path = write(tmp_path / "d.jsonl", b'{"text": "one", "input_ids": [3, 1, 2]}\n')
    (text,) = sources.open(path)
    (tokens,) = sources.open(path, Fields(text=None))
    assert (text.text, text.tokens) == ("one", None)
    assert (tokens.text, tokens.tokens.tolist()) == (None, [3, 1, 2])


def test_field_names_are_settings(tmp_path):
    path = write(tmp_path / "d.jsonl", b'{"key": "k", "content": "one"}\n{"key": "l", "ids": [5]}\n')
    documents = list(sources.open(path, Fields(text="content", tokens=("ids",), id="key")))
    assert [(d.id, d.text, d.tokens is None) for d in documents] == [("k", "one", True), ("l", None, False)]


def test_a_byte_order_mark_is_no_error(tmp_path):
    assert [d.text for d in sources.open(write(tmp_path / "d.jsonl", b"\xef\xbb\xbf" + GOOD))] == ["one"]


BAD_LINES = {
    "cut JSON": (b'{"text": "one', "not valid JSON"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "not valid JSON"),
    "deep nesting": (b"[" * 100_000, "not valid JSON"),
    "endless number": (b'{"tokens": [' + b"1" * 5000 + b"]}", "not valid JSON"),
    "array": (b'["text"]', "JSON list, not an object"),
    "null": (b"null", "JSON NoneType, not an object"),
    "no field": (b'{"body": "one"}', "none of the fields 'text', 'tokens', 'input_ids', only body"),
    "no field at all": (b"{}", "none of the fields"),
    "null text": (b'{"text": null}', "'text' is a NoneType, not a string"),
    "number as text": (b'{"text": 3}', "'text' is a int, not a string"),
    "list as text": (b'{"text": ["a"]}', "'text' is a list, not a string"),
    "half a surrogate pair": (b'{"text": "ab\\ud800"}', "surrogate pair (character 3)"),
    "bad UTF-8": (b'{"text": "\xff"}', "not UTF-8 (byte 0xff at column 11)"),
    "Latin-1": ('{"text": "é"}'.encode("latin-1"), "not UTF-8"),
    "UTF-16": ('{"text": "a"}'.encode("utf-16"), "not UTF-8"),
    "float token": (b'{"tokens": [1, 2.0]}', "'tokens' is not a list of integers"),
    "boolean token": (b'{"tokens": [1, true]}', "'tokens' is not a list of integers"),
    "nested tokens": (b'{"tokens": [[1]]}', "'tokens' is not a list of integers"),
    "token string": (b'{"input_ids": "1 2"}', "'input_ids' is not a list of integers"),
    "token beyond 64 bits": (b'{"tokens": [99999999999999999999]}', "'tokens' is not a list of integers"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_corrupt_line_is_named_by_file_and_line(tmp_path, bad, packed):
    line, message = BAD_LINES[bad]
    content = GOOD + b"\n" + line + b"\n" + GOOD
    path = write(tmp_path / "d.jsonl", gzip.compress(content) if packed else content)
    documents = iter(sources.open(path))
    assert next(documents).text == "one"
    with pytest.raises(ValueError) as error:
        next(documents)
    assert str(error.value).startswith(f"{path}:3: ")
    assert message in str(error.value)


def _noise(rows: int) -> bytes:
    lines = [json.dumps({"text": f"row {i} {i * 7919 % 1009}"}) + "\n" for i in range(rows)]
    return gzip.compress("".join(lines).encode())


DAMAGE = {
    "cut short": lambda content: content[: len(content) // 2],
    "no trailer": lambda content: content[:-8],
    "wrong checksum": lambda content: content[:-8] + b"\0" * 8,
    "bad block": lambda content: content[:2000] + b"\xff" * 200 + content[2200:],
    "header alone": lambda content: content[:10],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_gzip_is_named_by_file_and_line(tmp_path, damage):
    path = write(tmp_path / "d.jsonl.gz", DAMAGE[damage](_noise(2000)))
    seen = 0
    with pytest.raises(ValueError, match="gzip stream is cut short or damaged") as error:
        for _ in sources.open(path):
            seen += 1
    assert str(error.value).startswith(f"{path}:{seen + 1}: ")


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b'{"text": ""}\n', gzip.compress(b"", mtime=0)], ids=["empty", "blank", "textless", "gz"]
)
def test_a_data_set_without_documents_is_refused(tmp_path, content):
    path = write(tmp_path / "d.jsonl", content)
    with pytest.raises(ValueError, match=r"holds no document.*data\.path"):
        list(sources.open(path))


def test_an_empty_directory_and_a_missing_path_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no file that ends in .jsonl.*data\.path"):
        sources.open(tmp_path)
    with pytest.raises(ValueError, match=r"doesn't exist; set data\.path"):
        sources.open(tmp_path / "nothing.jsonl")
