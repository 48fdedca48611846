"""Spans: which characters of a rendered chat are each turn's, the words and what the template ends them with.

What an assistant's turn trains is what the model has to write when it is its turn: from behind the prompt that the
template gives it (`add_generation_prompt`) up to the token by which the template ends the turn. A template with
generation tags says that itself. For others it is found by rendering beginnings of the conversation:

- the turn begins where the text of all turns before it, with the prompt, ends. Where the prompt says more than the
  full text has there (some open a <think>), the turn begins at the last border before they part.
- it ends behind the last control token that the text up to this turn has behind its words, whether a prompt follows or
  not (what only the end of a text has, ends the text and not the turn). Without a control token it ends with the text,
  but for whitespace that nobody said.

Both must lie in the full text as they do in the beginning; a template that renders a turn otherwise once others follow
it is refused for that conversation, as it can't be said what the model would have seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hsap.data.chat.marks import CLOSE, NOBODY, OPEN, Marks, alternation
from hsap.data.chat.render import Refusal, Renderer
from hsap.data.document import Conversation, Turn
from hsap.data.tokenizer import ControlToken

UNSTABLE = "the chat template renders a turn otherwise once others follow it"


class Span(NamedTuple):
    """Characters [start, stop) of a rendered chat that are of one turn."""

    turn: int
    start: int
    stop: int


class Control(NamedTuple):
    """A control token in a text: characters [start, stop), whitespace that it swallows among them; core: it alone."""

    start: int
    core: int
    stop: int
    id: int


class Controls:
    """Finds control tokens in text. tokens: by their spellings."""

    def __init__(self, tokens: Mapping[str, ControlToken]) -> None:
        self.tokens = dict(tokens)
        self._pattern = alternation(tokens)

    def find(self, text: str) -> list[Control]:
        """Find control tokens in order, the longest where several begin."""
        found, end = [], 0
        for match in self._pattern.finditer(text):
            token, (start, stop) = self.tokens[match[0]], match.span()
            if token.lstrip:
                start = max(end, len(text[:start].rstrip()))
            if token.rstrip:
                stop = len(text) - len(text[stop:].lstrip())
            found.append(Control(max(start, end), match.start(), stop, token.id))
            end = stop
        return found


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as its template renders it, under cover.

    text: characters under cover. open: the same, as they are. spans: of the assistant's turns and of others asked for.
    """

    text: str
    open: str
    spans: tuple[Span, ...]


def render(renderer: Renderer, conversation: Conversation, controls: Controls, asked: set[int]) -> Rendered:
    """Render a conversation and find the spans of the assistant's turns and of those `asked` for, by index.

    `Refusal`: why that can't be done.
    """
    return _Rendering(renderer, conversation, controls).rendered(asked)


def message(turn: Turn, text: Callable[[str], str], values: Callable[[object], object]) -> dict[str, Any]:
    """Give a turn as chat templates take it; `text` and `values` are applied to what was said."""
    made: dict[str, Any] = {"role": turn.role, "content": text(turn.content)}
    if turn.reasoning is not None:
        made |= dict.fromkeys(("reasoning_content", "thinking"), text(turn.reasoning))
    if turn.tool_calls:
        made["tool_calls"] = [
            {
                **({"id": call["id"]} if "id" in call else {}),
                "type": "function",
                "function": {"name": text(call["name"]), "arguments": values(call["arguments"])},
            }
            for call in turn.tool_calls
        ]
    for name, value in (("name", turn.name), ("tool_call_id", turn.call_id)):
        if value is not None:
            made[name] = value
    return made


class _Rendering:
    """One conversation while its spans are found."""

    def __init__(self, renderer: Renderer, conversation: Conversation, controls: Controls) -> None:
        self.renderer, self.turns, self.controls = renderer, conversation.turns, controls
        self.marks = Marks(controls.tokens, renderer.known)
        self.messages = [self._covered(i, turn) for i, turn in enumerate(self.turns)]
        self.tools = self.marks.covered(conversation.tools, None)
        self.marked = marked = renderer(self.messages, self.tools, False, True)
        self.text = marked.replace(OPEN, "").replace(CLOSE, "")
        self.open = self.marks.open(self.text)
        plain = [message(turn, lambda text: text, lambda value: value) for turn in self.turns]
        if renderer(plain, conversation.tools, False, False) != self.open:
            raise Refusal("the chat template changes words in a way that can't be followed")
        self.owners = self.marks.owners(self.text)
        self._check_all_there(conversation)
        self.tags = _tags(marked) if renderer.has_tags else None

    def _covered(self, i: int, turn: Turn) -> dict[str, Any]:
        made = message(turn, lambda text: self.marks.cover(text, i), lambda value: self.marks.covered(value, i))
        return made | {name: self.marks.guard(made[name]) for name in ("name", "tool_call_id") if name in made}

    def _check_all_there(self, conversation: Conversation) -> None:
        """Refuse a template that leaves out what was said: it would be lost without a word."""
        source = self.renderer.source
        if conversation.tools and self.renderer(self.messages, (), False, True) == self.marked:
            raise Refusal("the chat template has no place for tools")
        if any(turn.tool_calls for turn in self.turns) and "tool_calls" not in source:
            raise Refusal("the chat template has no place for calls of tools")
        thought = any(turn.reasoning for turn in self.turns)
        if thought and "reasoning_content" not in source and "thinking" not in source:
            raise Refusal("the chat template has no place for reasoning")
        there = set(np.unique(self.owners).tolist())
        for i, made in enumerate(self.messages):
            said = set(self.marks.owners(made["content"]).tolist()) - {NOBODY}
            if said and i not in there:
                raise Refusal(f"the chat template leaves out a turn of {self.turns[i].role}")

    def rendered(self, asked: set[int]) -> Rendered:
        speakers = [i for i, turn in enumerate(self.turns) if turn.role == "assistant"]
        if self.tags is not None:
            if len(self.tags) != len(speakers):
                raise Refusal("the chat template's generation tags aren't one for each turn of the assistant")
            spans = [Span(i, *tag) for i, tag in zip(speakers, self.tags)]
        else:
            spans = [self._span(i, True) for i in speakers]
        spans += [self._span(i, False) for i in asked - set(speakers)]
        spans.sort(key=lambda span: span.start)
        ends = [0]
        for span in spans:
            owners = set(self.owners[span.start : span.stop].tolist()) - {NOBODY, span.turn}
            if span.stop <= span.start:
                raise Refusal("the chat template writes nothing of a turn", f"turn {span.turn + 1}")
            if span.start < ends[-1] or owners:
                raise Refusal("the chat template mixes turns with each other")
            ends.append(span.stop)
        return Rendered(self.text, self.open, tuple(spans))

    def _beginning(self, num_turns: int, prompt: bool = False) -> str:
        if num_turns == len(self.turns) and not prompt:
            return self.text
        return self.renderer(self.messages[:num_turns], self.tools, prompt, False)

    def _span(self, turn: int, prompted: bool) -> Span:
        mine = np.flatnonzero(self.owners == turn)
        if not len(mine) and not prompted:
            raise Refusal("the words of a turn that is to be trained can't be found", f"turn {turn + 1}")
        first = int(mine[0]) if len(mine) else len(self.text)
        start = self._start(turn, first) if prompted else first
        return Span(turn, start, self._stop(turn, start, int(mine[-1]) + 1 if len(mine) else None))

    def _prompted(self, turn: int, text: str) -> str:
        """Give the text up to a turn with a prompt behind it; without, where the template has none behind this turn."""
        try:
            return self._beginning(turn + 1, True)
        except Refusal:
            return text

    def _start(self, turn: int, first: int) -> int:
        """Find where an assistant's turn begins; its first word stands at `first`."""
        prompt = self._beginning(turn, True)
        if self.text.startswith(prompt) and len(prompt) <= first:
            return len(prompt)
        before = self._beginning(turn)
        common = min(_common(self.text, prompt), first)
        if not self.text.startswith(before) or common < len(before):
            raise Refusal(UNSTABLE)
        borders = [control.stop for control in self.controls.find(self.text[:common])]
        spaces = [i + 1 for i in range(len(before), common) if self.text[i].isspace()]
        return common if common == first else max([len(before), *borders[-1:], *spaces[-1:]])

    def _stop(self, turn: int, start: int, last: int | None) -> int:
        """Find where a turn ends; last: behind its last word, None if it has none that can be told."""
        text = self._beginning(turn + 1)
        mine = np.flatnonzero(self.marks.owners(text) == turn)
        said = int(mine[-1]) + 1 if len(mine) else start
        tail = text[said:]
        there = last if last is not None and len(mine) else said
        always = tail[: _common(tail, self._prompted(turn, text)[said:])]
        ends = [control.stop for control in self.controls.find(always) or self.controls.find(tail)]
        for stop in reversed(ends):
            if self.text.startswith(tail[:stop], there):
                return there + stop
        words = self.turns[turn].content
        spaces = words[len(words.rstrip()) :]
        kept = max(len(tail.rstrip()), len(spaces) if tail.startswith(spaces) else 0)
        if not ends and self.text.startswith(tail[:kept], there):
            return there + kept
        raise Refusal(UNSTABLE)


def _tags(marked: str) -> list[tuple[int, int]]:
    """Find what generation tags enclose, in the text without their marks."""
    spans, place, opened = [], 0, 0
    for part in re.split(f"([{OPEN}{CLOSE}])", marked):
        if part == OPEN:
            opened = place
        elif part == CLOSE:
            spans.append((opened, place))
        else:
            place += len(part)
    return spans


def _common(a: str, b: str) -> int:
    """Count the characters that two texts begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low
