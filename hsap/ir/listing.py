"""Listings: instruction streams in the paper's bare spelling, of some of the ranks or all.

The paper prints streams without rounds, buffers or rows (HSAP Figure 3). Such a listing can't be run, but its transfers
can be judged: between two ranks that are both listed, what one sends the other must receive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from hsap.ir.program import Op, Role
from hsap.ir.spelling import Words


class Line(NamedTuple):
    """One instruction as printed. peer: NONE but for transfers. names: the buffers that a copy goes from and to."""

    index: int  # type: ignore[assignment]  # of the instruction; nobody searches the tuple
    op: Op
    role: Role
    peer: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """Printed streams as (rank, lines) pairs, one a rank, in printed order."""

    streams: tuple[tuple[int, tuple[Line, ...]], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.streams)

    @property
    def num_instructions(self) -> int:
        return sum(len(lines) for _, lines in self.streams)

    @property
    def transfers(self) -> list[tuple[int, Line]]:
        """The sends and receives whose two ranks are both listed, as (rank, line) in printed order."""
        listed = {rank for rank, _ in self.streams}
        return [
            (rank, line)
            for rank, lines in self.streams
            for line in lines
            if line.op in (Op.SEND, Op.RECV) and line.peer in listed
        ]


def read_listing(text: str) -> Listing:
    """Read `Rank 0` headings and lines like `4: create $send-op $kv %1`; lines of dots stand for what is left out.

    ValueError: a line that is no instruction, a rank printed twice, an index that doesn't rise.
    """
    streams: dict[int, list[Line]] = {}
    lines: list[Line] | None = None
    for number, raw in enumerate(text.split("\n"), 1):
        words = Words(number, re.sub(r"\$\s+", "$", re.sub(r"^(\s*[0-9]{1,9})\s*:", r"\1: ", raw)))
        if set("".join(words.words)) <= {"…", "."}:
            continue
        if words.peek().lower() == "rank":
            words.at += 1
            rank = words.integers("N:?", "a rank", 32)[0]
            words.end()
            if rank in streams:
                raise ValueError(f"line {number}: rank {rank} is listed twice; join its lines under one heading")
            lines = streams[rank] = []
        elif lines is None:
            raise words.fail("a heading, as in 'Rank 0', or the first line of a plan")
        else:
            lines.append(_read_line(words, lines[-1].index + 1 if lines else 0))
    if not streams:
        raise ValueError("line 1: expected the first line of a plan or a heading, as in 'Rank 0'; the text has neither")
    return Listing(tuple((rank, tuple(found)) for rank, found in streams.items()))


def _read_line(words: Words, at_least: int) -> Line:
    index = at_least
    if words.peek().endswith(":"):
        index = words.integers("N:", "an index, as in 4:", 32)[0]
        if index < at_least:
            words.at -= 1
            raise words.fail(f"an index of at least {at_least}")
    op, role, peer, names = words.operation()
    words.end()
    if op in (Op.SEND, Op.RECV) and (role == Role.NONE or peer < 0):
        raise ValueError(f"line {words.number}: a transfer needs a role and a rank, as in create $send-op $kv %1")
    return Line(index, op, role, peer, names)
