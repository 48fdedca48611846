"""Conversation: turns of one chat in one form, whatever form they had, and the order that turns must have.

A conversation is an optional system turn, then a user's and an assistant's in turn; the assistant may ask tools, whose
answers follow it and are followed by the assistant. It ends with the assistant. What doesn't is refused by `Rejected`:
a chat with a turn missing teaches the model to answer what it wasn't asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hsap.data.document import Rejected

ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter", "instruction"),
    "assistant": ("assistant", "gpt", "model", "chatgpt", "bot", "ai", "bing", "bard", "function_call", "tool_call"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response", "ipython"),
}
"""What a turn's speaker is called here, and what he is called in data, in any case."""

CALLS = ("function_call", "tool_call")
"""Names of an assistant whose whole content is calls of functions, as JSON."""

_ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
_FOLLOWERS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_ROLE_FIELDS = ("role", "from", "speaker")
_CONTENT_FIELDS = ("content", "value", "text")
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_WEIGHT_FIELDS = ("loss_weight", "weight", "train")
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")
_CALL_PARTS = ("tool_call", "tool_calls", "function_call")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one speaker said.

    role: a key of `ROLES`. weight: of its loss, 0 or 1; None where the data doesn't say. reasoning: what an assistant
    thought before the content. tool_calls: {"name", "arguments"} each, with "id" where there is one. name, call_id: of
    a tool's answer.
    """

    role: str
    content: str
    weight: float | None = None
    reasoning: str | None = None
    tool_calls: tuple[dict, ...] = ()
    name: str | None = None
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order, and the tools that were offered: JSON schemas of functions, as chat templates take them."""

    turns: tuple[Turn, ...]
    tools: tuple[dict, ...] = ()


@dataclass(frozen=True, slots=True)
class Preference:
    """A question, which is all turns before the answer, and several answers to it, the best first.

    answers: for each its turns, of which the first is the assistant's.
    """

    question: tuple[Turn, ...]
    answers: tuple[tuple[Turn, ...], ...]
    tools: tuple[dict, ...] = ()

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """The question with each of its answers."""
        return tuple(Conversation(self.question + answer, self.tools) for answer in self.answers)


def read_turns(given: object, where: str) -> tuple[Turn, ...]:
    """Read a list of turns, of which each names its speaker and what he said by any usual names; `Rejected`."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise Rejected(where, "turns are no list", type(given).__name__)
    return tuple(read_turn(turn, where, i) for i, turn in enumerate(given, 1))


def read_turn(given: object, where: str, number: int = 1) -> Turn:
    """Read one turn, the `number`th of its conversation; `Rejected`."""
    if not isinstance(given, Mapping):
        raise Rejected(where, "a turn is no object", f"turn {number}")
    name = _first(given, _ROLE_FIELDS)
    if not isinstance(name, str):
        raise Rejected(where, "a turn without a role", f"turn {number}")
    role = _ROLE_OF.get(name.strip().lower())
    if role is None:
        raise Rejected(where, "an unknown role", f"turn {number} is of {name!r}")
    reading = _Reading(where, number)
    reading.read(_first(given, _CONTENT_FIELDS))
    if name.strip().lower() in CALLS:
        reading.calls, reading.texts = [*reading.calls, "".join(reading.texts)], []
    reasoning = _first(given, _REASONING_FIELDS)
    if reasoning is not None:
        reading.reasoning.append(reading.text(reasoning))
    if given.get("tool_calls"):
        reading.calls.append(given["tool_calls"])
    if given.get("function_call"):
        reading.calls.append(given["function_call"])
    called, named = given.get("tool_call_id"), given.get("name")
    return Turn(
        role,
        "".join(reading.texts),
        _weight(given, where, number),
        "".join(reading.reasoning) or None,
        tuple(call for calls in reading.calls for call in read_calls(calls, where)),
        named if isinstance(named, str) else None,
        called if isinstance(called, str) else None,
    )


@dataclass(slots=True)
class _Reading:
    """The parts of a turn's content, sorted by kind as they are read."""

    where: str
    number: int
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)

    def read(self, content: object) -> None:
        """Take a string, a list of typed parts, or nothing."""
        if content is None:
            return
        if isinstance(content, str):
            self.texts.append(self.text(content))
        elif isinstance(content, Sequence):
            for part in content:
                self._read_part(part)
        else:
            raise Rejected(self.where, "content that is neither text nor parts", f"turn {self.number}")

    def _read_part(self, part: object) -> None:
        if isinstance(part, str):
            self.texts.append(self.text(part))
            return
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        value = _first(part, (kind, "value", "text", "content")) if isinstance(part, Mapping) else None
        if kind in _TEXT_PARTS:
            self.texts.append(self.text(value))
        elif kind in _REASONING_PARTS:
            self.reasoning.append(self.text(value))
        elif kind in _CALL_PARTS:
            self.calls.append(value)
        else:
            raise Rejected(self.where, "a part of content that is no text", f"turn {self.number} has {kind!r}")

    def text(self, value: object) -> str:
        """Check that a value is text that UTF-8 can hold."""
        if not isinstance(value, str):
            raise Rejected(self.where, "content that is neither text nor parts", f"turn {self.number}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Rejected(self.where, "half of a surrogate pair, which is no text", f"turn {self.number}") from None
        return value


def _first(values: Mapping, names: Sequence[str]) -> Any:
    """Give the value of the first of some fields that is there."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def _weight(given: Mapping, where: str, number: int) -> float | None:
    weight = _first(given, _WEIGHT_FIELDS)
    if weight is None:
        return None
    # Targets count fully or not at all: a fraction trained as 1 would be trained wrongly.
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise Rejected(where, "a loss weight other than 0 and 1", f"turn {number} has {weight!r}")
    return float(weight)


def parsed(value: object, what: str, where: str) -> Any:
    """Read a value that may be JSON in a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Rejected(where, f"{what} that are no JSON") from None


def read_calls(given: object, where: str) -> tuple[dict, ...]:
    """Read calls of functions: one or a list, as objects or as JSON, with or without OpenAI's wrapping."""
    given = parsed(given, "calls of functions", where)
    calls = []
    for call in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise Rejected(where, "a call of a function without its name")
        arguments = _first(inner, ("arguments", "parameters"))
        arguments = {} if arguments in (None, "") else parsed(arguments, "arguments of a function", where)
        made = {"name": inner["name"], "arguments": arguments}
        calls.append({"id": call["id"], **made} if isinstance(call.get("id"), str) else made)
    return tuple(calls)


def read_tools(given: object, where: str) -> tuple[dict, ...]:
    """Read the tools that a conversation offers: a list of schemas or JSON of it, with or without OpenAI's wrapping."""
    if given in (None, "", [], ()):
        return ()
    given = parsed(given, "tools", where)
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, Sequence) or not all(isinstance(tool, Mapping) for tool in given):
        raise Rejected(where, "tools that are no list of objects")
    return tuple(dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in given)


def in_order(turns: Sequence[Turn], where: str) -> tuple[Turn, ...]:
    """Give turns without an empty system turn; `Rejected` where one is missing, out of order or empty."""
    turns = tuple(turn for turn in turns if turn.role != "system" or turn.content.strip())
    before = None
    for i, turn in enumerate(turns, 1):
        if turn.role not in _FOLLOWERS[before]:
            previous = f"{turns[i - 2].role}'s" if i > 1 else "the beginning"
            raise Rejected(where, "turns are missing or out of order", f"turn {i}, {turn.role}'s, follows {previous}")
        if turn.role == "user" and before == "assistant" and turns[i - 2].tool_calls:
            raise Rejected(where, "turns are missing or out of order", f"turn {i - 1} called a tool that never answers")
        if turn.role in ("user", "assistant") and not turn.content.strip() and not turn.tool_calls:
            kind = "answer" if turn.role == "assistant" else "question"
            raise Rejected(where, f"an empty {kind}", f"turn {i}")
        before = turn.role
    if before is None:
        raise Rejected(where, "a conversation without turns")
    if before != "assistant":
        raise Rejected(where, "a conversation that ends without an answer", f"turn {len(turns)} is {before}'s")
    return turns
