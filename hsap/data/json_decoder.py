"""JSON of rows, and whether an object in it names a field twice: libraries take the last one without a word."""

from __future__ import annotations

import json
from typing import Any

TWICE = "a JSON object that names a field twice"
"""Why what has one is left out: which of the two is meant nobody can say."""


class JsonDecoder:
    """Decodes JSON. twice: a field that an object of the last value names twice, None where none does."""

    def __init__(self) -> None:
        self.twice: str | None = None
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def decode(self, text: str) -> object:
        """Decode a text that is one value; ValueError, RecursionError: it isn't."""
        self.twice = None
        return self._decoder.decode(text)

    def raw_decode(self, text: str, at: int) -> tuple[object, int]:
        """Decode the value that begins at a place; gives it and where it ends."""
        self.twice = None
        return self._decoder.raw_decode(text, at)

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            names = [name for name, _ in pairs]
            self.twice = next(name for name in names if names.count(name) > 1)
        return made
