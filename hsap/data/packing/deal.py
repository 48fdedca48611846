"""Deal: which data-parallel rank gets which packs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from hsap.data.packing.packs import Pack, pack_weight
from hsap.ir.check import whole


def deal(packs: Sequence[Pack], dp_rank: int, dp_size: int, micro_packs: int = 1) -> list[list[Pack]]:
    """Deal the packs of a step to data-parallel ranks: this rank's micro-batches, each of `micro_packs` packs.

    Packs go from large to small weight in rounds of dp_size × micro_packs, one micro-batch to each rank a
    round, the next pack always to the least loaded rank that still has room. So ranks carry near-equal weight over the
    step and in each micro-step, and the largest micro-batch comes first. Over all ranks every pack is dealt once.
    Errors (ValueError): a number of packs that doesn't divide.
    """
    check_dealing(len(packs), dp_size, micro_packs)
    return deal_all(packs, dp_size, micro_packs)[whole("data-parallel rank", dp_rank, 0, dp_size - 1)]


def deal_all(packs: Sequence[Pack], dp_size: int, micro_packs: int = 1) -> list[list[list[Pack]]]:
    """Deal the packs of a step as `deal` does: the micro-batches of every data-parallel rank."""
    dealt = deal_by_weight([pack_weight(pack) for pack in packs], dp_size, micro_packs)
    return [[[packs[index] for index in micro] for micro in mine] for mine in dealt.tolist()]


def deal_by_weight(weights: Sequence[int], dp_size: int, micro_packs: int = 1) -> np.ndarray:
    """Deal packs of these weights as `deal` does: the index of each, int64 [dp_size, num_micro_steps, micro_packs]."""
    check_dealing(len(weights), dp_size, micro_packs)
    descending = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
    loads = [0] * dp_size
    dealt: list[list[int]] = [[] for _ in range(dp_size)]
    round_packs = dp_size * micro_packs
    for first in range(0, len(weights), round_packs):
        waiting = list(zip(loads, range(dp_size)))
        heapify(waiting)
        for index in descending[first : first + round_packs]:
            load, rank = waiting[0]
            dealt[rank].append(index)
            loads[rank] = load + weights[index]
            if len(dealt[rank]) * round_packs < (first + round_packs) * micro_packs:
                heapreplace(waiting, (loads[rank], rank))
            else:
                heappop(waiting)
    return np.array(dealt, np.int64).reshape(dp_size, -1, micro_packs)


def check_dealing(packs_per_step: int, dp_size: int, micro_packs: int) -> None:
    """Refuse a step's packs that dp × micro-batches don't divide; ValueError says what would."""
    whole("train.packs_per_step", packs_per_step, 0)
    whole("the data-parallel size", dp_size)
    whole("train.micro_packs", micro_packs)
    share = dp_size * micro_packs
    if packs_per_step % share == 0:
        return
    near = sorted({max(packs_per_step // share, 1) * share, (packs_per_step // share + 1) * share})
    micro = [m for m in range(1, packs_per_step // dp_size + 1) if packs_per_step % (dp_size * m) == 0]
    other = f", or with train.packs_per_step={packs_per_step} train.micro_packs={' or '.join(map(str, micro))}"
    raise ValueError(
        f"train.packs_per_step={packs_per_step} doesn't divide over dp={dp_size} SP groups holding "
        f"train.micro_packs={micro_packs} packs each: it must be a multiple of {share}. "
        f"Nearest that fit: {' or '.join(map(str, near))}{other if micro else ''}."
    )
