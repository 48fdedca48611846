"""Bounds: the sandbox that chat templates run in, with an end to their loops and to the texts that they make.

Templates come with models and data that others made. Jinja's sandbox keeps them from reaching anything; here each turn
of a loop and each call of a macro is counted, and what multiplies, joins or pads texts is asked for its size before. A
template that is written to fill memory by other ways, such as lists of lists of lists, still can.
"""

from __future__ import annotations

import re
from collections.abc import Sized
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_TURNS = 1_000_000
"""Turns of loops and calls of macros in one rendering; templates of models take a few for each message."""
MOST_CHARACTERS = 1 << 28
"""Of a text that is made; a document may have as many bytes."""
_MOST_BITS = 1 << 16
_LONG_NUMBER = re.compile(r"\d{7,}|\*|:[^}]*\{")
"""Of a format: a width of millions, or one that is given elsewhere."""
_PADS = ("center", "ljust", "rjust", "zfill", "expandtabs")


class Unbounded(Exception):
    """A template goes on for longer, or makes more, than any that is meant well."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with bounds. `begin` starts the count anew."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.turns = 0
        del self.globals["lipsum"]
        for name in ("center", "indent", "slice", "batch", "format", "replace", "join"):
            self.filters[name] = _asked(self.filters[name], name)

    def begin(self) -> None:
        """Start to count: a rendering begins."""
        self.turns = 0

    def turn(self) -> None:
        """Count a turn of a loop, or a call of a macro."""
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise Unbounded(f"it takes more than {MOST_TURNS} turns of its loops for one conversation")

    def joined(self, *parts: object) -> str:
        """Give what `~` does of texts."""
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)))
        return "".join(texts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+" if isinstance(left, Sized) and isinstance(right, Sized):
                _check(len(left) + len(right))
            case "*" | "**" if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
                _check(bits, _MOST_BITS)
            case "*":
                for many, times in ((left, right), (right, left)):
                    if isinstance(many, Sized) and isinstance(times, int):
                        _check(len(many) * times)
            case "%" if isinstance(left, str):
                _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **named: Any) -> Any:
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_made(text, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **named)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped


class _Counting(NodeTransformer):
    """Puts a count into every loop and macro, and a function in place of `~`; nothing that a template can rename."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", [], node.lineno), lineno=node.lineno))
        return node


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), arguments, [], None, None, lineno=line)


def _check(size: int, most: int | None = None) -> None:
    most = MOST_CHARACTERS if most is None else most
    if size > most:
        raise Unbounded(f"it makes a text or a number of {size}, more than {most} characters or bits")


def _check_format(text: str) -> None:
    if _LONG_NUMBER.search(text):
        raise Unbounded("it pads a text to a width of millions, or to one that it is given")


def _check_made(text: str, name: str, args: tuple[Any, ...]) -> None:
    """Ask how long a text will be that a method of texts, or a filter of that name, makes."""
    width = next((arg for arg in args if isinstance(arg, int)), 0)
    if name in _PADS or name in ("slice", "batch"):
        _check(width)
    elif name == "indent":
        _check(width * (text.count("\n") + 1))
    elif name == "replace" and len(args) > 1 and all(isinstance(arg, str) for arg in args[:2]):
        _check(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "format":
        _check_format(text)
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check(sum(len(str(part)) + len(text) for part in args[0]))


def _asked(filter_: Any, name: str) -> Any:
    """Give a filter that asks first; the first argument that isn't Jinja's own is the value."""

    def checked(*given: Any, **named: Any) -> Any:
        values = given[1:] if hasattr(filter_, "jinja_pass_arg") else given
        args = (*values[1:], *named.values())
        if name == "join":
            between = next((arg for arg in args if isinstance(arg, str)), "")
            _check_made(between, name, (values[0],))
        elif values:
            _check_made(str(values[0]), name, args)
        return filter_(*given, **named)

    if hasattr(filter_, "jinja_pass_arg"):
        checked.jinja_pass_arg = filter_.jinja_pass_arg  # type: ignore[attr-defined]  # jinja's own mark
    return checked
