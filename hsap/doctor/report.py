"""Report: lines with a status each, as one page or as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

OK, WARNING, FAILED = "ok", "warning", "FAILED"
_RANKED = (OK, WARNING, FAILED)
WIDTH = 120


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that was looked at. about: what, in a word or two; told: how it is, and what to do unless it's ok."""

    about: str
    status: str
    told: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was looked at. head: where, in one line."""

    head: str
    lines: tuple[Line, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(line.status != FAILED for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "head": self.head, "lines": [asdict(line) for line in self.lines]}

    def __str__(self) -> str:
        wide = max((len(line.about) for line in self.lines), default=0)
        before = len(FAILED) + wide + 4
        page = [self.head, ""]
        for line in self.lines:
            first, *rest = textwrap.wrap(line.told, max(WIDTH - before, 40)) or [""]
            page.append(f"{line.status:<{len(FAILED) + 2}}{line.about:<{wide + 2}}{first}")
            page += [" " * before + more for more in rest]
        counts = {status: sum(line.status == status for line in self.lines) for status in (FAILED, WARNING)}
        told = [
            f"{count} {name}" for count, name in ((counts[FAILED], "failed"), (counts[WARNING], "warnings")) if count
        ]
        return "\n".join([*page, "", ", ".join(told) if told else "all ok"])


def together(by_rank: Iterable[Iterable[Line]]) -> tuple[Line, ...]:
    """Lines of several ranks about the same things: of each the worst, with the rank it is of where they differ."""
    worst: dict[str, tuple[int, Line]] = {}
    statuses: dict[str, set[str]] = {}
    for rank, lines in enumerate(by_rank):
        for line in lines:
            statuses.setdefault(line.about, set()).add(line.status)
            if line.about not in worst or _RANKED.index(line.status) > _RANKED.index(worst[line.about][1].status):
                worst[line.about] = rank, line
    return tuple(
        Line(about, line.status, f"rank {rank}: {line.told}") if len(statuses[about]) > 1 else line
        for about, (rank, line) in worst.items()
    )
