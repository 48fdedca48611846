"""Render: Jinja chat templates in the form that Hugging Face's tokenizers carry, run in Jinja's sandbox.

Templates come with data and models that others made; in the sandbox they can't reach anything but what they are given.
They get `messages`, `tools`, `add_generation_prompt`, `bos_token` and the other special tokens, `raise_exception` and
`strftime_now`, whose day is a setting: with today's date a run resumed tomorrow would train on other tokens. Around
what the model is to write, a template may put `{% generation %} … {% endgeneration %}`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from hsap.data.chat.bounds import BoundedEnvironment, Unbounded
from hsap.data.chat.marks import CLOSE, OPEN
from hsap.ir.check import one_line


class Refusal(Exception):
    """Why a conversation can't be rendered: a reason to count by, and what is wrong with this one."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}{f' ({detail})' if detail else ''}")
        self.reason, self.detail = reason, detail


class Renderer:
    """A compiled template.

    special: the text of special tokens by name, as in bos_token. day: what `strftime_now` takes for today.
    has_tags: whether it has generation tags. known: words it looks for in what it is given. ValueError: no template.
    """

    def __init__(self, source: str, name: str, special: Mapping[str, str], day: datetime.date) -> None:
        self.source, self.name, self.special = source, name, dict(special)
        self.day = datetime.datetime(day.year, day.month, day.day)
        try:
            self._sandboxes = [self._environment(marked) for marked in (False, True)]
            self._open, self._marked = (sandbox.from_string(source) for sandbox in self._sandboxes)
            tree = self._environment(False).parse(source)
            self.known = _known_words(tree)
        except (TemplateError, RecursionError, Unbounded) as error:
            number = getattr(error, "lineno", None)
            line = f", line {number}" if number else ""
            raise ValueError(
                f"chat template {name}{line}: {error}; repair it, or set data.chat_template to another"
            ) from error
        self.has_tags = any(isinstance(n.call.node, nodes.ExtensionAttribute) for n in tree.find_all(nodes.CallBlock))

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: bool, marked: bool
    ) -> str:
        """Give the text of messages. prompt: with what makes the model begin. marked: with marks of generation tags.

        `Refusal`: why the template doesn't render them. ValueError: it goes on beyond all bounds.
        """
        template = self._marked if marked else self._open
        self._sandboxes[marked].begin()
        try:
            return template.render(
                messages=list(messages), tools=list(tools) or None, add_generation_prompt=prompt, **self.special
            )
        except _Said as error:
            raise Refusal(f"the chat template refuses it: {one_line(error.message)}") from error
        except Unbounded as error:
            raise ValueError(
                f"chat template {self.name}: {error}; it has no end in sight: repair it, or set "
                "data.chat_template to another"
            ) from error
        except Exception as error:  # a template may fail in any way that an expression can
            raise Refusal("the chat template refuses it", f"{type(error).__name__}: {error}") from error

    def _environment(self, marked: bool) -> BoundedEnvironment:
        extensions = [_MarkedGeneration if marked else _Generation, "jinja2.ext.loopcontrols"]
        environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = self.day.strftime
        return environment


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: what the model is to write."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own way)
    opening = closing = ""

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

    def write(self, caller: Callable[[], str]) -> str:
        return self.opening + caller() + self.closing


class _MarkedGeneration(_Generation):
    opening, closing = OPEN, CLOSE


def _known_words(tree: nodes.Template) -> frozenset[str]:
    """Find the words that a template compares with, splits at, strips or otherwise asks for."""
    asking = (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)
    consts = (const for node in tree.find_all(asking) for const in node.find_all(nodes.Const))
    return frozenset(const.value for const in consts if isinstance(const.value, str) and const.value.strip())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not Jinja's own, which writes &, < and > for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Said(TemplateError):
    """What a template says by raise_exception, mostly the same words for the same fault."""


def _raise(message: object) -> NoReturn:
    raise _Said(str(message))
