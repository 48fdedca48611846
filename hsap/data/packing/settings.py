"""Settings of packing: which policy, how long packs are, and what may become of documents that are longer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hsap.ir.check import MAX_TOKENS, Refused, one_of, shown, whole, wholes

POLICIES = ("best_fit", "balanced", "concat")
"""Each has a file that packs, and in `Windows` a method that feeds it."""
LONG_DOCUMENTS = ("cut", "keep", "drop")
WINDOW = 1 << 19
"""Documents that are looked at together: half a million pack in a third of a second, and fill 99.9 % of 128K tokens."""
MAX_DELAY_STEPS = 128
"""Steps that `balanced` looks at together: enough that long documents find their like on long-tailed data."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How documents become packs; a stage of it is a range of steps whose packs are equally long.

    pack_tokens: tokens of a pack. policy: one of `POLICIES`. window: documents looked at together, at most.
    long_documents: `cut` those longer than a pack into packs and a rest; `keep` them whole, each in a pack of its own,
    up to max_document_tokens, and cut the others; or `drop` them. Documents that may not be cut are dropped where
    others are cut. max_delay_steps: how far `balanced` may move a document. curriculum: (step, pack_tokens), ...: from
    that step on packs have so many tokens. Errors (ValueError): settings that can't work.
    """

    pack_tokens: int
    policy: str = "best_fit"
    window: int = WINDOW
    long_documents: str = "cut"
    max_document_tokens: int | None = None
    max_delay_steps: int = MAX_DELAY_STEPS
    curriculum: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        whole("data.pack_tokens", self.pack_tokens, 1, MAX_TOKENS)
        one_of("data.packing: unknown policy", self.policy, POLICIES)
        whole("packing: window", self.window)
        one_of("data.long_documents: unknown choice", self.long_documents, LONG_DOCUMENTS)
        whole("data.max_delay_steps", self.max_delay_steps)
        object.__setattr__(self, "curriculum", _checked(self.curriculum))
        longest = max(tokens for _, tokens in self.stages)
        if (self.long_documents == "keep") != (self.max_document_tokens is not None):
            raise Refused(
                f"data.long_documents={self.long_documents} with data.max_document_tokens="
                f"{shown(self.max_document_tokens)}; the limit is needed by keep, and by nothing else"
            )
        if self.max_document_tokens is not None:
            name = "data.max_document_tokens (at least a pack)"
            whole(name, self.max_document_tokens, longest, MAX_TOKENS)

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """First step and pack_tokens of each stage, the first of which begins with step 1."""
        return ((1, self.pack_tokens), *self.curriculum)

    @property
    def max_pack_tokens(self) -> int:
        """The most tokens that a pack can have at any step."""
        return max(*(tokens for _, tokens in self.stages), self.max_document_tokens or 1)

    def stage(self, step: int) -> int:
        """Index of the stage that a step belongs to."""
        return max(index for index, (first, _) in enumerate(self.stages) if first <= step)


def _checked(curriculum: Any) -> tuple[tuple[int, int], ...]:
    """Give a curriculum as tuples; ValueError where it is none."""
    sound = isinstance(curriculum, (list, tuple)) and all(
        isinstance(stage, (list, tuple)) and len(stage) == 2 for stage in curriculum
    )
    if not sound:
        raise Refused(
            f"data.curriculum is {shown(curriculum)}; give [[step, pack_tokens], ...]: from that step on packs have so "
            "many tokens"
        )
    pairs = (wholes(f"data.curriculum[{i}]", stage, 1, MAX_TOKENS) for i, stage in enumerate(curriculum))
    stages = tuple((step, pack_tokens) for step, pack_tokens in pairs)
    steps = [1, *(step for step, _ in stages)]
    if any(a >= b for a, b in pairwise(steps)):
        raise Refused(
            f"data.curriculum has the steps {shown(steps[1:])}; they must ascend and begin after step 1, whose packs "
            "have data.pack_tokens"
        )
    return stages
