"""Fields: what document a row is, and the one place where conversations are asked for."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from hsap.data import sources
from hsap.data.chat.rows import ChatFields, chat_of
from hsap.data.fields import CHAT_BESIDE, Fields, Row, documents_of
from hsap.data.rejected import Rejected
from hsap.data.sources.mixture import Mixture


def documents(values, fields=None):
    return documents_of(Row(values, "d.jsonl:1", "d.jsonl:1"), fields or Fields())


class Said(str):
    """A chat that is a word."""

    unread = ()


def test_a_row_without_text_and_tokens_is_offered_as_a_chat(tmp_path):
    def chat_of(row, where):
        if row["messages"] == "bad":
            raise Rejected(where, "turns out of order", "the second")
        return tuple(map(Said, row["messages"]))

    (tmp_path / "d.jsonl").write_text(
        '{"messages": ["a"], "id": "x"}\n{"messages": "bad"}\n{"messages": ["b", "c"]}\n'
        '{"text": "wins", "messages": ["d"]}\n{"messages": "bad"}\n'
    )
    source = sources.open(tmp_path / "d.jsonl", Fields(chat_of=chat_of))
    assert [(d.id, d.chat, d.text) for d in source] == [
        ("x", "a", None),
        ("d.jsonl:3", "b", None),
        ("d.jsonl:3#1", "c", None),
        ("d.jsonl:4", None, "wins"),
    ]
    assert source.tally.counts == {"turns out of order": 2}
    left_out = [one for one in source.tally.examples if one.reason == "turns out of order"]
    assert [one.where for one in left_out] == [f"{tmp_path / 'd.jsonl'}:{line}" for line in (2, 5)]
    assert source.tally.told().startswith("2 left out: 2 for turns out of order (")
    first = sources.open(tmp_path / "d.jsonl", Fields(chat_of=chat_of, chats_first=True))
    assert [document.chat for document in first] == ["a", "b", "c", "d"]
    (text,) = documents({"text": "a"}, Fields(chat_of=lambda *_: (), chats_first=True))
    assert text.text == "a"


def test_a_null_or_an_empty_field_is_not_there():
    """Rows that share their columns have nulls in those of the others."""
    for empty in ({"text": "", "tokens": [1, 2]}, {"text": "", "tokens": [], "input_ids": np.array([1, 2])}):
        (tokens,) = documents(empty)
        assert tokens.tokens.tolist() == [1, 2] and tokens.text is None
    fields = Fields(chat_of=lambda row, _: (Said(row["messages"]),) if row["messages"] else ())
    (chat,) = documents({"text": "", "tokens": [], "messages": "m"}, fields)
    assert chat.chat == "m" and chat.text is None
    (nothing,) = documents({"text": None, "tokens": [], "messages": ""}, fields)
    assert nothing.tokens.tolist() == []
    (tokens,) = documents({"text": None, "tokens": [1, 2], "input_ids": None})
    assert tokens.tokens.tolist() == [1, 2] and tokens.text is None
    (chat,) = documents(
        {"text": None, "tokens": None, "messages": "m"}, Fields(chat_of=lambda row, _: (Said(row["messages"]),))
    )
    assert chat.chat == "m"
    with pytest.raises(ValueError, match=r"d.jsonl:1: field 'text' is a NoneType, not a string"):
        documents({"text": None, "messages": None}, Fields(chat_of=lambda *_: ()))


def test_all_columns_are_read_where_a_row_may_be_a_chat():
    assert Fields().wanted(["messages", "tools", "id"]) == ["messages", "tools", "id"]
    assert Fields().wanted(["text", "messages", "id"]) == ["text", "id"]
    assert Fields(chats_first=True).wanted(["text", "messages", "id"]) == ["text", "messages", "id"]
    beside = Fields(chat_names=("messages", "tools"))
    assert beside.wanted(["text", "messages", "url", "id"]) == ["text", "messages", "id"]
    assert Fields(text=None).wanted(["text", "input_ids", "labels", "url"]) == ["input_ids", "labels"]


@pytest.mark.parametrize("kind", [list, np.array])
def test_masks_and_labels_tell_targets(kind):
    (both,) = documents({"input_ids": kind([5, 6, 7]), "labels": kind([-100, 6, 7]), "loss_mask": kind([1, 1, 1])})
    assert both.trained.tolist() == [False, True, True]
    (mask,) = documents({"input_ids": kind([5, 6, 7]), "loss_mask": kind([1, 0, 0])})
    assert mask.trained.tolist() == [True, False, False]
    (free,) = documents({"input_ids": kind([5, 6, 7]), "labels": kind([-100, 6, 7])}, Fields(labels=None))
    assert free.trained is None
    (padded,) = documents(
        {"input_ids": kind([0, 6, 7]), "attention_mask": kind([0, 1, 1]), "labels": kind([-100, 6, -100])}
    )
    assert (padded.tokens.tolist(), padded.trained.tolist()) == ([6, 7], [True, False])
    (nothing,) = documents({"input_ids": kind([0, 0]), "attention_mask": kind([0, 0])})
    assert nothing.tokens.tolist() == []


def test_masks_and_labels_that_contradict_each_other_leave_the_row_out():
    def ids(**more):
        return documents({"input_ids": [4, 5, 6, 7], **more})[0]

    for more, told in (
        ({"labels": [4, 5, 6, 7], "loss_mask": [0, 0, 1, 1]}, "labels and loss_mask that contradict each other"),
        ({"labels": [-100] * 4, "assistant_masks": [0, 1, 0, 0]}, "labels and assistant_masks that contradict"),
        ({"loss_mask": [1, 1, 1, 1], "assistant_masks": [1, 1, 1, 0]}, "loss_mask and assistant_masks that contradict"),
    ):
        with pytest.raises(Rejected, match=told) as error:
            ids(**more)
        assert error.value.where == "d.jsonl:1"
    # Of padding and of the first token, which nothing predicts, they may say what they like.
    padded = ids(labels=[-100, 5, 6, -100], loss_mask=[1, 1, 1, 1], attention_mask=[1, 1, 1, 0])
    assert padded.tokens.tolist() == [4, 5, 6] and padded.trained.tolist() == [False, True, True]
    left = ids(labels=[-100, 5, 6, 7], loss_mask=[1, 0, 1, 1], attention_mask=[0, 1, 1, 1])
    assert left.tokens.tolist() == [5, 6, 7] and left.trained.tolist() == [True, True, True]


def test_truth_values_are_masks_and_no_ids():
    for values in ([True, False], np.array([True, False])):
        (masked,) = documents({"input_ids": [5, 6], "loss_mask": values})
        assert masked.trained.tolist() == [True, False]
        for field in ("input_ids", "labels"):
            with pytest.raises(ValueError, match=f"d.jsonl:1: field '{field}' is not a list of integers"):
                documents({"input_ids": [5, 6], field: values})


CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_of_a_row_is_not_trained_is_counted_and_told(tmp_path, form):
    """Alpaca's own rows have the chat once more as text: which of both is trained is said."""
    names = ("text", "tokens", "messages", "output", "url")
    rows = [{"text": "t", **CHAT}, {"text": "t", "messages": CHAT["messages"][:1]}, {"text": "t", "output": "o"}]
    rows += [{"tokens": [1, 2], **CHAT}, {**CHAT, "output": "a"}, {**CHAT, "output": "b"}]
    rows = [{name: row.get(name) for name in names} for row in rows]
    path = tmp_path / f"d.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    chats = ChatFields()
    fields = Fields(chat_of=functools.partial(chat_of, fields=chats), chat_names=chats.names)
    source = sources.open(path, fields)
    given = list(source)
    assert [(one.text, one.chat is not None) for one in given[:4]] == [("t", False)] * 3 + [(None, False)]
    assert [one.chat is not None for one in given[4:]] == [True, True]
    text, tokens = CHAT_BESIDE.format("text"), CHAT_BESIDE.format("tokens")
    output = "fields beside the chat that say something else (output)"
    assert source.tally.notes == {text: 2, tokens: 1, output: 1} and not source.tally.counts
    told = source.tally.told()
    first = f"{path}:1" if form == "jsonl" else f"{path}:row 0"
    assert told.startswith("4 trained only in part: 2 for a chat beside 'text', which is") and first in told
    mixed = Mixture({"a": source}, {"a": 1.0})
    assert len(list(mixed)) == 6 and mixed.tally.told() == told
    first = sources.open(path, dataclasses.replace(fields, chats_first=True))
    assert [one.chat is not None for one in first] == [True, False, True, True, True]
    assert first.tally.counts == {"a conversation that ends without an answer": 1}
    assert first.tally.notes == {output: 1}
