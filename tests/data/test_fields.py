"""Fields: what document a row is, and the one place where conversations are asked for."""

import numpy as np
import pytest

from hsap.data import sources
from hsap.data.document import Rejected
from hsap.data.fields import Fields, Row, documents_of


def documents(values, fields=None):
    return documents_of(Row(values, "d.jsonl:1", "d.jsonl:1"), fields or Fields())


def test_a_row_without_text_and_tokens_is_offered_as_a_chat(tmp_path):
    def chat_of(row, where):
        if row["messages"] == "bad":
            raise Rejected(where, "turns out of order", "the second")
        return tuple(row["messages"])

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
    assert [one.where for one in source.tally.examples] == [f"{tmp_path / 'd.jsonl'}:{line}" for line in (2, 5)]
    assert source.tally.told().startswith("2 left out: 2 for turns out of order (")
    first = sources.open(tmp_path / "d.jsonl", Fields(chat_of=chat_of, chats_first=True))
    assert [document.chat for document in first] == ["a", "b", "c", "d"]
    (text,) = documents({"text": "a"}, Fields(chat_of=lambda *_: (), chats_first=True))
    assert text.text == "a"


def test_a_null_is_not_there():
    """Rows that share their columns have nulls in those of the others."""
    (tokens,) = documents({"text": None, "tokens": [1, 2], "input_ids": None})
    assert tokens.tokens.tolist() == [1, 2] and tokens.text is None
    (chat,) = documents(
        {"text": None, "tokens": None, "messages": "m"}, Fields(chat_of=lambda row, _: (row["messages"],))
    )
    assert chat.chat == "m"
    with pytest.raises(ValueError, match=r"d.jsonl:1: field 'text' is a NoneType, not a string"):
        documents({"text": None, "messages": None}, Fields(chat_of=lambda *_: ()))


def test_all_columns_are_read_where_a_row_may_be_a_chat():
    assert Fields().wanted(["messages", "tools", "id"]) == ["messages", "tools", "id"]
    assert Fields().wanted(["text", "messages", "id"]) == ["text", "id"]
    assert Fields(chats_first=True).wanted(["text", "messages", "id"]) == ["text", "messages", "id"]
    assert Fields(text=None).wanted(["text", "input_ids", "labels", "url"]) == ["input_ids", "labels"]


@pytest.mark.parametrize("kind", [list, np.array])
def test_masks_and_labels_tell_targets(kind):
    (both,) = documents({"input_ids": kind([5, 6, 7]), "labels": kind([-100, 6, 7]), "loss_mask": kind([1, 0, 0])})
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
