"""Templates: the trained tokens, told as text, against what each template's form says, written down independently."""

import datetime
import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from hsap.data.chat import template as templates
from hsap.data.chat.render import Renderer
from hsap.data.chat.template import LOSSES, SHIPPED, Template, load_template
from hsap.data.document import Conversation, Document, SharedQuestion, Turn
from hsap.data.rejected import Rejected
from hsap.data.tokenise import tokenise
from hsap.data.tokenizer import load_tokenizer
from tests.data.chat.told import conversation, joined, save_bytes, told

SOURCES = {name: (Path(templates.__file__).parent / "templates" / f"{name}.jinja").read_text() for name in SHIPPED}
UNTAGGED = re.sub(r"\{%- (end)?generation %\}", "", SOURCES["chatml"])
START, END, BOS, EOS = ["<|im_start|>"], ["<|im_end|>"], ["<s>"], ["</s>"]


@cache
def template_of(source, tokenizer, loss="assistant") -> Template:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Template(Renderer(source, "a test's", special, datetime.date(2024, 7, 26)), tokenizer, loss)


def chatml(turns, trained):
    for i, (role, content) in enumerate(turns):
        yield from ((START, False), (f"{role}\n", False))
        yield from ((content, i in trained), (END, i in trained), ("\n", False))


def llama2(turns, trained):
    system = ""
    for i, (role, content) in enumerate(turns):
        content = content.strip()
        if role == "system":
            system = f"<<SYS>>\n{content}\n<</SYS>>\n\n"
        elif role == "user":
            yield from ((BOS, False), (f"[INST] {system}{content} [/INST]", False))
            system = ""
        else:
            yield from ((f" {content} ", i in trained), (EOS, i in trained))


def mistral(turns, trained):
    yield BOS, False
    system = ""
    for i, (role, content) in enumerate(turns):
        if role == "system":
            system = f"{content}\n\n"
        elif role == "user":
            yield f"[INST] {system}{content} [/INST]", False
            system = ""
        else:
            yield from ((f" {content.strip()}", i in trained), (EOS, i in trained))


FORMS = {
    "chatml": (SOURCES["chatml"], chatml),
    "chatml without tags": (UNTAGGED, chatml),
    "llama2": (SOURCES["llama2"], llama2),
    "mistral": (SOURCES["mistral"], mistral),
}
WORDS = [
    *[
        "hi",
        "A b",
        " ",
        "\n",
        "\n\n",
        "\t",
        "é",
        "🐋",
        '"',
        "\\",
        "\u2028",
        "\U00040001",
        "{{ x }}",
        "{%",
        "user",
        "assistant",
    ],
    *["[INST]", "[/INST]", "</s>", "<s>", "<|im_end|>", "<|im_start|>", "<|im_", "end|>", "</think>"],
]
words = st.sampled_from(WORDS)
contents = st.lists(words, min_size=1, max_size=6).map("".join).filter(str.strip)


@st.composite
def conversations(draw):
    turns = [("system", draw(contents))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns += [("user", draw(contents)), ("assistant", draw(contents))]
    return turns


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FORMS)), conversations(), st.sampled_from(["assistant", "last_assistant", "all"]))
def test_trained_text_is_what_the_assistant_says_and_its_end(bytes_tokenizer, form, turns, loss):
    source, expected = FORMS[form]
    made = conversation(*((role[0], content) for role, content in turns))
    encoded = template_of(source, bytes_tokenizer, loss).encode(made, "d:1")
    speakers = [i for i, (role, _) in enumerate(turns) if role == "assistant"]
    parts = list(expected(turns, speakers if loss == "assistant" else speakers[-1:]))
    if loss == "all":
        parts = [(text, True) for text, _ in parts]
    assert told(bytes_tokenizer, encoded.tokens, encoded.trained) == joined(parts)
    assert set(encoded.begins) == set(speakers)


@settings(max_examples=40, deadline=None)
@given(conversations())
def test_the_template_reads_as_hugging_face_tokenises_it(bytes_tokenizer, turns):
    """Where nobody spells control tokens, the tokens are those of the whole text with its control tokens."""
    turns = [(role, re.sub(r"<|\|", "-", content)) for role, content in turns]
    made = conversation(*((role[0], content) for role, content in turns))
    template = template_of(SOURCES["chatml"], bytes_tokenizer)
    backend = bytes_tokenizer._backend._tokenizer
    text = template.renderer([{"role": role, "content": content} for role, content in turns], [], False, False)
    backend.encode_special_tokens = False
    try:
        whole = backend.encode(text, add_special_tokens=False).ids
    finally:
        backend.encode_special_tokens = True
    assert template.encode(made, "d:1").tokens.tolist() == whole


@pytest.mark.parametrize("form", FORMS)
def test_weights_choose_turns(bytes_tokenizer, form):
    source, expected = FORMS[form]
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    weighted = [(role[0], content, weight) for (role, content), weight in zip(turns, (0.0, 0.0, None, 1.0))]
    for loss in ("assistant", "weighted"):
        encoded = template_of(source, bytes_tokenizer, loss).encode(conversation(*weighted), "d:1")
        assert told(bytes_tokenizer, encoded.tokens, encoded.trained) == joined(expected(turns, {3}))


def test_a_weight_above_0_trains_a_question_too(bytes_tokenizer):
    made = conversation(("u", "one", 0.5), ("a", "two", 0.0))
    encoded = template_of(UNTAGGED, bytes_tokenizer, "weighted").encode(made, "d:1")
    turns = [("user", "one"), ("assistant", "two")]
    assert told(bytes_tokenizer, encoded.tokens, encoded.trained) == joined(chatml(turns, {0}))


REASONING = """
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- set content = m.content %}
{%- set thought = m.reasoning_content or '' %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if thought and loop.index0 > last.user %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""


def test_a_template_that_forgets_earlier_reasoning(bytes_tokenizer):
    """The prompt opens a <think>; turns before the last question have none, so that they begin before it."""
    template = template_of(REASONING, bytes_tokenizer)
    said = [("u", "q"), ("a", "<think>\nhm\n</think>\n\none"), ("u", "r"), ("a", "<think>\nwell\n</think>\n\n<two")]
    encoded = template.encode(conversation(*said), "d:1")
    runs = told(bytes_tokenizer, encoded.tokens, encoded.trained)
    assert runs[:9] == [
        (START, False), ("user\nq", False), (END, False), ("\n", False),
        (START, False), ("assistant\n", False), ("one", True), (END, True), ("\n", False),
    ]  # fmt: skip
    assert runs[-4:] == [("assistant\n<think>\n", False), ("well\n</think>\n\n<two", True), (END, True), ("\n", False)]
    separate = conversation(("u", "q"), ("a", "one"), reasoning=None)
    thoughtful = separate.turns[0], Turn("assistant", "one", reasoning="hm </think> <|im_end|>")
    encoded = template.encode(Conversation(thoughtful), "d:1")
    assert told(bytes_tokenizer, encoded.tokens, encoded.trained)[-3:-1] == [
        ("hm </think> <|im_end|>\n</think>\n\none", True),
        (END, True),
    ]


@pytest.mark.parametrize(
    ("source", "runs"),
    [
        # No end marker: the next turn's does.
        (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}",
            [
                *[(START, False), ("user q", False), (START, False), ("assistant ", False), ("one ", True)],
                *[(START, False), ("user r", False), (START, False), ("assistant ", False), ("two", True)],
            ],
        ),
        # Text only, a line after each turn.
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '\n###\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}",
            [
                *[("user: q\n###\nassistant:", False), (" one \n###", True), ("\nuser: r\n###\nassistant:", False)],
                *[(" two\n###", True), ("\n", False)],
            ],
        ),
        # An end of the whole text, where no prompt follows.
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ eos_token }}{% endif %}",
            [
                *[("user: q", False), (END, False), ("\nassistant: ", False), ("one ", True), (END, True)],
                *[("\nuser: r", False), (END, False), ("\nassistant: ", False), ("two", True), (END, True)],
                *[("\n", False), (EOS, False)],
            ],
        ),
        # One that stands even before a prompt, so that the text before a turn isn't what it was.
        (
            "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% if loop.last %}{{ eos_token }}"
            "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
            None,
        ),
    ],
)
def test_ends_by_the_templates_own_rule(bytes_tokenizer, source, runs):
    made = conversation(("u", "q"), ("a", "one "), ("u", "r"), ("a", "two"))
    template = template_of(source, bytes_tokenizer)
    if runs is None:
        with pytest.raises(Rejected, match="d:1: the chat template renders a turn otherwise once others follow it"):
            template.encode(made, "d:1")
    else:
        encoded = template.encode(made, "d:1")
        assert told(bytes_tokenizer, encoded.tokens, encoded.trained) == runs


CALL = {"name": "add", "arguments": {"a": 1, "text": 'say "<|im_end|>"'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds <|im_end|>", "parameters": {}}}


@pytest.mark.parametrize("source", [SOURCES["chatml"], UNTAGGED])
def test_tools_calls_and_reasoning(bytes_tokenizer, source):
    turns = (
        Turn("system", "be brief"),
        Turn("user", "add"),
        Turn("assistant", "", reasoning="sum", tool_calls=(CALL,)),
        Turn("tool", "1"),
        Turn("assistant", "it is 1"),
    )
    made = Conversation(turns, (TOOL,))
    encoded = template_of(source, bytes_tokenizer).encode(made, "d:1")
    runs = told(bytes_tokenizer, encoded.tokens, encoded.trained)
    assert [run for run in runs if run[1]] == [
        ('<think>\nsum\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "say \\"<|im_end|>\\""}}'
         "\n</tool_call>", True),
        (END, True), ("it is 1", True), (END, True),
    ]  # fmt: skip
    assert runs[1][0].startswith("system\nbe brief\n\n") and '"description": "adds <|im_end|>"' in runs[1][0]
    assert sum(run[0] == START for run in runs) == 5


PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


Q, A = Turn("user", "a"), Turn("assistant", "b")
EACH = "{% for m in messages %}"
NO_FORM = [
    (PLAIN, [Q, Turn("assistant", "b", reasoning="c")], "the chat template has no place for reasoning"),
    (PLAIN, [Q, Turn("assistant", "", tool_calls=(CALL,))], "the chat template has no place for calls of tools"),
    (PLAIN, [Q, A, TOOL], "the chat template has no place for tools"),
    (PLAIN + "{% if false %}{{ tools }}{% endif %}", [Q, A, TOOL], "the chat template has no place for tools"),
    (PLAIN, [Q, Turn("assistant", "b", weight=0.0)], "nothing in it is trained"),
    (
        "{% for m in messages if m.role != 'system' %}{{ m.content + eos_token }}{% endfor %}",
        [Turn("system", "x"), Q, A],
        "the chat template leaves out a turn of system",
    ),
    (
        EACH + "{{ m.content | upper }}{% endfor %}",
        [Q, A],
        "the chat template changes words in a way that can't be followed",
    ),
    ("{{ raise_exception('only one question') }}", [Q, A], "the chat template refuses it: only one question"),
    ("{{ messages[0].content }}{{ messages[0].nothing.more }}", [Q, A], "the chat template refuses it"),
    ("{{ ''.__class__.__mro__ }}", [Q, A], "the chat template refuses it"),
    (
        "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
        [Q, A],
        "the chat template renders a turn otherwise once others follow it",
    ),
    (
        "{% generation %}" + EACH + "{{ m.content }}{% endfor %}{% endgeneration %}",
        [Q, A],
        "the chat template mixes turns with each other",
    ),
    (
        EACH + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        [Q, A],
        "the chat template's generation tags aren't one for each turn of the assistant",
    ),
    (
        EACH
        + "{{ m.content }}{% if m.role == 'assistant' %}{% generation %}{% endgeneration %}{% endif %}{% endfor %}",
        [Q, A],
        "the chat template writes nothing of a turn",
    ),
]


@pytest.mark.parametrize(("source", "turns", "reason"), NO_FORM)
def test_what_has_no_form_is_rejected_with_its_reason(bytes_tokenizer, source, turns, reason):
    said = tuple(turn for turn in turns if isinstance(turn, Turn))
    made = Conversation(said, tuple(turn for turn in turns if isinstance(turn, dict)))
    with pytest.raises(Rejected) as error:
        template_of(source, bytes_tokenizer).sample("x", made, "d.jsonl:7")
    assert error.value.reason == reason and str(error.value).startswith(f"d.jsonl:7: {reason}")


def test_the_day_is_a_setting(bytes_tokenizer):
    source = "{{ strftime_now('%d %b %Y') }}" + PLAIN
    encoded = template_of(source, bytes_tokenizer).encode(conversation(("u", "a"), ("a", "b")), "d:1")
    assert bytes_tokenizer.decode(encoded.tokens).startswith("26 Jul 2024user: a")


def test_control_tokens_may_swallow_whitespace(tmp_path):
    start = AddedToken("<|im_start|>", rstrip=True, normalized=False)
    end = AddedToken("</s>", lstrip=True, normalized=False)
    tokenizer = load_tokenizer(save_bytes(tmp_path / "tokenizer.json", ["<s>", start, end]))
    source = "{% for m in messages %}{{ '<|im_start|>\n ' + m.content + ' ' + eos_token }}{% endfor %}"
    source += "{% if add_generation_prompt %}{{ '<|im_start|>\n ' }}{% endif %}"
    template = template_of(source, tokenizer)
    encoded = template.encode(conversation(("u", "a"), ("a", " b ")), "d:1")
    runs = [(START, False), ("a", False), (EOS, False), (START, False), ("b", True), (EOS, True)]
    assert told(tokenizer, encoded.tokens, encoded.trained) == runs
    backend = type(tokenizer._backend._tokenizer).from_file(tokenizer.name)
    text = "<|im_start|>\n a </s><|im_start|>\n  b  </s>"
    assert encoded.tokens.tolist() == backend.encode(text, add_special_tokens=False).ids


def test_templates_beside_a_tokenizer_and_by_setting(tmp_path, bytes_tokenizer):
    path = save_bytes(tmp_path / "tokenizer.json")
    made = conversation(("u", "a"), ("a", "b"))
    assert load_template(None, load_tokenizer(path)) is None
    with pytest.raises(ValueError, match=r"^d:4: this is a chat, .* set data.chat_template to chatml"):
        tokenise(Document("x", "d:4", chat=made), load_tokenizer(path))
    config = tmp_path / "tokenizer_config.json"
    text = "{% for m in messages %}X{{ m.content + eos_token }}{% endfor %}"
    for value in (text, [{"name": "other", "template": ""}, {"name": "default", "template": text}]):
        config.write_text(json.dumps({"chat_template": value, "eos_token": {"content": "<|im_end|>"}}))
        for name in (None, str(config), str(tmp_path)):
            encoded = load_template(name, load_tokenizer(path)).encode(made, "d:1")
            runs = [("Xa", False), (END, False), ("Xb", True), (END, True)]
            assert told(bytes_tokenizer, encoded.tokens, encoded.trained) == runs
    (tmp_path / "chat_template.jinja").write_text(text.replace("X", "Y"))
    encoded = load_template(None, load_tokenizer(path)).encode(made, "d:1")
    assert told(bytes_tokenizer, encoded.tokens, encoded.trained)[0] == ("Ya", False)
    for name in SHIPPED:
        assert load_template(name, load_tokenizer(path)).encode(made, "d:1").trained.any()


def test_what_is_no_template_names_the_setting(tmp_path, bytes_tokenizer):
    (tmp_path / "bad.jinja").write_text("a\n{% for %}")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "odd.json").write_text('{"chat_template": [{"name": [], "template": ""}]}')
    (tmp_path / "bytes.jinja").write_bytes(b"\xff{{ messages }}")
    (tmp_path / "deep.jinja").write_text(f"{{{{ {'(' * 5000}1{')' * 5000} }}}}")
    for name, words in (
        ("bad.jinja", r"bad.jinja, line 2: .*data.chat_template"),
        ("config.json", r"not valid JSON"),
        ("list.json", r"not an object"),
        ("none.json", r"no chat template there; set it to chatml, llama2, mistral"),
        ("missing", r"no chat template there"),
        ("odd.json", r"no chat template there"),
        ("bytes.jinja", r"bytes.jinja: a chat template must be UTF-8"),
        ("deep.jinja", r"deep.jinja: .*recursion.*data.chat_template"),
    ):
        with pytest.raises(ValueError, match=words):
            load_template(str(tmp_path / name), bytes_tokenizer)
    assert set(LOSSES) == {"assistant", "last_assistant", "weighted", "all"}


def test_a_question_with_answers_is_one_sample(bytes_tokenizer):
    question = conversation(("s", "be"), ("u", "q?"), ("a", "x"), ("u", "r?")).turns
    answers = tuple(conversation(turn).turns for turn in (("a", "yes"), ("a", "<s>no"), ("a", "y", 0.0)))
    for source in (SOURCES["chatml"], UNTAGGED, SOURCES["mistral"]):
        template = template_of(source, bytes_tokenizer)
        shared = SharedQuestion(question, answers)
        sample = template.sample("p", shared, "d:1")
        encoded = [template.encode(one, "d:1") for one in shared.conversations]
        ends = [*sample.answers[1:], len(sample.tokens)]
        for one, start, stop in zip(encoded, sample.answers, ends, strict=True):
            tokens = np.concatenate([sample.tokens[: sample.answers[0]], sample.tokens[start:stop]])
            trained = np.concatenate([sample.trained[: sample.answers[0]], sample.trained[start:stop]])
            assert (tokens.tolist(), trained.tolist()) == (one.tokens.tolist(), one.trained.tolist())
            assert one.begins[len(question)] == sample.answers[0] + 1
