"""Steps: what a run wrote of each of its steps, one JSON object a line in DIR/metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"


def read_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Walk the steps of a file, none where there is none; lines that are no objects, as of a crash, are left out."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                figures = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(figures, dict):
                yield figures
