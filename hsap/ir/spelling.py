"""Spelling: the words of the text form, and how a line of them is read.

Instructions are spelt as in the paper's Table 1 (HSAP §3.1); `launch`, `wait`, `merge`, `sum`
and `all-to-all` are ours.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

from hsap.ir.check import shown
from hsap.ir.heads import HeadRun, HeadShape
from hsap.ir.program import NONE, Buffers, Op, Role, Space

HEADER = "hsap-plan-text 1"
"""First line of a plan's text."""

MNEMONICS = {
    Op.SEND: "create $send-op",
    Op.RECV: "create $recv-op",
    Op.LAUNCH: "launch",
    Op.WAIT: "wait",
    Op.ATTEND: "compute",
    Op.ATTEND_GRAD: "compute-grad",
    Op.MERGE: "merge",
    Op.SUM: "sum",
    Op.COPY: "copy",
    Op.ALL_TO_ALL: "all-to-all",
}
"""How each op is written; a copy's role is joined to it, as in `copy-q`."""

ROLES: dict[Role, str] = {role: role.name.lower() for role in Role if role != Role.NONE}
_ROLE_OF = {role.name.lower(): role for role in Role}
_OP_OF = {word: op for op, word in MNEMONICS.items() if " " not in word} | {"computing": Op.ATTEND}
_CREATED = {"$send-op": Op.SEND, "$recv-op": Op.RECV}


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("N", "(-?[0-9]{1,19})"))


class Words:
    """The words of one line, taken from the left; every complaint names the line and what was expected."""

    def __init__(self, number: int, text: str) -> None:
        self.number, self.words, self.at = number, [*text.split(), ""], 0

    def fail(self, expected: str) -> ValueError:
        """Make the error that says what should stand here."""
        found = shown(self.peek()) if self.peek() else "the end of the line"
        return ValueError(f"line {self.number}: expected {expected}, found {found}")

    def peek(self) -> str:
        """The next word, empty at the end of the line."""
        return self.words[self.at]

    def take(self, pattern: str, expected: str) -> re.Match[str]:
        """Take the next word, which must match as a whole."""
        match = _compiled(pattern).fullmatch(self.peek())
        if not match:
            raise self.fail(expected)
        self.at += 1
        return match

    def word(self, *words: str) -> None:
        """Take exactly these words."""
        for word in words:
            if not self.skip(word):
                raise self.fail(repr(word))

    def skip(self, word: str) -> bool:
        """Take this word if it comes next."""
        found = self.peek() == word
        self.at += found
        return found

    def integers(self, pattern: str, expected: str, bits: int = 64) -> list[int]:
        """Take one word whose groups are signed integers of that many bits; `N` in a pattern is one."""
        start = self.at
        out = [int(group) for group in self.take(pattern, expected).groups()]
        limit = 1 << (bits - 1)
        if min(out) < -limit or max(out) >= limit:
            self.at = start
            raise self.fail(f"{expected} within {bits} bits")
        return out

    def integer(self, expected: str = "a number", bits: int = 64) -> int:
        return self.integers("N", expected, bits)[0]

    def place(self, name: str, what: str) -> None:
        """Take a running number as it must be at this place, as in `#12`."""
        if not self.skip(name):
            raise self.fail(f"{name}, the number of the next {what}")

    def role(self) -> Role:
        """Take `$q`, `$kv`, …"""
        if self.peek()[1:] not in _ROLE_OF or self.peek()[:1] != "$":
            raise self.fail("a role, one of " + " ".join(f"${name}" for name in ROLES.values()))
        self.at += 1
        return _ROLE_OF[self.words[self.at - 1][1:]]

    def operation(self) -> tuple[Op, Role, int, tuple[str, ...]]:
        """Take what an instruction does: (op, role, peer, names of the buffers a copy goes from and to)."""
        if self.skip("create"):
            if self.peek() not in _CREATED:
                raise self.fail("$send-op or $recv-op")
            op = _CREATED[self.words[self.at]]
            self.at += 1
            return op, self.role(), self.integers("%N", "a peer, as in %3", 32)[0], ()
        name, _, role = self.peek().partition("-")
        if self.peek() == "copy" or (name == "copy" and role in _ROLE_OF):
            self.at += 1
            names = tuple(self.take(r"\$([a-z]+)", "a buffer, as in $local")[1] for _ in range(2))
            return Op.COPY, _ROLE_OF.get(role, Role.NONE), NONE, names
        if self.peek() not in _OP_OF:
            raise self.fail("an instruction: create, copy-q, " + ", ".join(w for w in _OP_OF if w != "copy"))
        self.at += 1
        op = _OP_OF[self.words[self.at - 1]]
        return op, self.role() if self.peek().startswith("$") else Role.NONE, NONE, ()

    def end(self) -> None:
        """Insist that nothing follows."""
        if self.peek():
            raise self.fail("the end of the line")


def whole_share(heads: HeadShape, intra_sp: int, rank: int) -> list[int]:
    """Heads of a rank's whole share, numbered within it, as in `Programs.heads`."""
    share = _shares(heads, intra_sp)[rank % intra_sp]
    return [0, share.q_count, 0, share.kv_count]


@functools.lru_cache(maxsize=8)
def _shares(heads: HeadShape, intra_sp: int) -> tuple[HeadRun, ...]:
    """The shares of all ranks, which are asked for rank by rank."""
    return heads.shares(intra_sp)


def place_names(buffers: Buffers, rank: int, indices: Iterable[int]) -> tuple[str, ...]:
    """Name where buffers live as the paper does: local (the caller's tensors), comm, or comp (accumulators)."""
    first, stop = buffers.offsets[rank], buffers.offsets[rank + 1]
    names = []
    for i in indices:
        if not first <= i < stop:
            names.append("none")
        elif buffers.space[i] != Space.ARENA:
            names.append("local")
        else:
            names.append("comp" if buffers.acc[i] else "comm")
    return tuple(names)
