"""What the site's build writes itself, so that it can't go stale: the pages of all settings and of all commands."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from settings import tables

ROOT = Path(__file__).parents[2]


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Fill in what a page asks for by a comment of its own."""
    for mark, write in WRITTEN.items():
        if mark in markdown:
            markdown = markdown.replace(mark, write())
    return markdown


def from_root(name: str) -> str:
    """Give a page of the repository's root, if it is there, its links as they are from docs/."""
    if not (ROOT / name).exists():
        return ""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\]\(docs/", "](", text)


def commands() -> str:
    """Give the help of every command of `hsap`, as it prints it."""
    sys.path.insert(0, str(ROOT))
    os.environ["COLUMNS"] = "100"
    from hsap.cli import _parser

    return "\n".join(_helps(_parser(), "hsap", 2))


def _helps(parser: argparse.ArgumentParser, name: str, level: int) -> Iterator[str]:
    """Give the sections of all commands below a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                below.color = False  # of Python 3.14 on
                yield f"{'#' * level} {name} {word}\n\n```text\n{below.format_help().rstrip()}\n```\n"
                yield from _helps(below, f"{name} {word}", level + 1)


WRITTEN = {
    "<!-- settings -->": tables,
    "<!-- commands -->": commands,
    "<!-- contributing -->": partial(from_root, "CONTRIBUTING.md"),
    "<!-- security -->": partial(from_root, "SECURITY.md"),
}
"""What pages ask for, and who writes it."""
