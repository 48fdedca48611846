"""Curves: samples over steps as an SVG of small panels, one for each quantity, one line for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 150, 64, 30, 34
_COLUMNS = 2
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
_STYLE = (
    "text{font:11px sans-serif;fill:#57606a}.title{font-weight:600;fill:#24292f}"
    ".frame{fill:none;stroke:#d0d7de}.line{fill:none;stroke-width:1.2}.warm{fill:#8c959f;fill-opacity:.12}"
    "@media(prefers-color-scheme:dark){text{fill:#9198a1}.title{fill:#f0f6fc}.frame{stroke:#3d444d}}"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One quantity. lines: by name, (x, y) in order of x. unit: what y is divided by, and its name."""

    title: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    unit: tuple[float, str] = (1.0, "")


def svg(panels: Sequence[Panel], warm_until: float, x_name: str = "step") -> str:
    """Draw the panels. What lies left of `warm_until` is shaded: it isn't judged."""
    rows = -(-len(panels) // _COLUMNS)
    width, height = _COLUMNS * (_WIDTH + _LEFT + _GAP), rows * (_HEIGHT + _TOP + _GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    parts = [head, f"<style>{_STYLE}</style>"]
    for i, panel in enumerate(panels):
        x = (i % _COLUMNS) * (_WIDTH + _LEFT + _GAP) + _LEFT
        y = (i // _COLUMNS) * (_HEIGHT + _TOP + _GAP) + _TOP
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel, warm_until, x_name), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, warm_until: float, x_name: str) -> list[str]:
    divisor, unit = panel.unit
    xs = [x for line in panel.lines.values() for x in line[0]]
    ys = [y / divisor for line in panel.lines.values() for y in line[1]]
    if not xs:
        return []
    low, high = min(ys), max(ys)
    if low == high:
        low, high = low - 1, high + 1
    left, right = min(xs), max(max(xs), min(xs) + 1)

    def place(x: float, y: float) -> str:
        return f"{_WIDTH * (x - left) / (right - left):.1f},{_HEIGHT * (high - y) / (high - low):.1f}"

    warm = max(0.0, _WIDTH * (min(warm_until, right) - left) / (right - left))
    out = [
        f'<text class="title" y="-8">{escape(panel.title)}{f" ({unit})" if unit else ""}</text>',
        f'<rect class="warm" width="{warm:.1f}" height="{_HEIGHT}"/>',
        f'<rect class="frame" width="{_WIDTH}" height="{_HEIGHT}"/>',
        f'<text x="-6" y="10" text-anchor="end">{high:.5g}</text>',
        f'<text x="-6" y="{_HEIGHT}" text-anchor="end">{low:.5g}</text>',
        f'<text y="{_HEIGHT + 14}">{left:g}</text>',
        f'<text x="{_WIDTH}" y="{_HEIGHT + 14}" text-anchor="end">{x_name} {right:g}</text>',
    ]
    for i, (name, (x, y)) in enumerate(panel.lines.items()):
        points = " ".join(place(a, b / divisor) for a, b in zip(x, y))
        colour = _COLOURS[i % len(_COLOURS)]
        out.append(
            f'<polyline class="line" stroke="{colour}" points="{points}"><title>{escape(name)}</title></polyline>'
        )
    return out
