"""Rows of every usual shape become the same conversations; what is no conversation is rejected, by reason."""

import json
from collections import Counter
from pathlib import Path

import pytest

from hsap.data.chat.rows import ChatFields, chat_of
from hsap.data.chat.template import load_template
from hsap.data.document import SharedQuestion, Turn
from hsap.data.rejected import Rejected
from hsap.data.tokenizer import load_tokenizer
from tests.data.chat.told import conversation, told

FILES = Path(__file__).parents[1] / "files"
DEMO = Path(__file__).parents[3] / "datasets" / "demo"
FIELDS = ChatFields()
u, a = ("user", "q"), ("assistant", "x")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def read(row, fields=FIELDS):
    return chat_of(row, "d.jsonl:3", fields)


def said(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


SAME = {
    "messages": {"messages": said(("system", "be kind"), ("user", "hi\nthere"), ("assistant", "hello"))},
    "developer": {"messages": said(("developer", "be kind"), ("user", "hi\nthere"), ("assistant", "hello"))},
    "parts": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "value": "kind"}]},
            {"role": "user", "content": ["hi\n", {"text": "there"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "hello"}]},
        ]
    },
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": "be kind"},
            {"from": "human", "value": "hi\nthere"},
            {"from": "gpt", "value": "hello"},
        ]
    },
    "sharegpt with system beside": {
        "system": "be kind",
        "conversations": [{"from": "User", "value": "hi\nthere"}, {"from": "chatgpt", "value": "hello"}],
    },
    "alpaca": {"instruction": "hi", "input": "there", "output": "hello", "system": "be kind", "history": []},
    "prompt": {"prompt": "hi\nthere", "completion": "hello", "system_prompt": "be kind"},
    "prompt of turns": {
        "prompt": said(("system", "be kind"), ("user", "hi\nthere")),
        "completion": said(("assistant", "hello")),
    },
    "one answer": {"prompt": "hi\nthere", "answers": ["hello"], "system": "be kind"},
    "tree": {
        "system": "no place for it",
        "prompt": {"role": "system", "text": "be kind", "replies": [
            {"role": "prompter", "text": "hi\nthere", "replies": [{"role": "assistant", "text": "hello"}]}
        ]},
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SAME)
def test_one_conversation_in_every_shape(shape):
    assert read(SAME[shape]) == (conversation(("s", "be kind"), ("u", "hi\nthere"), ("a", "hello")),)


@pytest.mark.parametrize("name", ["human", "user", "User ", "prompter"])
@pytest.mark.parametrize("other", ["gpt", "assistant", "model", "chatgpt", "bot"])
def test_speakers_under_any_usual_name(name, other):
    row = {"conversations": [{"from": name, "value": "a"}, {"from": other, "value": "b"}]}
    assert read(row) == (conversation(("u", "a"), ("a", "b")),)


def test_rows_that_are_no_chat():
    for row in ({}, {"text": "a"}, {"text": "a", "parent_id": "t3"}, {"prompt": "a"}, {"output": "b"}, {"answers": []},
                {"question": "a", "answers": {"text": ["b"]}}, {"chosen": "a"}):  # fmt: skip
        assert read(row) == ()


def test_tools_calls_and_answers_of_tools():
    call = {"name": "weather", "arguments": {"city": "Oslo"}}
    turns = (
        Turn("user", "w?"),
        Turn("assistant", "", tool_calls=(call,)),
        Turn("tool", "rain"),
        Turn("assistant", "it rains"),
    )
    sharegpt = {
        "tools": json.dumps([WEATHER["function"]]),
        "conversations": [
            {"from": "human", "value": "w?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "rain"},
            {"from": "gpt", "value": "it rains"},
        ],
    }
    openai = {
        "tools": [WEATHER],
        "messages": [
            {"role": "user", "content": "w?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "it rains"},
        ],
    }  # fmt: skip
    for row in (sharegpt, openai):
        (got,) = read(row)
        assert got.turns == turns and got.tools == (WEATHER,)
    named = {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"}
    openai["messages"][1]["tool_calls"][0]["id"] = "c1"
    openai["messages"][2] = named
    (got,) = read(openai)
    assert got.turns[1].tool_calls[0]["id"] == got.turns[2].call_id == "c1" and got.turns[2].name == "weather"


def test_weights_and_reasoning():
    row = {
        "messages": [
            {"role": "user", "content": "a", "loss_weight": 0.0},
            {"role": "assistant", "content": "b", "reasoning_content": "hm", "weight": 1},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "d"}]},
            {"role": "user", "content": "e"},
            {"role": "assistant", "content": "f", "train": False},
        ]
    }
    (got,) = read(row)
    assert [turn.weight for turn in got.turns] == [0.0, 1.0, None, None, None, 0.0]
    assert [turn.reasoning for turn in got.turns] == [None, "hm", None, "so", None, None]


def test_alpaca_history_comes_first():
    row = {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]}
    assert read(row) == (conversation(("u", "a"), ("a", "b"), ("u", "c"), ("a", "d")),)


ANSWERS = {
    "texts": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "turns": {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "good"},
              "rejected": {"from": "gpt", "value": "bad"}},
    "whole conversations": {"prompt": "q", "chosen": said(("user", "q"), ("assistant", "good")),
                            "rejected": said(("user", "q"), ("assistant", "bad"))},
    "lists of one turn": {"prompt": said(("user", "q")), "chosen": said(("assistant", "good")),
                          "rejected": said(("assistant", "bad"))},
    "a list": {"question": "q", "answers": ["good", "bad"]},
    "alpaca": {"instruction": "q", "input": "", "chosen": "good", "rejected": ["bad"]},
}  # fmt: skip


@pytest.mark.parametrize("shape", ANSWERS)
def test_one_question_with_answers_in_every_shape(shape):
    answers = (conversation(("a", "good")).turns, conversation(("a", "bad")).turns)
    assert read(ANSWERS[shape]) == (SharedQuestion(conversation(("u", "q")).turns, answers),)
    best = ChatFields(answers="best")
    assert read(ANSWERS[shape], best) == (conversation(("u", "q"), ("a", "good")),)


def test_answers_of_several_turns_share_what_comes_before():
    row = {
        "system": "s",
        "chosen": said(("user", "q"), ("assistant", "same"), ("user", "r"), ("assistant", "x"), ("user", "t"), a),
        "rejected": said(("user", "q"), ("assistant", "same"), ("user", "r"), ("assistant", "y")),
    }  # fmt: skip
    (got,) = read(row)
    assert got.question == conversation(("s", "s"), ("u", "q"), ("a", "same"), ("u", "r")).turns
    assert [[turn.content for turn in answer] for answer in got.answers] == [["x", "t", "x"], ["y"]]


def node(role, text, *replies, **more):
    return {"role": role, "text": text, "replies": list(replies), **more}


TREE = node(
    "prompter", "q",
    node("assistant", "b", node("prompter", "c", node("assistant", "d"), node("assistant", "e", rank=0)), rank=1),
    node("assistant", "f", node("prompter", "unanswered"), rank=0),
)  # fmt: skip


def test_ways_through_a_tree_train_each_answer_once():
    got = read({"prompt": TREE})
    assert [[(turn.content, turn.weight) for turn in one.turns] for one in got] == [
        [("q", None), ("f", None)],
        [("q", 0.0), ("b", None), ("c", None), ("e", None)],
        [("q", 0.0), ("b", 0.0), ("c", 0.0), ("d", None)],
    ]
    assert read({"prompt": TREE}, ChatFields(tree="best")) == (conversation(("u", "q"), ("a", "f")),)
    listed = [
        {"id": "1", "parent_id": None, "role": "user", "content": "q"},
        {"id": "2", "parent_id": "1", "role": "assistant", "content": "b"},
        {"id": "3", "parent_id": "1", "role": "assistant", "content": "f"},
    ]
    assert [one.turns[-1].content for one in read({"messages": listed})] == ["b", "f"]


def test_a_tree_as_deep_as_it_likes_is_read():
    deep = node("assistant", "end")
    for i in range(2999):
        deep = node("prompter" if i % 2 == 0 else "assistant", str(i), deep)
    (got,) = read({"prompt": deep})
    assert len(got.turns) == 3000


REJECTED = [
    ({"messages": said()}, "a conversation without turns"),
    ({"messages": "hello"}, "turns are no list"),
    ({"messages": ["hello"]}, "a turn is no object"),
    ({"messages": [{"content": "q"}]}, "a turn without a role"),
    ({"messages": said(("moderator", "q"), a)}, "an unknown role"),
    ({"messages": said(u)}, "a conversation that ends without an answer"),
    ({"messages": said(u, a, u)}, "a conversation that ends without an answer"),
    ({"messages": said(a)}, "turns are missing or out of order"),
    ({"messages": said(a, u, a)}, "turns are missing or out of order"),
    ({"messages": said(u, u, a)}, "turns are missing or out of order"),
    ({"messages": said(u, a, a)}, "turns are missing or out of order"),
    ({"messages": said(u, ("system", "s"), a)}, "turns are missing or out of order"),
    ({"messages": said(("system", "s"), a)}, "turns are missing or out of order"),
    ({"messages": said(u, ("tool", "t"), a)}, "turns are missing or out of order"),
    ({"messages": [*said(u), {"role": "assistant", "tool_calls": {"name": "f"}}, *said(u, a)]},
     "turns are missing or out of order"),
    ({"messages": said(u, ("assistant", " \n"))}, "an empty answer"),
    ({"messages": said(u, ("assistant", None))}, "an empty answer"),
    ({"messages": said(("user", ""), a)}, "an empty question"),
    ({"messages": said(("user", 7), a)}, "content that is neither text nor parts"),
    ({"messages": said(("user", [{"type": "text", "text": 7}]), a)}, "content that is neither text nor parts"),
    ({"messages": said(("user", [{"type": "image_url", "image_url": "x"}]), a)}, "a part of content that is no text"),
    ({"messages": said(("user", "\ud800"), a)}, "half of a surrogate pair, which is no text"),
    *(({"messages": [*said(u), {"role": "assistant", "content": "x", "loss_weight": weight}]},
       "a loss weight other than 0 and 1") for weight in (-1, 0.5, 2, "1", float("nan"), [1])),
    ({"messages": [*said(u), {"role": "function_call", "content": "f(x)"}]}, "calls of functions that are no JSON"),
    ({"messages": [*said(u), {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}]},
     "a call of a function without its name"),
    ({"messages": [*said(u), {"role": "assistant", "tool_calls": {"name": "f", "arguments": "{"}}]},
     "arguments of a function that are no JSON"),
    ({"messages": said(u, a), "tools": "{"}, "tools that are no JSON"),
    ({"messages": [*said(u), {"role": "assistant", "tool_calls": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]},
     "a JSON object that names a field twice"),
    *(({"messages": said(u, a), "tools": tools}, "tools that are no list of objects")
      for tools in (["weather"], True, 5, "true")),
    *(({"messages": said(u, a), "tools": tools}, "a tool without its name")
      for tools in ([{}], [{"type": "code_interpreter"}], {"type": "function", "function": "weather"})),
    ({"messages": [{"role": "system", "content": "s", "tools": [WEATHER]}, *said(u, a)]},
     "tools within a turn (they belong beside the turns)"),
    *(({"messages": said(("user", [part]), a)}, "a part of content that is no text") for part in (
        {"text": "a", "image": "i.png"}, {"text": "a", "audio": b"0"}, {"type": "text", "text": "a", "video": ["v"]},
        {"type": "text", "text": "a", "file": {"id": 1}}, {"type": ["text"], "text": "a"})),
    *(({"messages": said(u, ("assistant", [part]))}, "a part of content that is of several kinds") for part in (
        {"text": "a", "reasoning": "r"}, {"type": "text", "text": "a", "tool_calls": [{"name": "f"}]},
        {"type": "thinking", "thinking": "r", "output_text": "a"})),
    ({"messages": said(u, ("assistant", [{"text": "a", "value": "b"}]))}, "a turn that says two things in one"),
    *(({"messages": [*said(u), {"role": "assistant", "content": "x", **more}]}, "a turn that says two things in one")
      for more in ({"text": "y"}, {"value": ["y"]}, {"reasoning": "y", "thinking": "z"})),
    *(({"messages": [{"role": "user", "content": "q", field: ["f"]}, *said(a)]},
       "pictures, sound or films, which aren't read") for field in ("image", "images", "audios", "video_url")),
    *(({**row, "images": [{"path": "i.png"}]}, "pictures, sound or films, which aren't read")
      for row in ({"messages": said(u, a)}, {"question": "q", "answer": "x"}, {"prompt": "q", "answers": ["x", "y"]})),
    *(({"messages": [*said(u), {"role": "assistant", "from": other, "content": "x"}]}, "a turn of two roles")
      for other in ("human", "tool", "function_call")),
    *(({"messages": [*said(u), {"role": "assistant", "content": "x", **weights}]},
       "loss weights that contradict each other") for weights in (
        {"loss_weight": 1, "train": False}, {"weight": 0, "train": True}, {"loss": False, "weight": 1.0},
        {"loss_weight": 0, "trainable": True}, {"training": False, "train": True})),
    ({"messages": [*said(u), {"role": "assistant", "content": [{"text": "x", "loss_weight": 0}, "y"]}]},
     "a loss weight of a part of a turn"),
    ({"messages": [*said(u), {"role": "assistant", "content": "x", "train_detail": [{"begin_offset": 0}]}]},
     "a turn of which only parts are to be trained"),
    *(({"messages": said(u, a), "loss_weight": weight}, "a loss weight of a whole row") for weight in (0, 0.5, [1])),
    ({"prompt": "other", "chosen": said(u, a), "rejected": said(u, ("assistant", "y"))},
     "a prompt other than what its answers begin with"),
    ({"prompt": said(("system", "s"), u), "chosen": said(u, a), "rejected": said(u, ("assistant", "y"))},
     "a prompt other than what its answers begin with"),
    ({"messages": said(("user", "other")), "chosen": said(u, a), "rejected": said(u, ("assistant", "y"))},
     "a prompt other than what its answers begin with"),
    ({"system": "s", "messages": said(("system", "t"), u, a)}, "two system prompts"),
    ({"instruction": "q", "output": "x", "history": ["a", "b"]}, "a history that is no list of questions and answers"),
    ({"instruction": "q", "input": 5, "output": "x"}, "an input that is no text"),
    ({"chosen": "good", "rejected": "bad"}, "answers without a question"),
    ({"prompt": "q", "answers": []}, "a question without answers"),
    ({"prompt": "q", "answers": ["good", " "]}, "an empty answer"),
    ({"prompt": "q", "chosen": said(u, a), "rejected": said(("user", "other"), a)}, "answers without a question"),
    ({"parent_id": "1", "role": "assistant", "text": "x"}, "a message of a tree without the tree"),
    ({"prompt": node("prompter", "q")}, "a tree without an answer"),
    ({"prompt": node("prompter", "q", 7)}, "a turn is no object"),
    ({"messages": [{"id": "1", "parent_id": "0", "role": "user", "content": "q"}]},
     "a message of a tree whose parent is missing"),
    ({"messages": [{"parent_id": None, "role": "user", "content": "q"}]},
     "messages of a tree without ids of their own"),
    ({"messages": [{"id": "1", "parent_id": "1", "role": "user", "content": "q"}]}, "a tree without a first message"),
    ({"messages": [node("user", "q", node("assistant", "x"), id="1", parent_id=None)]},
     "messages of a tree that name their parent and have replies, too"),
    ({"messages": [{"id": "1", "parent_id": None, "role": "user", "content": "q"},
                   {"id": "2", "parent_id": "3", "role": "user", "content": "q"},
                   {"id": "3", "parent_id": "2", "role": "assistant", "content": "x"}]},
     "messages of a tree that are their own ancestors"),
    ({"messages": [{"id": "1", "parent_id": None, "role": "user", "content": "q"}, "x"]}, "a turn is no object"),
    ({"messages": [{"id": ["1"], "parent_id": None, "role": "user", "content": "q"}]},
     "messages of a tree without ids of their own"),
    ({"messages": [{"id": "1", "parent_id": None, "role": "user", "content": "q"},
                   {"id": "2", "parent_id": ["1"], "role": "assistant", "content": "x"}]},
     "a message of a tree whose parent is missing"),
    ({"messages": "abc", "parent_id": "1", "role": "user"}, "a message of a tree without the tree"),
    ({"prompt": node("prompter", "q", *(node("assistant", "x") | {"rank": rank} for rank in ("first", 2)))},
     "a rank that is no number"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), REJECTED)
def test_what_is_no_conversation_is_rejected_with_its_place(row, reason):
    with pytest.raises(Rejected) as error:
        read(row)
    assert error.value.reason == reason and str(error.value).startswith(f"d.jsonl:3: {reason}")


def test_fields_may_have_other_names():
    fields = ChatFields.named({"messages": "talk", "chosen": "better", "rejected": "worse"})
    assert read({"talk": said(u, a)}, fields) == (conversation(("u", "q"), ("a", "x")),)
    assert read({"messages": said(u, a)}, fields) == ()
    assert len(read({"prompt": "q", "better": "x", "worse": "y"}, fields)[0].answers) == 2
    with pytest.raises(ValueError, match=r"data.chat_fields.massages: no field of chats; they have chosen, .*messages"):
        ChatFields.named({"massages": "talk"})


def rows_of(name):
    text = (FILES / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", ["messages_demo.jsonl", "sharegpt_demo.json"])
@pytest.mark.parametrize("form", ["chatml", "mistral"])
def test_real_files_are_read_completely_and_train_the_answers(name, form):
    """The trained tokens, decoded, are the answers as the file has them."""
    tokenizer, reasons = load_tokenizer(DEMO), Counter()
    template = load_template(form, tokenizer)
    rows = rows_of(name)
    for i, row in enumerate(rows, 1):
        try:
            (chat,) = chat_of(row, f"{name}:{i}", FIELDS)
            sample = template.sample(str(i), chat, f"{name}:{i}")
        except Rejected as error:
            reasons[error.reason] += 1
            continue
        turns = row.get("messages") or row["conversations"]
        answers = [
            turn["value"] if "value" in turn else "".join(part["value"] for part in turn["content"])
            for turn in turns
            if turn.get("role", turn.get("from")) in ("assistant", "gpt")
        ]
        trained = [
            text for text, mark in told(tokenizer, sample.tokens, sample.trained) if mark and isinstance(text, str)
        ]
        assert trained == [f"{answer}<|im_end|>" if form == "chatml" else f" {answer.strip()}" for answer in answers]
    assert len(rows) == 8 and not reasons
