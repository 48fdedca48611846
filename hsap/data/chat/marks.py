"""Marks: whose words a character of a rendered chat is.

A template takes the words of turns and gives one text, and from the text alone one can't say which of its characters
were said and which the template wrote: a user may write the template's own markers. So turns are rendered a second time
under cover: every character that was said is replaced by one that no text uses, another for each turn, and after
rendering it is known of each. Uncovered again, the text must be the one rendered openly; a template that does with
words what can't be followed (upper case, say) is found out by that.

Left as they are: whitespace, which templates strip; what JSON escapes; and words that the template itself looks for
(`'</think>' in message.content`), unless they spell a control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

FIRST, LAST = 0x40000, 0xDFFFD
"""Code points that Unicode has given no meaning and never text: planes 4 to 13."""
OPEN, CLOSE = "\U000dfffe", "\U000dffff"
"""Written where a generation tag begins and ends."""

NOBODY = -1


class Marks:
    """The covers of one conversation's characters.

    controls: spellings of control tokens. known: words that the template looks for.
    """

    def __init__(self, controls: Iterable[str], known: Iterable[str]) -> None:
        self._controls = alternation(controls)
        self._known = alternation(known)
        self._covers: dict[int, _Cover] = {}
        self._open: dict[int, int] = {}
        self._owners: list[int] = []
        self._table = np.zeros(0, dtype=np.int32)

    def cover(self, text: str, owner: int) -> str:
        """Replace what was said by `owner`, a turn's index."""
        cover = self._covers.setdefault(owner, _Cover(self, owner))
        parts = []
        for i, part in enumerate(self._controls.split(text)):
            if i % 2:
                parts.append(part.translate(cover))
            else:
                words = self._known.split(part)
                parts += [word if j % 2 else word.translate(cover) for j, word in enumerate(words)]
        return "".join(parts)

    def guard(self, text: str) -> str:
        """Replace only what spells a control token: of words that templates look into, as in a tool's schema."""
        cover = self._covers.setdefault(NOBODY, _Cover(self, NOBODY))
        return self._controls.sub(lambda match: match[0].translate(cover), text)

    def covered(self, value: Any, owner: int | None) -> Any:
        """Cover all text in a JSON value but keys; owner None: guard it."""
        if isinstance(value, str):
            return self.guard(value) if owner is None else self.cover(value, owner)
        if isinstance(value, Mapping):
            return {key: self.covered(inner, owner) for key, inner in value.items()}
        if isinstance(value, Sequence):
            return [self.covered(inner, owner) for inner in value]
        return value

    def open(self, text: str) -> str:
        """Give text as it was before it was covered; generation marks leave it."""
        return text.translate({**self._open, ord(OPEN): None, ord(CLOSE): None})

    def owners(self, text: str) -> np.ndarray:
        """Say whose each character is: int32 [len(text)], `NOBODY` for the template's and those left as they are."""
        codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4").astype(np.int64) - FIRST
        if len(self._table) != len(self._owners) + 1:
            self._table = np.array([*self._owners, NOBODY], dtype=np.int32)
        return self._table[np.where((codes >= 0) & (codes < len(self._owners)), codes, -1)]

    def allot(self, code: int, owner: int) -> int:
        """Give a character of an owner its cover; OverflowError where there are no more."""
        cover = FIRST + len(self._owners)
        if cover > LAST:
            raise OverflowError("more different characters than Unicode has room for")
        self._owners.append(owner)
        self._open[cover] = code
        return cover


class _Cover(dict[int, int]):
    """Covers of one owner's characters by code point, made as they are asked for."""

    def __init__(self, marks: Marks, owner: int) -> None:
        super().__init__()
        self.marks, self.owner = marks, owner

    def __missing__(self, code: int) -> int:
        # JSON escapes quotes, backslashes and what is below the space.
        stays = chr(code).isspace() or chr(code) in '"\\' or code < 0x20
        self[code] = code if stays else self.marks.allot(code, self.owner)
        return self[code]


def alternation(words: Iterable[str]) -> re.Pattern[str]:
    """Compile what finds any of some words, the longest first, as a group of its own; nothing where there are none."""
    ordered = sorted(set(filter(None, words)), key=lambda word: (-len(word), word))
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else "((?!))")
