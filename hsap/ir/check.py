"""Checks that value classes make of what they are given, and the limits that all of them and the verifier share."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable
from types import UnionType
from typing import Any

from hsap.ir.slice import UNBOUNDED

MAX_TOKENS = 1 << 24
MAX_RANKS = 1 << 12
MAX_HEADS = (1 << 15) - 1
MAX_HEAD_DIM = 1 << 16
MAX_EXCESS = 100
"""Limits under which no product of counts leaves int64. Tables of one integer a token are made: 128 MiB at most."""
MAX_LAYERS = 1 << 16
"""Layers of a mask."""
MAX_SLICES = 1 << 21
"""Slices of a batch over all its masks: six integers each, 96 MiB. A short mask could ask for one a token."""
MAX_ELEMENTS = 1 << 56
"""Tokens times query heads times head_dim (and two statistics) times ranks. In a direction a rank gets no row of q, kv,
o, do, dq or dkv more than twice, of 8 bytes an element: sums of bytes over all ranks are below 2^63."""


class Refused(ValueError):
    """What is asked for can't be had, as one paragraph says: what was wrong, where, what to do.

    A class of its own, so that who tries several ways (planner auto) doesn't take a mistake of ours for a refusal:
    NumPy's own errors are ValueErrors too.
    """


def shown(value: Any) -> str:
    """Print a value for a message: shortened, on one line."""
    try:
        return " ".join(reprlib.repr(value).split())
    except ValueError:  # an integer of more digits than Python prints
        return "an integer of thousands of digits"


MAX_SHOWN = 300
"""Characters of what somebody else wrote that a message repeats."""


def printable(text: object) -> str:
    """Print a text on one line, with what a terminal would act on escaped."""
    line = " ".join(str(text).split())
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def one_line(text: object) -> str:
    """Print what isn't ours, a name or another's error, for a message: on one line, a long one without its middle."""
    line = printable(text)
    return line if len(line) <= MAX_SHOWN else f"{line[: MAX_SHOWN // 2]} … {line[-MAX_SHOWN // 2 :]}"


def whole(name: str, value: Any, low: int = 1, high: int = UNBOUNDED) -> int:
    """Give a whole number in [low, high] as an int; ValueError for others, floats and truth values included."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and low <= int(value) <= high:
        return int(value)
    raise Refused(f"{name} is {shown(value)}; it must be a whole number from {low} to {high}")


def wholes(name: str, values: Any, low: int = 1, high: int = UNBOUNDED) -> tuple[int, ...]:
    """Give whole numbers in [low, high] as a tuple of ints; ValueError names the first that is none."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise Refused(f"{name} is {shown(values)}; it must be a list of whole numbers")
    values = tuple(values)
    if set(map(type, values)) <= {int} and (not values or low <= min(values) <= max(values) <= high):
        return values  # at once: a batch has thousands
    return tuple(whole(f"{name}[{i}]", value, low, high) for i, value in enumerate(values))


def number(name: str, value: Any, zero: bool = False) -> float:
    """Give a finite number above 0 (or from 0) as a float; ValueError for others, truth values included."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        given = float(value) if real else math.nan
    except OverflowError:
        given = math.inf
    if 0 < given < math.inf or (zero and given == 0):
        return given
    raise Refused(f"{name} is {shown(value)}; it must be a finite number {'from' if zero else 'above'} 0")


def excess(name: str, value: Any) -> float:
    """Give how far something may exceed its mean, from 0 to `MAX_EXCESS`, as a float; ValueError for others."""
    given = number(name, value, zero=True)
    if given > MAX_EXCESS:
        raise Refused(f"{name} is {shown(value)}; it must be from 0 to {MAX_EXCESS}: 0.05 allows 5 % over the mean")
    return given


def instance(name: str, value: Any, kind: type | UnionType, example: str) -> Any:
    """Give a value of that kind; ValueError says what was given, and what to give."""
    if not isinstance(value, kind):
        raise Refused(f"{name} is {shown(value)}, of type {type(value).__name__}; give {example}")
    return value


def texts(name: str, value: Any) -> list[str]:
    """Give a list of JSON that has texts alone; ValueError."""
    for i, one in enumerate(instance(name, value, list, "a list of texts")):
        instance(f"{name}[{i}]", one, str, "a text")
    return value


def fields(name: str, value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Give an object of JSON that has these fields and no others; ValueError."""
    if set(instance(name, value, dict, "an object")) != set(names):
        raise Refused(f"{name} has the fields {shown(sorted(value))}; it must have {', '.join(names)}")
    return value


def one_of(what: str, value: Any, known: Iterable[str], ones: str = "ones") -> str:
    """Give a name that is known; ValueError lists those that are."""
    if not isinstance(value, str) or value not in known:
        raise Refused(f"{what} {shown(value)}; known {ones} are {', '.join(known)}")
    return value
