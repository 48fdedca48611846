"""best_fit: no document is cut unless it is longer than a pack.

Best-fit decreasing (Ding et al., Fewer Truncations Improve Language Modeling, ICML 2024, §3): pieces of a window go
from long to short, each into the pack that it fills best. No two packs of a window could have been one. The packs are
then shuffled, and within a pack documents stand in random order, so that where one stands says nothing about its
length. O(n log pack_tokens), by counts of the packs with each room in a Fenwick tree (the paper has a segment tree).
Ours: the windows, which make it a stream.
"""

from __future__ import annotations

import numpy as np

from hsap.data.packing.packs import Packs, Pieces
from hsap.loops import inner, loop


def best_fit(pieces: Pieces, pack_tokens: int, random: np.random.Generator) -> Packs:
    """Pack pieces; one longer than a pack gets one of its own."""
    tokens = pieces.tokens
    long_first = np.argsort(-tokens, kind="stable")
    pack = np.empty(len(pieces), np.int64)
    filled, num_packs = _fill(tokens[long_first], pack_tokens)
    pack[long_first] = filled
    return Packs.gathered(pieces, random.permutation(num_packs)[pack], num_packs)


@loop
def _fill(tokens, pack_tokens):
    pack = np.empty(len(tokens), np.int64)
    counts = np.zeros(pack_tokens + 1, np.int64)  # Fenwick tree: packs by the room they have left
    newest = np.full(pack_tokens + 1, -1)  # of the packs with a room, and for each pack the one before it
    before = np.empty(len(tokens), np.int64)
    packs = 0
    with_room = 0
    for i in range(len(tokens)):
        fuller = _up_to(counts, tokens[i] - 1) if tokens[i] <= pack_tokens else with_room
        if fuller < with_room:
            room = _place(counts, fuller)
            number = newest[room]
            newest[room] = before[number]
            _add(counts, room, -1)
            with_room -= 1
        else:
            room, number = pack_tokens, packs
            packs += 1
        pack[i] = number
        room -= tokens[i]
        if room > 0:
            before[number], newest[room] = newest[room], number
            _add(counts, room, 1)
            with_room += 1
    return pack, packs


@inner
def _add(counts, room, change):
    while room < len(counts):
        counts[room] += change
        room += room & -room


@inner
def _up_to(counts, room):
    """How many packs have at most this room."""
    total = 0
    while room > 0:
        total += counts[room]
        room -= room & -room
    return total


@inner
def _place(counts, skipped):
    """Room of the pack that comes after `skipped` others when packs are sorted by room."""
    room = 0
    step = 1
    while step * 2 < len(counts):
        step *= 2
    while step:
        if room + step < len(counts) and counts[room + step] <= skipped:
            room += step
            skipped -= counts[room]
        step //= 2
    return room + 1
