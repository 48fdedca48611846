"""Fields beside a chat: what says the same twice is read once, what says something else is named or rejected."""

import functools
import random

import numpy as np
import pytest

from hsap.data.chat.rows import ChatFields, chat_of
from hsap.data.chat.template import load_template
from hsap.data.document import Turn
from hsap.data.fields import Fields, Row, documents_of
from hsap.data.rejected import Rejected
from hsap.data.tokenise import tokenise
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


def test_half_a_surrogate_pair_anywhere_is_rejected(bytes_tokenizer):
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": "\ud800"}}]}
    template = load_template("chatml", bytes_tokenizer)
    for row in (
        {"instruction": "q", "input": "\ud800", "output": "x"},
        {"messages": [*said(u), call, *said(("tool", "t"), a)]},
    ):
        with pytest.raises(Rejected, match="half of a surrogate pair, which is no text"):
            template.sample("1", read(row)[0], "d.jsonl:3")


ATOMS = [None, "", " ", "a", "q", "\ud800", "<|im_end|>", "[1]", '{"x": "\\ud800"}', 0, 1, -1, 0.5, 2**70, float("nan")]
ATOMS += [True, False, [], {}, [None], [[1]], [{}], ["a"], [1, 2], b"x", np.array([1, 2]), np.array([]), np.array(True)]
INNER = ("role", "from", "content", "value", "text", "type", "loss_weight", "train", "reasoning", "thinking", "name")
INNER += ("tool_calls", "function_call", "tool_call_id", "images", "tools", "replies", "parent_id", "id", "rank")
CALLS = [[{"name": "f"}], {"name": "f", "arguments": "{"}, [{"function": {"name": "f", "arguments": "{}"}, "id": 1}]]


def odd_row(rng: random.Random) -> dict:
    """A row of a usual shape with some odd fields, in it and in its turns."""

    def odd(values: dict, names) -> dict:
        for _ in range(rng.choice([0, 0, 0, 1, 2])):
            values[rng.choice(names)] = rng.choice([*ATOMS, *CALLS, said(u, a)])
        return values

    def turns() -> list:
        return [odd({"role": role, "content": "x"}, INNER) for role in ["user", "assistant"] * rng.randint(1, 2)]

    def tree(depth: int) -> dict:
        replies = [tree(depth + 1) for _ in range(rng.choice([0, 1, 2]) if depth < 3 else 0)]
        return odd({"role": ("user", "assistant")[depth % 2], "text": "x", "replies": replies}, INNER)

    def linked() -> list:
        return [turn | {"id": i, "parent_id": rng.choice([None, i - 1, [1]])} for i, turn in enumerate(turns())]

    shapes = [{"messages": turns()}, {"instruction": "q", "input": "i", "output": "x"}, {"prompt": tree(0)}]
    shapes += [{"prompt": "x", "chosen": turns(), "rejected": turns()}, {"messages": linked()}, {"question": "q"}]
    shapes += [{"input_ids": [1, 2], "labels": [-100, 2], "loss_mask": [1, 1]}, {"text": "t"}]
    names = ("text", "tokens", "labels", "loss_mask", "attention_mask", "loss_weight", "images", "id")
    return odd(rng.choice(shapes), (*names, *ChatFields().names))


def test_a_row_of_any_kind_becomes_samples_or_is_refused_at_its_place(bytes_tokenizer):
    rng, given, rejected = random.Random(5), 0, set()
    templates = [load_template(name, bytes_tokenizer, "all") for name in ("chatml", "mistral")]
    for number in range(3000):
        row, names = odd_row(rng), ChatFields(tree=rng.choice(["all", "best"]))
        fields = Fields(chat_of=functools.partial(chat_of, fields=names), chats_first=rng.random() < 0.5)
        try:
            for document in documents_of(Row(row, f"d:{number}", "i"), fields):
                sample = tokenise(document, bytes_tokenizer, rng.choice(templates) if document.chat else None)
                assert sample.trained is None or sample.trained.shape == sample.tokens.shape
                given += 1
        except ValueError as error:
            assert str(error).startswith(f"d:{number}: "), row
            rejected.add(getattr(error, "reason", None))
    assert given > 500 and len(rejected) > 25
