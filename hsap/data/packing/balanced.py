"""balanced: the packs of a step have near-equal weight, so that no data-parallel rank waits for another.

After WLB-LLM (Wang et al., OSDI 2025, §4), which packs to a variable length under a limit of tokens, always the longest
document left into the pack with the least work, and holds outliers back until there is one for every pack. In a window:

1. Documents whose weight alone is more than a mean pack's are outliers. From long to short, as many as a step has packs
   make a group of near-equal ones, and each group goes into a step drawn at random.
2. All others stay in their random order, and are spread over the steps so that all hold near-equal tokens.
3. Within a step, pieces go from long to short into the pack with the least weight that has room; what finds none waits
   for the next step.

Weight is the sum of squared lengths (`pack_weight`). Ours: the windows, which bound how far a document moves and keep
nothing beyond a window for a checkpoint to hold, where WLB-LLM has queues by fixed thresholds and without a deadline;
no term for work that is linear in tokens (packs of a step without outliers come out near-equal in it, too).
"""

from __future__ import annotations

import numpy as np

from hsap.data.packing.long import cut
from hsap.data.packing.packs import Packs, Pieces
from hsap.loops import loop

FILL = 0.97
"""Part of a step's tokens that is used: the room left is what lets weights become equal."""
SHARE = 0.2
"""Part of a pack's weight that a document may have and not be an outlier."""


def balanced(
    pieces: Pieces, uncut: np.ndarray, pack_tokens: int, packs_per_step: int, random: np.random.Generator
) -> Packs:
    """Pack pieces into whole steps of `packs_per_step` packs, some of which may be empty.

    uncut: bool [num_pieces]. Of pieces longer than a pack these get one of their own, and the others are cut.
    """
    pieces, _ = cut(pieces, uncut, pack_tokens)
    if not len(pieces):
        return Packs(pieces, np.zeros(1, np.int64))
    tokens = pieces.tokens
    step, num_steps = _steps(tokens, pack_tokens, packs_per_step, random)
    order = np.lexsort((-tokens, step))
    borders = np.searchsorted(step[order], np.arange(num_steps + 1))
    step, number = np.divmod(_deal(tokens[order], borders, packs_per_step, pack_tokens), packs_per_step)
    used, step = np.unique(step, return_inverse=True)  # of few documents, a step may have got none
    pack = np.empty(len(pieces), np.int64)
    pack[order] = step * packs_per_step + number
    return Packs.gathered(pieces, pack, len(used) * packs_per_step)


def _steps(
    tokens: np.ndarray, pack_tokens: int, packs_per_step: int, random: np.random.Generator
) -> tuple[np.ndarray, int]:
    """The step that each piece is for, int64 [num_pieces] from 0, and the number of steps."""
    step = np.empty(len(tokens), np.int64)
    long_first = np.argsort(-tokens, kind="stable")
    num_outliers = _count_outliers(tokens[long_first], pack_tokens)
    outliers, others = long_first[:num_outliers], np.sort(long_first[num_outliers:])
    group = np.arange(num_outliers) // packs_per_step
    num_steps = int(np.ceil(np.minimum(tokens, pack_tokens).sum() / (FILL * packs_per_step * pack_tokens)))
    group_step, num_steps = _spread(tokens[outliers[::packs_per_step]], num_steps, pack_tokens)
    step[outliers] = group_step[group]
    taken = np.bincount(step[outliers], tokens[outliers], minlength=num_steps)
    quota = np.cumsum(np.maximum(tokens.sum() / num_steps - taken, 1.0))
    middle = np.cumsum(tokens[others]) - tokens[others] / 2
    at = np.searchsorted(quota, middle * (quota[-1] / max(tokens[others].sum(), 1)))
    step[others] = np.minimum(at, num_steps - 1)  # the last middle may round up to the last border
    return random.permutation(num_steps)[step], num_steps


def _count_outliers(long_first: np.ndarray, pack_tokens: int) -> int:
    """How many of the longest are too long to be evened out by what comes after them."""
    tokens = long_first[::-1].astype(np.float64)
    pack_weight = FILL * pack_tokens * np.cumsum(tokens**2) / np.cumsum(tokens)
    evened = np.flatnonzero(tokens**2 <= SHARE * pack_weight)
    return len(tokens) - (evened[-1] + 1 if len(evened) else 0)


@loop
def _spread(sizes: np.ndarray, num_steps: int, pack_tokens: int) -> tuple[np.ndarray, int]:
    """The step of each group, from long to short the one with the most room; another step where there is none."""
    step = np.empty(len(sizes), np.int64)
    room = np.full(num_steps + len(sizes), pack_tokens)
    for i in range(len(sizes)):
        best = 0
        for k in range(1, num_steps):
            if room[k] > room[best]:
                best = k
        if room[best] < min(sizes[i], pack_tokens):
            best = num_steps
            num_steps += 1
        step[i] = best
        room[best] -= sizes[i]
    return step, num_steps


@loop
def _deal(tokens: np.ndarray, borders: np.ndarray, packs_per_step: int, pack_tokens: int) -> np.ndarray:
    """The pack of each piece; pieces of step i are borders[i] to borders[i + 1], from long to short."""
    pack = np.empty(len(tokens), np.int64)
    waiting = np.empty(len(tokens), np.int64)
    left = np.empty(len(tokens), np.int64)
    num_waiting = 0
    step = 0
    while step < len(borders) - 1 or num_waiting:
        at, end = (borders[step], borders[step + 1]) if step < len(borders) - 1 else (0, 0)
        weight = np.zeros(packs_per_step, np.float64)
        room = np.full(packs_per_step, pack_tokens)
        num_left = 0
        i = 0
        while i < num_waiting or at < end:
            if at >= end or (i < num_waiting and tokens[waiting[i]] >= tokens[at]):
                piece = waiting[i]
                i += 1
            else:
                piece = at
                at += 1
            best = -1
            for k in range(packs_per_step):
                fits = tokens[piece] <= room[k] or weight[k] == 0
                if fits and (best < 0 or weight[k] < weight[best]):
                    best = k
            if best < 0:
                left[num_left] = piece
                num_left += 1
                continue
            pack[piece] = step * packs_per_step + best
            room[best] -= tokens[piece]
            weight[best] += float(tokens[piece]) ** 2
        waiting, left = left, waiting
        num_waiting = num_left
        step += 1
    return pack
