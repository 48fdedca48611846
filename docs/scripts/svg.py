"""SVG: the few shapes that the documentation's pictures are made of, written out as text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from hsap.ir.slice import HI, K0, K1, LO, Q0, Q1

# The viewer's colours (hsap/view/static/colours.js): ranks by Paul Tol's "muted" scheme, buffers by his "bright" one.
RANKS = ("#cc6677", "#6a5fb0", "#ddcc77", "#3f9a5c", "#88ccee", "#a8507f", "#44aa99", "#999933", "#aa4499")
ROLES = {"q": "#4477aa", "kv": "#66ccee", "o": "#228833", "do": "#ccbb44", "dq": "#ee6677", "dkv": "#aa3377"}
DOCUMENTS = ("#5b7fa6", "#a8752e", "#5f8f5a", "#9a5f86", "#7a7a7a", "#b0493f")
PAPER, PLOT, INK, MUTED, LINE, WORK, WAIT = "#ffffff", "#f3f2ee", "#1d2129", "#5f646d", "#b9b8b2", "#9a9ca3", "#dddbd5"
INTRA, INTER = "#2f7f8f", "#c4681c"


class Drawing:
    """A picture under construction: shapes are added, `text` gives the file. Lengths are pixels."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self.parts: list[str] = []
        self.box(0, 0, width, height, PAPER, radius=6)

    def box(self, x, y, w, h, fill, stroke="none", radius=0.0, tip="") -> None:
        """Draw a rectangle; `tip` is shown when it is pointed at."""
        title = f"<title>{escape(tip)}</title>" if tip else ""
        shape = f'x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" fill="{fill}" stroke="{stroke}"'
        self.parts.append(f'<rect {shape} rx="{_n(radius)}">{title}</rect>')

    def polygon(self, points: Sequence[tuple[float, float]], fill, stroke="none", opacity=1.0) -> None:
        """Draw a closed shape."""
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" fill="{fill}" stroke="{stroke}" fill-opacity="{_n(opacity)}"/>')

    def line(self, x0, y0, x1, y1, stroke=LINE, width=1.0, arrow=False) -> None:
        """Draw a straight line, with a head at its end if it is an arrow."""
        head = ' marker-end="url(#head)"' if arrow else ""
        shape = f'x1="{_n(x0)}" y1="{_n(y0)}" x2="{_n(x1)}" y2="{_n(y1)}"'
        self.parts.append(f'<line {shape} stroke="{stroke}" stroke-width="{_n(width)}"{head}/>')

    def curve(self, x0, y0, x1, y1, bend, stroke, width=1.5) -> None:
        """Draw an arrow that bulges by `bend` to its left."""
        length = float(np.hypot(x1 - x0, y1 - y0)) or 1.0
        x, y = (x0 + x1) / 2 + bend * (y1 - y0) / length, (y0 + y1) / 2 - bend * (x1 - x0) / length
        path = f"M{_n(x0)},{_n(y0)} Q{_n(x)},{_n(y)} {_n(x1)},{_n(y1)}"
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{_n(width)}" marker-end="url(#head)"/>'
        )

    def word(self, x, y, text, size=12.0, fill=INK, anchor="start", bold=False) -> None:
        """Write one line of text; y is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        where = f'x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" text-anchor="{anchor}"'
        self.parts.append(f'<text {where} fill="{fill}"{weight}>{escape(str(text))}</text>')

    def text(self) -> str:
        """Give the whole file."""
        width, height = map(_n, self.size)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
                f' width="{width}" height="{height}" font-family="system-ui, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
                ' orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="context-stroke"/></marker></defs>',
                *self.parts,
                "</svg>\n",
            ]
        )


def outline(piece: Sequence[int]) -> list[tuple[float, float]]:
    """Give the corners (k, q) of what a slice shows: its rectangle, cut by its two diagonals."""
    q0, q1, k0, k1, lo, hi = (float(piece[i]) for i in (Q0, Q1, K0, K1, LO, HI))
    corners = [(k0, q0), (k1, q0), (k1, q1), (k0, q1)]
    for sign, bound in ((1.0, hi + 0.5), (-1.0, 0.5 - lo)):
        kept = []
        for (xa, ya), (xb, yb) in zip(corners, corners[1:] + corners[:1]):
            a, b = bound - sign * (xa - ya), bound - sign * (xb - yb)
            if a >= 0:
                kept.append((xa, ya))
            if (a < 0) != (b < 0):
                kept.append((xa + (xb - xa) * a / (a - b), ya + (yb - ya) * a / (a - b)))
        corners = kept
    return corners


def ink_on(colour: str) -> str:
    """Choose black or white, whichever is read better on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return INK if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.22 else "#ffffff"


def _n(value: float) -> str:
    """Write a number with two decimals at most, the same on every machine."""
    return f"{round(float(value), 2) + 0.0:.6g}"
