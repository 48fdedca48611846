"""Docstrings as Markdown: `programs[mask][direction]` in one is an index, no link."""

from __future__ import annotations

import re

import griffe


class PlainBrackets(griffe.Extension):
    """Escapes what Markdown would take for links and emphasis in docstrings."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Rewrite the docstring of whatever has one."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)


def plain(text: str) -> str:
    """Escape brackets outside of code, and asterisks between words."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if i % 2 else re.sub(r"([\[\]*])", r"\\\1", part) for i, part in enumerate(parts))
