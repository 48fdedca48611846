"""Rope scaling: how a model made for short documents was taught longer ones, in one word that a configuration holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

NUMBERS = {"none": (), "linear": ("factor",), "llama3": ("factor", "low", "high", "original_tokens")}
"""Kinds, and the numbers that follow each of them in its text."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """What is done to rotary embedding's frequencies; `parse` reads it from text, `str` gives that.

    none: nothing. linear:FACTOR: every frequency is divided, as positions would be (Chen et al. 2023). llama3:
    FACTOR,LOW,HIGH,ORIGINAL_TOKENS (Llama 3.1): of the frequencies, those that turn fewer than `low` times in the
    documents the model was first trained on, of `original_tokens`, are divided by the factor, those that turn more than
    `high` times are kept, and between there is a straight line from one to the other.
    """

    kind: str = "none"
    factor: float = 1.0
    low: float = 0.0
    high: float = 1.0
    original_tokens: float = 1.0

    def __post_init__(self) -> None:
        for name in NUMBERS[self.kind]:
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name} is {value}: expected a number above 0")
        if self.low >= self.high:
            raise ValueError(f"low is {self.low:g} and high {self.high:g}: high must be more")

    @classmethod
    def parse(cls, text: str) -> RopeScaling:
        """Read it from text; ValueError says what the text should be."""
        kind, _, rest = text.partition(":")
        names = NUMBERS.get(kind)
        words = rest.split(",") if rest else []
        if names is None or len(words) != len(names):
            spellings = ", ".join(
                f"{kind}:{','.join(numbers).upper()}".rstrip(":") for kind, numbers in NUMBERS.items()
            )
            raise ValueError(f"expected one of {spellings}")
        try:
            numbers = [float(word) for word in words]
        except ValueError:
            raise ValueError(f"expected numbers after {kind}:") from None
        return cls(kind, **dict(zip(names, numbers, strict=True)))

    def __str__(self) -> str:
        numbers = (_shortest(getattr(self, name)) for name in NUMBERS[self.kind])
        return f"{self.kind}:{','.join(numbers)}".rstrip(":")


def _shortest(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)
