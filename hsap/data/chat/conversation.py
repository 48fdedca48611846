"""Conversation: turns of one chat in one form, whatever form they had, and the order that turns must have.

A conversation is an optional system turn, then a user's and an assistant's in turn; the assistant may ask tools, whose
answers follow it and are followed by the assistant. It ends with the assistant. What doesn't is refused by `Rejected`:
a chat with a turn missing teaches the model to answer what it wasn't asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hsap.data.document import Turn
from hsap.data.json_decoder import TWICE, JsonDecoder
from hsap.data.rejected import Rejected

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
_WEIGHT_FIELDS = ("loss_weight", "weight", "train", "training", "trainable", "loss")
_DETAIL_FIELDS = ("train_detail", "training_detail")
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")
NO_TEXT = "a part of content that is no text"
SURROGATE = "half of a surrogate pair, which is no text"
_CALL_PARTS = ("tool_call", "tool_calls", "function_call")
_MEDIA = tuple(f"{name}{end}" for name in ("image", "audio", "video") for end in ("", "s", "_url", "_urls", "_path"))
_PART_MEDIA = (*_MEDIA, "input_image", "input_audio", "input_file", "file", "document")


def read_turns(given: object, where: str) -> tuple[Turn, ...]:
    """Read a list of turns, of which each names its speaker and what he said by any usual names; `Rejected`."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise Rejected(where, "turns are no list", type(given).__name__)
    return tuple(read_turn(turn, where, i) for i, turn in enumerate(given, 1))


def read_turn(given: object, where: str, number: int = 1) -> Turn:
    """Read one turn, the `number`th of its conversation; `Rejected`."""
    if not isinstance(given, Mapping):
        raise Rejected(where, "a turn is no object", f"turn {number}")
    reading = _Reading(where, number)
    role, only_calls = reading.speaker(given)
    reading.read(reading.agreed(given, _CONTENT_FIELDS))
    if only_calls:
        reading.calls, reading.texts = [*reading.calls, "".join(reading.texts)], []
    reasoning = reading.agreed(given, _REASONING_FIELDS)
    if reasoning is not None and reading.reasoning != [reasoning]:
        reading.reasoning.append(reading.text(reasoning))
    refuse_media(given, where, f"turn {number}")
    reading.refuse(given, ("tools", "functions"), "tools within a turn (they belong beside the turns)")
    reading.refuse(given, _DETAIL_FIELDS, "a turn of which only parts are to be trained")
    calls = (given.get(name) for name in ("tool_calls", "function_call"))
    reading.calls += [one for one in calls if one is not False and not is_empty(one)]
    called, named = given.get("tool_call_id"), given.get("name")
    return Turn(
        role,
        "".join(reading.texts),
        reading.weight(given),
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
    weights: list[float] = field(default_factory=list)

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
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        kind = "text" if is_empty(kind) else kind
        sort = next((sort for sort in self._sorts() if isinstance(kind, str) and kind in sort[0]), None)
        if sort is None or not isinstance(part, Mapping):
            raise Rejected(self.where, NO_TEXT, f"turn {self.number} has {kind!r}")
        self.refuse(part, _PART_MEDIA, NO_TEXT)
        names = (str(kind), "value", "text", "content")
        others = {*_TEXT_PARTS, *_REASONING_PARTS, *_REASONING_FIELDS, *_CALL_PARTS}.difference(names)
        self.refuse(part, sorted(others), "a part of content that is of several kinds")
        value = self.agreed(part, names)
        sort[1].append(value if sort[1] is self.calls else self.text(value))
        self.weights += [weight for weight in [self._weight(part)] if weight is not None]

    def _sorts(self) -> tuple[tuple[tuple[str, ...], list[Any]], ...]:
        return (_TEXT_PARTS, self.texts), (_REASONING_PARTS, self.reasoning), (_CALL_PARTS, self.calls)

    def speaker(self, turn: Mapping[str, Any]) -> tuple[str, bool]:
        """Give a turn's role, and whether its content is calls of functions; fields for it that are known agree."""
        names = [turn[name] for name in _ROLE_FIELDS if turn.get(name) is not None]
        if not names or not isinstance(names[0], str):
            raise Rejected(self.where, "a turn without a role", f"turn {self.number}")
        names = [name.strip().lower() for name in names if isinstance(name, str)]
        if names[0] not in _ROLE_OF:
            raise Rejected(self.where, "an unknown role", f"turn {self.number} is of {names[0]!r}")
        # What is no role may be somebody's name.
        roles = {(_ROLE_OF[name], name in CALLS) for name in names if name in _ROLE_OF}
        if len(roles) > 1:
            raise Rejected(self.where, "a turn of two roles", f"turn {self.number} is of {' and '.join(names)}")
        return next(iter(roles))

    def agreed(self, values: Mapping[str, Any], names: Sequence[str]) -> Any:
        """Give what some fields say, of which those that aren't empty say the same; None where there are none."""
        given = [values[name] for name in names if values.get(name) is not None]
        given = [value for value in given if not is_empty(value)] or given[:1]
        if not all(same(value, given[0]) for value in given):
            raise Rejected(self.where, "a turn that says two things in one", f"turn {self.number}: {', '.join(names)}")
        return given[0] if given else None

    def refuse(self, values: Mapping[str, Any], names: Sequence[str], reason: str) -> None:
        """Reject what has any of some fields."""
        for name in names:
            if not is_empty(values.get(name)):
                raise Rejected(self.where, reason, f"turn {self.number} has {name!r}")

    def weight(self, turn: Mapping[str, Any]) -> float | None:
        """Give the weight of a turn, which its parts don't contradict."""
        weight = self._weight(turn)
        if any(one != weight for one in self.weights):
            raise Rejected(self.where, "a loss weight of a part of a turn", f"turn {self.number}")
        return weight

    def _weight(self, values: Mapping[str, Any]) -> float | None:
        given = {name: values[name] for name in _WEIGHT_FIELDS if values.get(name) is not None}
        for name, weight in given.items():
            # Targets count fully or not at all: a fraction trained as 1 would be trained wrongly.
            if not isinstance(weight, int | float) or weight not in (0, 1):
                raise Rejected(
                    self.where, "a loss weight other than 0 and 1", f"turn {self.number} has {name} {weight!r}"
                )
        if len(set(given.values())) > 1:
            told = ", ".join(f"{name} {weight!r}" for name, weight in given.items())
            raise Rejected(self.where, "loss weights that contradict each other", f"turn {self.number} has {told}")
        return next(map(float, given.values()), None)

    def text(self, value: object) -> str:
        """Check that a value is text that UTF-8 can hold."""
        if not isinstance(value, str):
            raise Rejected(self.where, "content that is neither text nor parts", f"turn {self.number}")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Rejected(self.where, SURROGATE, f"turn {self.number}") from None
        return value


def _first(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Give the value of the first of some fields that is there."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def is_empty(value: object) -> bool:
    """Say whether a field is as if it weren't there: null, or a text, list or object without anything in it."""
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def same(a: object, b: object) -> bool:
    """Say whether two values of fields are equal."""
    try:
        return bool(a == b)
    except ValueError:  # arrays
        return False


def refuse_media(values: Mapping[str, Any], where: str, what: str) -> None:
    """Reject what has pictures, sound or films beside its text."""
    name = next((name for name in _MEDIA if not is_empty(values.get(name))), None)
    if name is not None:
        raise Rejected(where, "pictures, sound or films, which aren't read", f"{what} has {name!r}")


def parsed(value: object, what: str, where: str) -> Any:
    """Read a value that may be JSON in a string."""
    if not isinstance(value, str):
        return value
    decoder = JsonDecoder()
    try:
        read = decoder.decode(value)
    except (ValueError, RecursionError):
        raise Rejected(where, f"{what} that are no JSON") from None
    if decoder.twice is not None:
        raise Rejected(where, TWICE, decoder.twice)
    return read


def read_calls(given: object, where: str) -> tuple[dict[str, Any], ...]:
    """Read calls of functions: one or a list, as objects or as JSON, with or without OpenAI's wrapping."""
    given = parsed(given, "calls of functions", where)
    calls = []
    for call in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise Rejected(where, "a call of a function without its name")
        arguments = _first(inner, ("arguments", "parameters"))
        arguments = (
            {} if arguments is None or same(arguments, "") else parsed(arguments, "arguments of a function", where)
        )
        made = {"name": inner["name"], "arguments": arguments}
        calls.append({"id": call["id"], **made} if isinstance(call.get("id"), str) else made)
    return tuple(calls)


def read_tools(given: object, where: str) -> tuple[dict[str, Any], ...]:
    """Read the tools that a conversation offers: a list of schemas or JSON of it, with or without OpenAI's wrapping."""
    given = None if is_empty(given) else parsed(given, "tools", where)
    if given is False or is_empty(given):
        return ()
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, Sequence) or not all(isinstance(tool, Mapping) for tool in given):
        raise Rejected(where, "tools that are no list of objects")
    inner = [tool.get("function", tool) for tool in given]
    if not all(isinstance(tool, Mapping) and isinstance(tool.get("name"), str) for tool in inner):
        raise Rejected(where, "a tool without its name")
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
