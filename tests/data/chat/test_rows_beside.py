"""Fields beside a chat: what says the same twice is read once, what says something else is named or rejected."""

import numpy as np
import pytest

from hsap.data.chat.conversation import Turn
from hsap.data.document import Rejected
from tests.data.chat.test_rows import TREE, WEATHER, a, read, said, u
from tests.data.chat.told import conversation


def test_what_says_the_same_twice_or_nothing_is_read():
    turn = {"role": "assistant", "from": "gpt", "speaker": "Ada", "content": "x", "text": "", "value": "x"}
    turn |= {"images": [], "audio": None, "loss_weight": 1, "train": True, "weight": 1.0, "tools": []}
    turn |= {"reasoning": "r", "thinking": "r"}
    (got,) = read({"messages": [*said(u), turn], "tools": {}, "functions": False, "images": [], "loss_weight": 1})
    assert got.turns[1] == Turn("assistant", "x", 1.0, "r") and got.tools == () and got.unread == ()
    part = {"type": None, "text": "x", "image": None, "content": "", "loss_weight": 1, "tool_calls": []}
    (got,) = read({"messages": [*said(u), {"role": "assistant", "content": [part], "loss_weight": 1}]})
    assert got.turns[1] == Turn("assistant", "x", 1.0)
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}, "x"], "reasoning_content": "r"}
    assert read({"messages": [*said(u), thought]})[0].turns[1] == Turn("assistant", "x", reasoning="r")


@pytest.mark.parametrize("tools", [None, False, "", [], {}, "[]", "{}", "null", "false"])
def test_no_tools_in_every_form(tools):
    assert read({"messages": said(u, a), "tools": tools}) == (conversation(("u", "q"), ("a", "x")),)


def test_an_array_where_text_or_tools_are_due_is_rejected():
    for field in ("tools", "system"):
        with pytest.raises(Rejected):
            read({"messages": said(u, a), field: np.array([1, 2])})


UNREAD = [
    ({"messages": said(u, a), "prompt": "q", "answer": "x", "completion": said(a), "instruction": {"value": " q"}}, ()),
    ({"messages": said(u, ("assistant", "it is 42")), "problem": "q", "answer": "42"}, ()),
    ({"messages": said(u, a), "output": "y"}, ("output",)),
    ({"messages": said(u, a), "instruction": "p", "input": "i", "output": "y"}, ("instruction", "input", "output")),
    ({"messages": said(u, a), "conversations": said(u, ("assistant", "y"))}, ("conversations",)),
    ({"messages": said(u, a), "conversation": said(u, a)}, ()),
    ({"messages": said(u, a), "history": [["b", "c"]]}, ("history",)),
    ({"messages": said(u, a), "chosen": "good"}, ("chosen",)),
    ({"messages": said(u, a), "tools": [WEATHER], "functions": [WEATHER]}, ()),
    ({"messages": said(u, a), "tools": [WEATHER], "functions": [{"name": "other"}]}, ("functions",)),
    ({"instruction": "q", "output": "x", "response": "y", "query": "q"}, ("response",)),
    ({"instruction": "q", "output": "x", "answers": {"text": ["y"]}}, ("answers",)),
    ({"prompt": "q", "chosen": "good", "rejected": "bad", "response": "other", "answers": ["good"]}, ("response",)),
    ({"prompt": "q", "input": "i", "chosen": said(u, a), "rejected": said(u, ("assistant", "y"))}, None),
    ({"prompt": TREE, "system": "s", "messages": None}, ("system",)),
    ({"messages": [], "instruction": "q", "output": "x"}, ()),
    ({"instruction": "", "prompt": "q", "output": "x"}, ()),
]  # fmt: skip


@pytest.mark.parametrize(("row", "unread"), UNREAD)
def test_fields_that_say_something_else_than_the_chat_are_named(row, unread):
    if unread is None:
        with pytest.raises(Rejected, match="a prompt other than what its answers begin with"):
            read(row)
    else:
        assert read(row)[0].unread == unread
