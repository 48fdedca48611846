"""Masks: what a document's tokens may see of their own document, as slices.

A mask is a name with integer parameters. `MASKS` is the whole list; an entry turns a document length into slices whose
coordinates start at the document's first token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hsap.ir.check import instance, one_of, wholes
from hsap.ir.layout import Layout
from hsap.ir.slice import K0, K1, Q0, Q1, UNBOUNDED, canonical, slices


def _causal(n: int) -> np.ndarray:
    return slices([(0, n, 0, n, -UNBOUNDED, 0)])


def _full(n: int) -> np.ndarray:
    return slices([(0, n, 0, n, -UNBOUNDED, UNBOUNDED)])


def _window(n: int, width: int) -> np.ndarray:
    return slices([(0, n, 0, n, 1 - width, 0)])


@dataclass(frozen=True, slots=True)
class _Family:
    slices: Callable[..., np.ndarray]
    parameters: tuple[str, ...]
    meaning: str


MASKS: dict[str, _Family] = {
    "causal": _Family(_causal, (), "a token sees itself and what comes before it"),
    "full": _Family(_full, (), "every token sees every token"),
    "window": _Family(_window, ("width",), "causal, the last `width` keys only, the query's own included"),
}


@dataclass(frozen=True, slots=True)
class Mask:
    """One attention pattern of a document: a name of `MASKS` with its integer parameters, 1 to 2^40."""

    name: str = "causal"
    parameters: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        family = MASKS[one_of("mask: unknown name", self.name, MASKS, "masks")]
        object.__setattr__(self, "parameters", wholes(f"mask: parameters of {self.name}", self.parameters))
        if len(self.parameters) != len(family.parameters):
            wanted = ":".join([self.name, ",".join(family.parameters)]) if family.parameters else self.name
            raise ValueError(f"mask: {self.name!r} got parameters {self.parameters}; write {wanted}")

    @classmethod
    def parse(cls, text: str) -> Mask:
        """Read `name` or `name:p,…`, as in `window:4096`."""
        name, _, rest = (
            instance("mask", text, str, "a name with its parameters, as in window:4096").strip().partition(":")
        )
        try:
            parameters = tuple(int(p) for p in rest.split(",")) if rest else ()
        except ValueError:
            raise ValueError(f"mask: the parameters of {text!r} must be integers, as in window:4096") from None
        return cls(name, parameters)

    def __str__(self) -> str:
        return self.name + (":" + ",".join(map(str, self.parameters)) if self.parameters else "")

    def slices(self, num_tokens: int) -> np.ndarray:
        """Give the slices of a document of `num_tokens` tokens, from position 0: int64 [n, 6], canonical, disjoint."""
        return canonical(MASKS[self.name].slices(num_tokens, *self.parameters))


def mask_slices(layout: Layout, masks: Mask | tuple[Mask, ...]) -> np.ndarray:
    """Give the slices of a whole packed batch in token positions: int64 [n, 6], canonical, disjoint, by document.

    masks: one mask for all documents or one per document.
    """
    if layout.num_documents == 0:
        return slices([])
    if isinstance(masks, Mask):
        masks = (masks,) * layout.num_documents
    starts = layout.cu_seqlens[:-1]
    known: dict[tuple[Mask, int], np.ndarray] = {}
    parts = []
    for mask, length in zip(masks, layout.lengths, strict=True):
        part = known.get((mask, length))
        if part is None:
            part = known[mask, length] = MASKS[mask.name].slices(length, *mask.parameters)
        parts.append(part)
    table = np.concatenate(parts)
    table[:, [Q0, Q1, K0, K1]] += np.repeat(starts, [len(part) for part in parts])[:, None]
    return canonical(table)  # of all documents at once: it takes some thirty calls
