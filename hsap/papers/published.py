"""Published: the papers' figures, as `published.json` has them, a cell of a table or a sentence of the text each.

Nothing there is read off a picture: of figures only what the text says is known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("published.json")


@dataclass(frozen=True, slots=True)
class Published:
    """What a paper says in one table or figure.

    source: where. cells: a mapping of conditions and figures each, as the table has them. quotes: sentences of the
    text. doubts: where the paper contradicts itself, None where it doesn't.
    """

    source: str
    cells: tuple[dict[str, Any], ...]
    quotes: tuple[str, ...] = ()
    doubts: str | None = None


def published(name: str) -> Published:
    """Give what is known of a table: a key of `hsap.papers.TABLES`."""
    data = json.loads(FILE.read_text(encoding="utf-8"))[name]
    return Published(data["source"], tuple(data["cells"]), tuple(data.get("quotes", ())), data.get("doubts"))
