"""Masks: what a document's tokens may see of their own document, as slices.

A `Mask` is a family's name with its parameters and fits documents of any length. A `SliceMask` is the slices
themselves, for one document of one length: what a user's own function gave. Both are values that a plan keeps and
hashes; nothing in either can be executed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hsap.ir.check import MAX_LAYERS, MAX_SHOWN, MAX_TOKENS, instance, one_of, shown, whole, wholes
from hsap.ir.families import MASKS
from hsap.ir.layout import Layout
from hsap.ir.slice import K0, K1, Q0, Q1, Slice, overlap, shrink, slices

LIMIT = 1 << 41
"""No number of a slice that is given may be larger, so that their sums stay in int64."""

Rows = np.ndarray | Iterable[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Mask:
    """One attention pattern for documents of any length: a name of `MASKS` with its parameters, integers to 2^40."""

    name: str = "causal"
    parameters: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        family = MASKS[one_of("mask: unknown name", self.name, MASKS, "masks")]
        given = wholes(f"mask: parameters of {self.name}", self.parameters, 0)
        if len(given) != len(family.least):
            raise ValueError(f"mask: {self.name!r} got parameters {shown(given)}; write {family.spelling(self.name)}")
        for value, (parameter, least) in zip(given, family.least.items(), strict=True):
            whole(f"mask: {parameter} of {self.name}", value, least)
        if fault := family.fault(*given):
            raise ValueError(f"mask: {self.name}: {fault}")
        object.__setattr__(self, "parameters", given)

    @classmethod
    def parse(cls, text: str) -> Mask:
        """Read `name` or `name:p,…`, as in `window:4096`."""
        name, _, rest = (
            instance("mask", text, str, "a name with its parameters, as in window:4096").strip().partition(":")
        )
        try:
            parameters = tuple(int(p) for p in rest.split(",")) if rest else ()
        except ValueError:
            raise ValueError(f"mask: the parameters of {shown(text)} must be integers, as in window:4096") from None
        return cls(name, parameters)

    @staticmethod
    def of(
        function: Callable[[int, tuple[int, ...]], Rows],
        layout: Layout,
        composition: Sequence[Sequence[int]] | None = None,
        name: str | None = None,
    ) -> tuple[SliceMask, ...]:
        """Ask a function for the slices of every document of a layout: a mask for each, for `Problem.masks`.

        function(length, parts) gives one document's slices, [n, 6] or a list of (q0, q1, k0, k1[, lo[, hi]]), in
        positions from its first token on; equal arguments must give equal slices. composition: the lengths of each
        document's parts (a question and its answers, say), which add up to the document; None: it is one part.
        ValueError: the document, and the slice that lies outside of it or shows a pair that another shows too.
        """
        name = getattr(function, "__name__", "function") if name is None else name
        known: dict[tuple[int, tuple[int, ...]], SliceMask] = {}
        masks = []
        for document, key in enumerate(zip(layout.lengths, _parts(layout, composition), strict=True)):
            if key not in known:
                try:
                    known[key] = SliceMask(name, key[0], _as_table(name, function(*key)))
                except ValueError as error:
                    raise ValueError(f"document {document}, of {key[0]} tokens: {error}") from error
            masks.append(known[key])
        return tuple(masks)

    def __str__(self) -> str:
        return self.name + (":" + ",".join(map(str, self.parameters)) if self.parameters else "")

    def slices(self, num_tokens: int) -> np.ndarray:
        """Give the slices of a document of `num_tokens` tokens, from position 0: int64 [n, 6], canonical, disjoint."""
        return shrink(MASKS[self.name].slices(num_tokens, *self.parameters))[0]


@dataclass(frozen=True, slots=True, eq=False)
class SliceMask:
    """One attention pattern of one document, as its slices. See `Mask.of`, which makes them from a function.

    name: for people. num_tokens: the document's length. table: int64 [n, 6], in positions from the document's first
    token on, canonical and disjoint. It may be given as a list of (q0, q1, k0, k1[, lo[, hi]]) that isn't canonical.
    """

    name: str
    num_tokens: int
    table: np.ndarray

    def __post_init__(self) -> None:
        if not instance("mask: name", self.name, str, "a word").isprintable() or len(self.name) > MAX_SHOWN:
            raise ValueError(f"mask: name is {shown(self.name)}; give a word or two, which are printed")
        object.__setattr__(self, "num_tokens", whole(f"mask {self.name}: num_tokens", self.num_tokens, 1, MAX_TOKENS))
        given = _as_table(self.name, self.table)
        outside = (given[:, [Q0, K0]] < 0).any(axis=1) | (given[:, [Q1, K1]] > self.num_tokens).any(axis=1)
        if outside.any():
            i = int(outside.argmax())
            raise ValueError(
                f"mask {self.name}: slice {i}, {_show(given[i])}, leaves the document's [0, {self.num_tokens})"
            )
        table, kept = shrink(given)
        if pair := overlap(table):
            i, j = kept[list(pair)].tolist()
            raise ValueError(
                f"mask {self.name}: slices {i} and {j}, {_show(given[i])} and {_show(given[j])}, show some pair of "
                "query and key both; slices must be disjoint, or attention would count the key twice"
            )
        table.flags.writeable = False
        object.__setattr__(self, "table", table)

    def slices(self, num_tokens: int) -> np.ndarray:
        """Give the slices of the document, which has `num_tokens` tokens: int64 [n, 6], canonical, disjoint."""
        if num_tokens != self.num_tokens:
            raise ValueError(
                f"mask {self.name} is of a document of {self.num_tokens} tokens, this one has {num_tokens}; make masks "
                "by Mask.of for the layout that they are used with"
            )
        return self.table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SliceMask) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[str, int, bytes]:
        return self.name, self.num_tokens, self.table.tobytes()

    def __str__(self) -> str:
        return f"{self.name} ({len(self.table)} slices)"


Masks = Mask | tuple[Mask | SliceMask, ...]
"""One mask for all documents of a packed batch, or one for each."""


def most_slices(layout: Layout, masks: Masks) -> int:
    """Say how many slices a packed batch has at most, without making them."""
    if isinstance(masks, Mask):
        return MASKS[masks.name].most(layout.num_documents, layout.num_tokens, *masks.parameters)
    return sum(
        len(mask.table) if isinstance(mask, SliceMask) else MASKS[mask.name].most(1, length, *mask.parameters)
        for mask, length in zip(masks, layout.lengths, strict=True)
    )


def mask_slices(layout: Layout, masks: Masks) -> np.ndarray:
    """Give the slices of a whole packed batch in token positions: int64 [n, 6], canonical, disjoint, by document."""
    if layout.num_documents == 0:
        return slices([])
    if isinstance(masks, Mask):
        masks = (masks,) * layout.num_documents
    starts = layout.cu_seqlens[:-1]
    known: dict[tuple[Mask, int], np.ndarray] = {}
    parts = []
    for mask, length in zip(masks, layout.lengths, strict=True):
        if isinstance(mask, SliceMask):
            parts.append(mask.slices(length))
            continue
        if (mask, length) not in known:
            known[mask, length] = MASKS[mask.name].slices(length, *mask.parameters)
        parts.append(known[mask, length])
    table = np.concatenate(parts)
    table[:, [Q0, Q1, K0, K1]] += np.repeat(starts, [len(part) for part in parts])[:, None]
    return shrink(table)[0]  # of all documents at once: it takes some thirty calls


def parse_masks(text: str) -> tuple[tuple[Mask, int], ...]:
    """Read `NAME[:p,…][*layers][+NAME…]`, as in `window:1024*5+causal*1`, as `Problem.masks`: (mask, number of layers).

    Without a number it is one layer. A mask that is named twice is one entry; entries come in order of first mention.
    """
    return distinct_masks(parse_layers(text))[0]


def parse_layers(text: str) -> tuple[Mask, ...]:
    """Read the same text as one mask for each layer, in order."""
    layers: list[Mask] = []
    for part in instance("mask", text, str, "masks, as in window:1024*5+causal*1").split("+"):
        name, star, count = part.partition("*")
        if star and not (count.strip().isascii() and count.strip().isdigit()):
            raise ValueError(f"mask: {shown(part)} has no number of layers behind its *; write it as in window:1024*5")
        mask = Mask.parse(name)
        layers += [mask] * whole(f"mask: number of layers of {mask}", int(count) if star else 1, 1, MAX_LAYERS)
    return tuple(layers)


def distinct_masks(layers: Sequence[Mask]) -> tuple[tuple[tuple[Mask, int], ...], tuple[int, ...]]:
    """Count the layers of each distinct mask: (`Problem.masks`, index of each layer's mask in them)."""
    counts = Counter(layers)
    index = {mask: i for i, mask in enumerate(counts)}
    return tuple(counts.items()), tuple(index[mask] for mask in layers)


def mask_to_json(masks: Masks | SliceMask) -> Any:
    """Give masks as JSON values: a mask's text, or a list with a text or an object with slices for each document."""
    if isinstance(masks, tuple):
        return [mask_to_json(mask) for mask in masks]
    if isinstance(masks, SliceMask):
        return {"name": masks.name, "num_tokens": masks.num_tokens, "slices": masks.table.tolist()}
    return str(masks)


def mask_from_json(data: Any) -> Masks:
    """Read what `mask_to_json` gives; masks among it stay what they are."""
    if isinstance(data, list | tuple):
        return tuple(_one_mask(mask) for mask in data)
    return data if isinstance(data, Mask) else Mask.parse(data)


def _one_mask(data: Any) -> Mask | SliceMask:
    if isinstance(data, dict):
        if data.keys() != {"name", "num_tokens", "slices"}:
            raise ValueError(f"mask: {shown(data)} is no mask of slices; it has a name, num_tokens and slices")
        return SliceMask(data["name"], data["num_tokens"], data["slices"])
    return data if isinstance(data, Mask | SliceMask) else Mask.parse(data)


def _parts(layout: Layout, composition: Sequence[Sequence[int]] | None) -> list[tuple[int, ...]]:
    """Give the lengths of every document's parts, checked."""
    if composition is None:
        return [(length,) for length in layout.lengths]
    parts = [wholes(f"mask: composition[{i}]", lengths, 0, MAX_TOKENS) for i, lengths in enumerate(composition)]
    if len(parts) != layout.num_documents:
        raise ValueError(
            f"mask: composition has {len(parts)} entries for {layout.num_documents} documents; give one per document"
        )
    for i, (lengths, length) in enumerate(zip(parts, layout.lengths, strict=True)):
        if sum(lengths) != length:
            raise ValueError(
                f"mask: composition[{i}] adds up to {sum(lengths)} tokens, document {i} has {length}; give the lengths "
                "of all its parts"
            )
    return parts


def _as_table(name: str, given: Any) -> np.ndarray:
    """Give slices as an int64 table of their own [n, 6]; ValueError names the slice that is none."""
    whole_numbers = isinstance(given, np.ndarray) and given.ndim == 2 and given.dtype.kind in "iu"
    if whole_numbers and given.shape[1] == 6 and -LIMIT <= given.min(initial=0) <= given.max(initial=0) <= LIMIT:
        return given.astype(np.int64)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ValueError(f"mask {name}: slices are {shown(given)}; give a list of (q0, q1, k0, k1[, lo[, hi]])")
    rows = []
    for i, row in enumerate(given):
        numbers = wholes(f"mask {name}: slice {i}", row, -LIMIT, LIMIT)
        if not 4 <= len(numbers) <= 6:
            raise ValueError(f"mask {name}: slice {i} has {len(numbers)} numbers; give (q0, q1, k0, k1[, lo[, hi]])")
        rows.append(Slice(*numbers))
    return slices(rows)


def _show(row: np.ndarray) -> str:
    return "({}, {}, {}, {}, {}, {})".format(*row.tolist())
