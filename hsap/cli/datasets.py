"""Datasets: packs drawn from the document lengths of real corpora, by name.

`datasets/lengths` has two kinds: bins fitted to published tables, and the lengths of documents as they were measured.
"""

from __future__ import annotations

import csv
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from hsap.ir.check import MAX_TOKENS, one_of, whole

FOLDER = Path(__file__).parents[2] / "datasets" / "lengths"
MAX_SEED = (1 << 63) - 1
_DRAWN_AT_ONCE = 1024


def names() -> list[str]:
    """Names that `draw` knows."""
    return sorted(_samples()) + sorted(_bins())


def draw(name: str, num_tokens: int, seed: int) -> list[int]:
    """Draw document lengths [tokens] until they fill a pack of `num_tokens`; the last one is cut to fit.

    Deterministic. A larger pack of the same seed goes on where the smaller one ends. ValueError: unknown name, which
    lists the known ones, and sizes out of range.
    """
    one_of("--dataset: unknown name", name, names(), "datasets")
    num_tokens = whole("--tokens", num_tokens, 1, MAX_TOKENS)
    rng = np.random.default_rng(whole("--seed", seed, 0, MAX_SEED))
    drawn = np.zeros(0, np.int64)
    while drawn.sum() < num_tokens:
        drawn = np.concatenate([drawn, documents(name, _DRAWN_AT_ONCE, rng)])
    count = int(np.searchsorted(np.cumsum(drawn), num_tokens)) + 1
    lengths = drawn[:count].tolist()
    return [*lengths[:-1], num_tokens - sum(lengths[:-1])]


def documents(name: str, num_documents: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the lengths [tokens] of so many documents of a dataset that is known: int64 [num_documents]."""
    samples = _samples()
    table, lengths_of = (samples[name], _of_samples) if name in samples else (_bins()[name], _of_bins)
    return lengths_of(table, rng.random((num_documents, 2)))


def _of_samples(samples: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Draw measured lengths, each as likely as the others."""
    return samples[(uniform[:, 0] * len(samples)).astype(np.int64)]


def _of_bins(bins: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Draw a bin by share, then a length with density ∝ x^-(1 + alpha) inside it, by inverting its distribution."""
    low, high, share, alpha = bins.T
    which = np.minimum(np.searchsorted(np.cumsum(share) / share.sum(), uniform[:, 0], side="right"), len(bins) - 1)
    low, high, power = low[which], high[which], -alpha[which]
    at = uniform[:, 1]
    flat = power == 0  # density ∝ 1 / x: its logarithm is uniform
    curve = np.where(flat, 1.0, power)
    curved = (low**curve + at * (high**curve - low**curve)) ** (1 / curve)
    return np.where(flat, low * (high / low) ** at, curved).astype(np.int64)


@functools.cache
def _bins() -> dict[str, np.ndarray]:
    """Length bins of each fitted dataset: float64 [n, 4] of low, high [tokens], share, alpha."""
    tables: dict[str, list[Any]] = {}
    for row in csv.DictReader(_read("bins.csv").splitlines()):
        tables.setdefault(row["dataset"], []).append([float(row[key]) for key in ("lo", "hi", "share", "alpha")])
    return {name: np.array(rows) for name, rows in tables.items()}


@functools.cache
def _samples() -> dict[str, np.ndarray]:
    """Measured lengths of each dataset: int64 [n]."""
    return {name: np.array(lengths) for name, lengths in json.loads(_read("samples.json")).items()}


def _read(name: str) -> str:
    if not FOLDER.is_dir():
        raise ValueError(f"--dataset: there is no {FOLDER}; it comes with the source tree, so install from there")
    return (FOLDER / name).read_text(encoding="utf-8")
