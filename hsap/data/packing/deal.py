"""Deal: which data-parallel rank gets which packs of a step."""

from __future__ import annotations

from collections.abc import Sequence

from hsap.data.packing.packs import Pack, pack_area
from hsap.ir.check import whole


def deal(packs: Sequence[Pack], dp_rank: int, dp_size: int, micro_packs: int = 1) -> list[list[Pack]]:
    """Deal the packs of a step to data-parallel ranks: this rank's micro-batches, each of `micro_packs` packs.

    Packs go from large to small attention area in rounds of dp_size × micro_packs, one micro-batch to each rank a
    round, the next pack always to the least loaded rank that still has room. So ranks carry near-equal area over the
    step and in each micro-step, and the largest micro-batch comes first. Over all ranks every pack is dealt once.
    Errors (ValueError): a number of packs that doesn't divide.
    """
    check_dealing(len(packs), dp_size, micro_packs)
    return deal_all(packs, dp_size, micro_packs)[whole("data-parallel rank", dp_rank, 0, dp_size - 1)]


def deal_all(packs: Sequence[Pack], dp_size: int, micro_packs: int = 1) -> list[list[list[Pack]]]:
    """Deal the packs of a step as `deal` does: the micro-batches of every data-parallel rank."""
    check_dealing(len(packs), dp_size, micro_packs)
    areas = [pack_area(pack) for pack in packs]
    descending = sorted(range(len(packs)), key=lambda index: (-areas[index], index))
    loads = [0] * dp_size
    dealt: list[list[list[Pack]]] = [[] for _ in range(dp_size)]
    round_packs = dp_size * micro_packs
    for first in range(0, len(packs), round_packs):
        hands: list[list[int]] = [[] for _ in range(dp_size)]
        for index in descending[first : first + round_packs]:
            rank = min((rank for rank in range(dp_size) if len(hands[rank]) < micro_packs), key=loads.__getitem__)
            hands[rank].append(index)
            loads[rank] += areas[index]
        for mine, hand in zip(dealt, hands):
            mine.append([packs[index] for index in hand])
    return dealt


def check_dealing(packs_per_step: int, dp_size: int, micro_packs: int) -> None:
    """Refuse a number of packs that data-parallel ranks and micro-batches don't divide."""
    whole("train.packs_per_step", packs_per_step, 0)
    whole("the data-parallel size", dp_size)
    whole("train.micro_packs", micro_packs)
    if packs_per_step % (dp_size * micro_packs):
        unit = dp_size * micro_packs
        below = packs_per_step - packs_per_step % unit
        fitting = f"{below} or {below + unit}" if below else f"{unit}"
        raise ValueError(
            f"train.packs_per_step={packs_per_step} doesn't divide over {dp_size} data-parallel rank(s) × "
            f"train.micro_packs={micro_packs}; set it to a multiple of {unit}, such as {fitting}, or change "
            f"train.micro_packs or the topology"
        )
