"""Buffers: live ranges become places in the arena (HSAP §3.4).

First fit in order of first use: a rank has few buffers alive at once, so the search is short, and a place freed is the
first one taken again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.ir.effects import NUM_OPERANDS, wait_of
from hsap.ir.precision import aligned
from hsap.ir.program import NONE, Programs, Space
from hsap.loops import loop


def place_buffers(programs: Programs) -> Programs:
    """Give every arena buffer its offset [bytes].

    Instruction indices rise over all ranks, so that buffers of two ranks are never alive together: one walk serves all.
    """
    buffers = programs.buffers
    num_operands = NUM_OPERANDS[programs.op]
    last = np.full(len(buffers), -1)
    _last_uses(num_operands, programs.buf, wait_of(programs), last)
    sizes = np.where(buffers.space == Space.ARENA, aligned(buffers.num_bytes), NONE)
    offset = np.where(sizes < 0, NONE, 0)
    _first_fit(num_operands, programs.buf, last, sizes, sizes < 0, np.empty((3, len(sizes)), np.int64), offset)
    return replace(programs, buffers=replace(buffers, offset=offset))


@loop
def _last_uses(num_operands: np.ndarray, buf: np.ndarray, until: np.ndarray, last: np.ndarray) -> None:
    """Raise `last`, from -1, to the last instruction during which each buffer must be left alone.

    num_operands: of each instruction. until: what `wait_of` gives: transfers hold their buffer until their wait.
    """
    for i in range(len(num_operands)):
        for k in range(num_operands[i]):
            last[buf[i, k]] = max(last[buf[i, k]], max(until[i], i))


@loop
def _first_fit(
    num_operands: np.ndarray,
    buf: np.ndarray,
    last: np.ndarray,
    sizes: np.ndarray,
    placed: np.ndarray,
    room: np.ndarray,
    offset: np.ndarray,
) -> None:
    """Set the offsets of buffers in the arena so that those alive together don't overlap.

    sizes: aligned bytes. placed: True for buffers outside the arena. room: int64 [3, num_buffers]. What is alive is
    kept in order of address; the dead leave when a new one comes. Of several that begin with one instruction, the
    lowest index is placed first.
    """
    begin, end, until = room[0], room[1], room[2]
    num_alive = 0
    for now in range(len(num_operands)):
        for _ in range(num_operands[now]):
            new = len(sizes)
            for k in range(num_operands[now]):
                if not placed[buf[now, k]]:
                    new = min(new, buf[now, k])
            if new == len(sizes):
                break
            placed[new] = True
            place, at, kept = 0, -1, 0
            for entry in range(num_alive):
                if until[entry] < now:
                    continue
                begin[kept], end[kept], until[kept] = begin[entry], end[entry], until[entry]
                if at < 0:
                    if begin[kept] - place >= sizes[new]:
                        at = kept
                    else:
                        place = end[kept]
                kept += 1
            offset[new] = place
            num_alive = kept
            if sizes[new]:
                at = num_alive if at < 0 else at
                for entry in range(num_alive, at, -1):
                    begin[entry], end[entry], until[entry] = begin[entry - 1], end[entry - 1], until[entry - 1]
                begin[at], end[at], until[at] = place, place + sizes[new], last[new]
                num_alive += 1
