"""Lengths: how long documents are, as percentiles and a histogram in 80 columns."""

from __future__ import annotations

import numpy as np

PERCENTILES = (1, 10, 25, 50, 75, 90, 99, 99.9)
_BAR = 24


def percentiles(lengths: np.ndarray) -> dict[str, int]:
    """Give lengths that so many percent of the documents don't exceed, by name; each is a document's length."""
    if not len(lengths):
        return {}
    found = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
    return {f"p{rank:g}": int(value) for rank, value in zip(PERCENTILES, found)}


def histogram(lengths: np.ndarray) -> list[str]:
    """Draw how many documents, and which share of all tokens, are in each power of two; a line each."""
    if not len(lengths):
        return []
    power = np.frexp(np.maximum(lengths, 0).astype(float))[1]  # 0 for 0, n + 1 for [2^n, 2^(n + 1))
    documents = np.bincount(power)
    tokens = np.bincount(power, weights=lengths)
    share = 100 * tokens / max(tokens.sum(), 1)
    lines = [f"{'tokens':>21} {'documents':>13} {'':{_BAR}} {'of tokens':>10}"]
    for n in range(int(np.flatnonzero(documents)[0]), len(documents)):
        low, high = (0, 0) if n == 0 else (1 << (n - 1), (1 << n) - 1)
        name = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        lines.append(f"{name:>21} {documents[n]:>13,} {_bar(documents[n] / documents.max()):{_BAR}} {share[n]:>8.2f} %")
    return lines


def _bar(share: float) -> str:
    """Draw a share of a full bar, in eighths of a character; what there is at all is seen."""
    eighths = round(share * _BAR * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
