"""Tables: lines of the bench as aligned text, for reading along, and as Markdown, for keeping."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from tests.bench.planning.cases import BYTES

_SHORT = ("between", "once", "receive", "total", "ms")
TITLES = (
    "area",
    "tokens",
    *_SHORT,
    "b.area",
    *(f"b.{title}" for title in _SHORT),
    "stages",
    "instr.",
    "plan ms",
    "choose ms",
    "µs/instr.",
)
LEGEND = (
    "area, tokens: max/mean over ranks. MiB: between nodes; once: the same, each row once per node; receive: of the "
    "busiest rank; total. ms: a layer's attention as the simulator predicts it. b: backward. plan ms: lengths to "
    "verified columns of all ranks; choose ms: the planner's part of it; µs/instr.: the rest over the instructions. "
    "(name): other planners' published code on the same batches."
)


def name(line: dict) -> str:
    """Give a line's planner, and what it made of the case: a shape of its own for the ranks, or another planner."""
    if "chose" in line:
        return f"{line['planner']}: {' '.join(dict.fromkeys(line['chose']))}"
    return line["planner"] + (f" as {line['own_topology']}" if "own_topology" in line else "")


def cells(line: dict) -> list[str]:
    """Give a line's cells in the order of TITLES; a dash where it has no figure."""
    out = [_number(line.get("area"), 3), _number(line.get("tokens"), 3), *_direction(line.get("forward"))]
    out += [_number(line.get("area_backward"), 3), *_direction(line.get("backward"))]
    out += [_number(line.get(key), 0) for key in ("stages", "instructions")]
    return (
        out
        + [_number(line.get(key), digits) for key, digits in zip(("plan_ms", "choose_ms"), (1, 1))]
        + [_number(line.get("us_per_instruction"), 2)]
    )


def header(width: int) -> str:
    return f"{'planner':<{width}}" + "".join(f"{title:>10}" for title in TITLES)


def text(line: dict, width: int) -> str:
    """One line of aligned text."""
    if "refused" in line:
        return f"{name(line):<{width}}  refused: {line['refused']}"
    return f"{name(line):<{width}}" + "".join(f"{cell:>10}" for cell in cells(line))


def markdown(conditions: str, lines: Iterable[tuple[str, dict]]) -> str:
    """A document with a table a case. lines: (the case in words, line), those of a case one after another."""
    out = ["# Planning bench", "", conditions, "", LEGEND]
    for case, group in groupby(lines, key=lambda pair: pair[0]):
        out += ["", f"## {case}", "", "| planner | " + " | ".join(TITLES) + " |", "|---" * (len(TITLES) + 1) + "|"]
        for _, line in group:
            refused = [f"refused: {line['refused']}"] + [""] * (len(TITLES) - 1) if "refused" in line else None
            out.append(f"| {name(line)} | " + " | ".join(refused or cells(line)) + " |")
    return "\n".join(out) + "\n"


def _direction(found: dict | None) -> list[str]:
    found = found or {}
    seconds = found.get("predicted_s")
    mib = [_number(found[key] / 2**20, 1) if found else "–" for key in BYTES]
    return [*mib, _number(None if seconds is None else seconds * 1e3, 2)]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
